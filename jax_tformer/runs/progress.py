"""Shows and logs a run: a live line, rows of metrics, and the first value that was not finite in a failed step."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Key, PyTree
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jax_tformer.data.batches import Batch
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.config.errors import TrainingFailed
from jax_tformer.config.experiment import ExperimentConfig
from jax_tformer.functional import AnyTransformer, Params
from jax_tformer.lora import join_adapters, split_adapters
from jax_tformer.model.parameters import accumulator
from jax_tformer.runs.results import MetricsLog, Row, described
from jax_tformer.training.sharding import place_batch
from jax_tformer.terminal import visible
from jax_tformer.training.optimizer import learning_rate
from jax_tformer.training.step import StepMetrics, TrainState, batch_loss, dropout_keys, forward

PLAIN_SECONDS = 10.0
"""Seconds between two progress lines without a terminal."""
_GAP, _NARROWEST_BAR, _WIDEST_BAR = 2, 10, 60


class PatientConsole(Console):
    """A console that raises BrokenPipeError if nobody reads it any more; rich would end the program."""

    def on_broken_pipe(self) -> None:
        """Raises the error that rich is handling."""
        raise BrokenPipeError


class ProgressLine:
    """Shows step, current activity, loss, tokens/s and time left; `say` prints a permanent line.

    Calls `unheard` when nothing can be shown any more, so that the run saves and ends.
    """

    def __init__(self, start: int, steps: int, unheard: Callable[[], None], console: Console | None = None) -> None:
        self._console = console or PatientConsole(highlight=False, soft_wrap=True)
        self._unheard: Callable[[], None] | None = unheard
        self._live = Live(self, console=self._console, transient=True) if self._console.is_terminal else None
        self._step, self._steps = start, steps
        self._loss = self._speed = ""
        self._first: tuple[int, float] | None = None
        self._shown = 0.0
        self._doing: tuple[str, float] | None = None

    def __enter__(self) -> "ProgressLine":
        if self._live:
            self._show(self._live.start)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws as much as fits into one line, the most important first, and a bar if there is room."""
        counter = f"step {self._step}/{self._steps}"
        doing = f"{self._doing[0]} {time.perf_counter() - self._doing[1]:.0f} s" if self._doing else ""
        left = self._seconds_left()
        ending = "" if left is None or self._doing else f"{left // 60:.0f}:{left % 60:02.0f} left"
        room = options.max_width - len(counter)
        kept = set()
        for piece in (doing, self._loss, ending, self._speed):
            if piece and len(piece) + _GAP <= room:
                room -= len(piece) + _GAP
                kept.add(piece)
        cells = [piece for piece in (doing, self._loss, self._speed, ending) if piece in kept]
        bar = [ProgressBar(self._steps, self._step, width=min(room - _GAP, _WIDEST_BAR))]
        line = Table.grid(padding=(0, _GAP))
        line.add_row(
            Text(counter, no_wrap=True, overflow="ellipsis"), *(bar if room - _GAP >= _NARROWEST_BAR else []), *cells
        )
        yield line

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Shows `what` and how long it has taken, in place of the time left."""
        self._doing = what, time.perf_counter()
        try:
            yield
        finally:
            self._doing = None

    def update(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Shows the state after `step` updates; the first of a session, which also compiles, has no speed."""
        self._step, self._loss = step, f"loss {loss:.4f}"
        self._speed = "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
        now = time.perf_counter()
        first, self._first = self._first, self._first or (step, now)
        if self._live or (first and now - self._shown < PLAIN_SECONDS):
            return
        self._shown = now
        left = self._seconds_left()
        ending = "" if left is None else f"  {self._speed}  {left:.0f} s left"
        self.say(f"step {step}/{self._steps}  {self._loss}{ending}")

    def say(self, line: str) -> None:
        """Prints a line above the live one."""
        self._show(lambda: self._console.print(visible(line) if self._live else line, markup=False))

    def _show(self, write: Callable[[], None]) -> None:
        """Writes, unless that failed before: a full disk or a lost terminal must not end the training."""
        if self._unheard is None:
            return
        try:
            write()
        except OSError:
            unheard, self._unheard = self._unheard, None
            unheard()

    def _seconds_left(self) -> float | None:
        """Estimates the seconds left from the pace since this session's first step."""
        if self._first is None or self._first[0] == self._step:
            return None
        return (time.perf_counter() - self._first[1]) / (self._step - self._first[0]) * (self._steps - self._step)


DeviceBatch = dict[str, Array]
DropoutKey = Key[Array, ""] | None
_SHOWN = 12
"""Tokens shown of a row, so that it can be found in the data."""


class Reporter:
    """Reports each step after the next one has been dispatched, so that the device never waits for the report."""

    def __init__(
        self,
        experiment: ExperimentConfig,
        log: MetricsLog,
        line: ProgressLine,
        started: float,
        *,
        diagnosis: Callable[[TrainState, Batch], str],
        finite: Callable[[int], None],
    ) -> None:
        """Calls `diagnosis` to find what is not finite in a failed step, and `finite` with the number of each other."""
        self._log, self._line, self._started = log, line, started
        self._diagnosis, self._finite = diagnosis, finite
        self._every = experiment.training.log_every
        # Compiled as one function, so that the first line does not wait for a dozen compilations.
        self._rate = jax.jit(learning_rate(experiment.optimizer, experiment.training.steps))
        self._pending: tuple[int, StepMetrics, Batch] | None = None
        self._state: TrainState | None = None
        self._clock: float | None = None
        self._tokens, self._seconds = 0, 0.0
        self._logged = (0, 0.0)
        self._first_step: float | None = None

    @property
    def speed(self) -> Row:
        """Speed of this process: tokens_per_second and seconds_to_first_step (since `started`); None if unknown.

        tokens_per_second leaves out the first step, which also compiles, and each step after an evaluation.
        """
        tokens_per_second = round(self._tokens / self._seconds, 1) if self._seconds else None
        return {"tokens_per_second": tokens_per_second, "seconds_to_first_step": self._first_step}

    def step(self, number: int, metrics: StepMetrics, state: TrainState, batch: Batch) -> None:
        """Reports the previous step, and keeps the metrics of update `number`, which made `state` from `batch`.

        Raises TrainingFailed if the previous step's loss or gradient norm is not finite.
        """
        self._state = state
        self.flush()
        self._pending = (number, metrics, batch)

    def flush(self) -> None:
        """Reports the step that is not yet reported, if any."""
        if self._pending is None:
            return
        (number, metrics, batch), self._pending = self._pending, None
        loss, tokens = float(metrics.loss), int(metrics.tokens)
        now = time.perf_counter()
        if self._first_step is None:
            self._first_step = now - self._started
        elif self._clock is not None:
            self._seconds += now - self._clock
            self._tokens += tokens
        self._clock = now
        self._check(number, metrics, batch)
        tokens, seconds = self._tokens - self._logged[0], self._seconds - self._logged[1]
        speed = round(tokens / seconds, 1) if seconds else None
        self._line.update(number, loss, speed)
        if number % self._every == 0:
            figures = {"step": number, "loss": loss, "gradient_norm": float(metrics.gradient_norm)}
            figures["learning_rate"] = float(self._rate(number - 1))
            if speed is not None:
                figures["tokens_per_second"] = speed
            self._log.write(figures)
            self._logged = self._tokens, self._seconds

    def unreported(self, number: int, metrics: StepMetrics, state: TrainState, batch: Batch) -> None:
        """Reports the previous step, and checks that update `number`, which is discarded, was finite."""
        self.step(number, metrics, state, batch)
        self._pending = None
        self._check(number, metrics, batch)

    def evaluation(self, number: int, figures: Row, batch: Batch) -> None:
        """Reports an evaluation after update `number`; its time does not count as training.

        Raises TrainingFailed if the held-out loss is not finite, after a diagnosis with `batch`, an evaluated one.
        """
        self.flush()
        self._clock = None
        self._require_finite(f"the held-out loss after step {number}", figures["val_loss"], batch)
        self._log.write({"step": number, **figures})
        self._line.say(f"step {number}  {described(figures)}")

    def _check(self, number: int, metrics: StepMetrics, batch: Batch) -> None:
        self._require_finite(f"the loss of step {number}", float(metrics.loss), batch)
        self._require_finite(f"the gradient norm of step {number}", float(metrics.gradient_norm), batch)
        self._finite(number)

    def _require_finite(self, what: str, value: float, batch: Batch) -> None:
        if math.isfinite(value):
            return
        assert self._state is not None
        try:
            where = self._diagnosis(self._state, batch)
        except (RuntimeError, MemoryError):
            # There may be no memory for the search; then report the failure without its place.
            where = ""
        raise TrainingFailed(
            f"{what} is {value}; {where + '; ' if where else ''}saved checkpoints are from before; "
            "try a lower --optimizer.learning-rate or a longer --optimizer.warmup-steps, "
            "with a new --run or --resume no"
        )


def first_not_finite(
    net: AnyTransformer, mesh: Mesh, tokenizer: Tokenizer, accumulation: int, state: TrainState, batch: Batch
) -> str:
    """Describes the first parameter, layer or gradient that is not finite in a step of `batch`; "" if none is found.

    Runs the model again, as the step did. `state` is that which `train_step` returned for a failed step, with its step
    below 0, or for an evaluation the evaluated state.
    """

    def finite_rows(params: Params, part: DeviceBatch, key: DropoutKey) -> dict[str, Bool[Array, " B"]]:
        """Returns for every layer in turn whether each row of its output is finite."""
        outputs = forward(net, params, part, dropout_key=key, capture=True)
        found = {}
        for stack, captured in (("encoder", outputs.encoder), ("decoder", outputs.decoder)):
            for layer, hidden in enumerate(() if captured is None else captured.hidden):
                found[f"the output of {stack}.blocks.{layer}"] = jnp.isfinite(hidden).all((1, 2))
        # Checks the input of the logits, which would be several times as large as all else.
        return found | {"what the vocabulary projection is given": jnp.isfinite(outputs.hidden).all((1, 2))}

    def squared_gradients(params: Params, part: DeviceBatch, key: DropoutKey) -> Params:
        """Returns the terms of the squared norm, because squares overflow before the numbers do."""
        trains, frozen = split_adapters(params)

        def loss(trains: Params) -> Array:
            return batch_loss(net, join_adapters(trains, frozen), part, dropout_key=key)[0]

        gradients = jax.grad(loss)(trains)
        squared: Params = jax.tree.map(lambda g: jnp.square(g.astype(accumulator(g.dtype))), gradients)
        return squared

    name = _not_finite_in(state.params)
    if name:
        return f"{name} was not finite before it"
    step = int(state.step)
    parts = accumulation if step < 0 else 1
    keys = dropout_keys(net, state._replace(step=jnp.int32(~step)), parts) if step < 0 else None
    ids = batch["source" if "source" in batch else "tokens"]
    rows = len(ids) // parts
    for number in range(parts):
        key = None if keys is None else keys[number]
        with jax.set_mesh(mesh):
            part = place_batch(mesh, {name: x[number * rows : (number + 1) * rows] for name, x in batch.items()})
            for name, finite in jax.device_get(jax.jit(finite_rows)(state.params, part, key)).items():
                if not finite.all():
                    row = number * rows + int(np.argmin(finite))
                    begins = tokenizer.decode(ids[row, :_SHOWN].tolist())
                    where = f"in row {row + 1} of {len(ids)}, which begins {begins!r}"
                    return f"{name} is the first that is not finite, {where}"
            gradients = jax.jit(squared_gradients)(state.params, part, key) if step < 0 else {}
        name = _not_finite_in(gradients)
        if name:
            return f"every layer's output is finite, the norm of the gradient of {name} is not"
    return ""


def _not_finite_in(tree: PyTree[Array]) -> str | None:
    """Returns the name of the first array with a number that is not finite; checks each layer separately."""

    def flags(path: tuple[Any, ...], leaf: Array) -> Bool[Array, " L"]:
        layers = len(leaf) if "blocks" in (key.key for key in path) else 1
        return jnp.isfinite(leaf).reshape(layers, -1).all(1)

    found = jax.device_get(jax.jit(lambda tree: jax.tree_util.tree_map_with_path(flags, tree))(tree))
    for path, finite in jax.tree_util.tree_leaves_with_path(found):
        if not finite.all():
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return name.replace(".blocks.", f".blocks.{int(np.argmin(finite))}.")
    return None
