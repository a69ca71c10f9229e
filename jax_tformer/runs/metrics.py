"""What a run says while it trains: rows of metrics.jsonl and of TensorBoard's files, and a line on the terminal."""

import contextlib
import ctypes
import json
import math
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jax_tformer.config.errors import WHY, TrainingFailed, explained, require
from jax_tformer.config.experiment import ExperimentConfig
from jax_tformer.data.order import Batch
from jax_tformer.files import not_regular, parse_json, shortened, sync, write_text
from jax_tformer.runs.folder import RunFolder
from jax_tformer.terminal import visible
from jax_tformer.training.optimizer import learning_rate
from jax_tformer.training.prepare import product_rate, training_flops
from jax_tformer.training.processes import count, is_first
from jax_tformer.training.sharding import abstract_batch
from jax_tformer.training.step import StepMetrics, TrainState

Row = dict[str, Any]
"""A step, and figures by name; the name of a sentence in place of a figure begins with no_."""
PLAIN_SECONDS = 10.0
"""Seconds between two progress lines without a terminal."""
_BEGUN = re.compile(r"events\.out\.tfevents\.(\d{19})\.")
"""The name of an event file of ours: when it was begun, in nanoseconds."""
_GAP = "  "
_NARROWEST_BAR = 10
_WIDEST_BAR = 60


class MetricsLog:
    """Appends rows to metrics.jsonl, TensorBoard and, for a `project`, trackio; the first process does so for all.

    A run that continues at `step` first drops the rows after it: a killed run may have logged steps after its last
    checkpoint, and will make them again. If lines are damaged, keeps a copy of the file. The constructor and the
    methods raise InputError if the disk is full.
    """

    def __init__(self, folder: RunFolder, step: int, project: str | None = None, config: Any = None) -> None:
        self.notes: list[str] = []
        """What is wrong with an existing file."""
        self._path = folder.metrics
        if not is_first():
            return
        rows = read_metrics(self._path, self.notes)
        with self._full_disk_told():
            if self.notes:
                kept = self._path.with_name(self._path.name + ".damaged")
                shutil.copyfile(self._path, kept)
                self.notes[-1] += f"; the original file is {kept.name}"
            write_text(self._path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
            self._board = _TensorBoard(folder.tensorboard, step + 1)
        self._tracker = None
        if project is not None:
            import trackio

            # Goes on with the run of this name.
            self._tracker = trackio.init(project=project, name=folder.path.name, config=asdict(config), resume="allow")

    def write(self, row: Row) -> None:
        """Writes a row; sentences in place of figures go to metrics.jsonl only, and what is not finite nowhere."""
        if not is_first():
            return
        row = {name: x for name, x in row.items() if isinstance(x, str) or math.isfinite(x)}
        with self._full_disk_told():
            # Opened each time, so that a full disk fails here and not again at exit.
            with open(self._path, "a") as file:
                file.write(json.dumps(row) + "\n")
            self._board.write(row)
        if self._tracker:
            self._tracker.log({name: x for name, x in row.items() if name != "step"}, step=row["step"])

    def sync(self) -> None:
        """Flushes all rows to the disk; call it before a checkpoint."""
        if is_first():
            with self._full_disk_told():
                sync(self._path)

    def close(self) -> None:
        """Ends what trackio follows; nothing can be written afterwards."""
        if is_first() and self._tracker:
            self._tracker.finish()

    def _full_disk_told(self) -> contextlib.AbstractContextManager[None]:
        return explained(
            f"cannot write to {self._path}: {WHY}; make room, and the same command continues the run from its newest "
            "checkpoint"
        )


class _TensorBoard:
    """An event file of TensorBoard: protocol buffers, each between its length and a checksum.

    The packages that write such files import TensorFlow, or PyTorch if it is installed, which takes a second or more.
    A session log at the beginning hides the steps from `first` on that earlier sessions wrote. TensorBoard reads the
    files by name, and where one was begun with a clock that went back it would take the later steps for older ones.
    """

    def __init__(self, folder: Path, first: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        before = (_BEGUN.match(path.name) for path in folder.iterdir())
        begun = max([time.time_ns(), *(int(found[1]) + 1 for found in before if found)])
        self._time = begun / 1e9
        self._path = folder / f"events.out.tfevents.{begun}.{os.getpid()}"
        self._event(_field(3, b"brain.Event:2"))
        self._event(_field(2, first) + _field(7, _field(1, 1)))  # a session log that says START

    def write(self, row: Row) -> None:
        """Writes the figures of `row`."""
        figures = {name: x for name, x in row.items() if name != "step" and not isinstance(x, str)}
        # Of float64, what float32 cannot hold becomes infinite.
        values = (
            _field(1, _field(1, name.encode()) + b"\x15" + bytes(ctypes.c_float(x))) for name, x in figures.items()
        )
        self._event(_field(2, row["step"]) + _field(5, b"".join(values)))

    def _event(self, fields: bytes) -> None:
        self._time = max(self._time, time.time())
        event = b"\x09" + struct.pack("<d", self._time) + fields
        length = struct.pack("<Q", len(event))
        with open(self._path, "ab") as file:
            file.write(length + _checksum(length) + event + _checksum(event))


def _field(number: int, value: int | bytes) -> bytes:
    """Encodes a field of a protocol buffer: a whole number, or bytes (text or a message) after their length."""
    if isinstance(value, int):
        return bytes([number << 3]) + _varint(value)
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _checksum(data: bytes) -> bytes:
    """Computes CRC-32C, masked as in TensorBoard's files."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def format_figures(figures: Row) -> str:
    """Formats figures with four decimals, or the sentences in their place, each with its name."""
    return "  ".join(f"{n} ({x})" if isinstance(x, str) else f"{n} {x:.4f}" for n, x in figures.items())


def read_metrics(path: Path, notes: list[str] | None = None) -> list[Row]:
    """Reads the rows of metrics.jsonl without damaged lines; returns [] if there is no file.

    Adds a line to `notes` that names the damaged ones, except for a last one that a kill left unfinished. Raises
    InputError if the path is not a regular file.
    """
    if not path.exists():
        return []
    problem = not_regular(path)
    require(not problem, f"{path} {problem}; expected the log of a run: move it away")
    *lines, unfinished = path.read_bytes().split(b"\n")
    rows = [_row(line) for line in lines]
    damaged = [str(number) for number, row in enumerate(rows, 1) if row is None]
    if damaged and notes is not None:
        which = f"line{'s' if len(damaged) > 1 else ''} {shortened(damaged)}"
        notes.append(f"{path.name} is damaged in {which}: the other {len(rows) - len(damaged):,} are used")
    return [row for row in (*rows, _row(unfinished)) if row is not None]


def _row(line: bytes) -> Row | None:
    """Parses a line of metrics.jsonl; returns None if it is damaged."""
    try:
        row = parse_json(line.decode("utf-8"))
    except ValueError:
        return None
    if not (isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0):
        return None
    sound = (type(x) in (int, float) or (isinstance(x, str) and name.startswith("no_")) for name, x in row.items())
    return row if all(sound) else None


class PatientConsole(Console):
    """A console that raises BrokenPipeError if nobody reads it any more; rich would end the program."""

    def on_broken_pipe(self) -> None:
        """Raises the error that rich is handling."""
        raise BrokenPipeError


@dataclass
class ProgressLine:
    """Shows step, current activity, loss, tokens/s and time left; `say` prints a permanent line.

    Calls `unheard` when nothing can be shown any more, so that the run saves and ends.
    """

    step: int
    """The number of updates so far."""
    steps: int
    """The number of updates at the end."""
    unheard: Callable[[], None] | None
    """None once it was called."""
    console: Console = field(default_factory=lambda: PatientConsole(highlight=False, soft_wrap=True))
    loss: str = ""
    speed: str = ""

    def __post_init__(self) -> None:
        self._live = Live(self, console=self.console, transient=True) if self.console.is_terminal else None
        self._first: tuple[int, float] | None = None
        self._shown = 0.0
        self._doing: tuple[str, float] | None = None

    def __enter__(self) -> "ProgressLine":
        if self._live:
            self._show(self._live.start)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws as much as fits into one line, the most important first, and a bar if there is room."""
        doing = f"{self._doing[0]} {time.perf_counter() - self._doing[1]:.0f} s" if self._doing else ""
        left = self._seconds_left()
        ending = "" if left is None or self._doing else f"{left // 60:.0f}:{left % 60:02.0f} left"
        shown = [f"step {self.step}/{self.steps}"]
        for piece in (doing, self.loss, ending, self.speed):
            if piece and len(_GAP.join([*shown, piece])) <= options.max_width:
                shown.append(piece)
        room = options.max_width - len(_GAP.join([*shown, ""]))
        bar = [ProgressBar(self.steps, self.step, width=min(room, _WIDEST_BAR))] if room >= _NARROWEST_BAR else []
        counter, *others = shown
        line = Table.grid(padding=(0, len(_GAP)))
        line.add_row(Text(counter, no_wrap=True, overflow="ellipsis"), *bar, *others)
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
        self.step = step
        self.loss = f"loss {loss:.4f}"
        self.speed = "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
        now = time.perf_counter()
        first = self._first
        self._first = self._first or (step, now)
        if self._live or (first and now - self._shown < PLAIN_SECONDS):
            return
        self._shown = now
        left = self._seconds_left()
        ending = "" if left is None else f"  {self.speed}  {left:.0f} s left"
        self.say(f"step {step}/{self.steps}  {self.loss}{ending}")

    def say(self, line: str) -> None:
        """Prints a line above the live one."""
        self._show(lambda: self.console.print(visible(line) if self._live else line, markup=False))

    def _show(self, write: Callable[[], None]) -> None:
        """Writes, unless that failed before: a full disk or a lost terminal must not end the training."""
        if self.unheard is None:
            return
        try:
            write()
        except OSError:
            unheard = self.unheard
            self.unheard = None
            unheard()

    def _seconds_left(self) -> float | None:
        """Estimates the seconds left from the pace since this session's first step."""
        if self._first is None or self._first[0] == self.step:
            return None
        return (time.perf_counter() - self._first[1]) / (self.step - self._first[0]) * (self.steps - self.step)


@dataclass
class Spikes:
    """Finds losses far above those before, of which it keeps mean and variance, with weights that fall by 5% a step."""

    steps: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def deviations(self, loss: float) -> float | None:
        """Returns how many standard deviations `loss` is above the mean, if more than 6 and 50 losses are known."""
        above = loss - self.mean
        deviation = math.sqrt(self.variance)
        found = above / deviation if self.steps >= 50 and above > 6 * deviation > 0 else None
        share = max(0.05, 1 / (self.steps + 1))
        self.steps += 1
        self.mean += share * above
        self.variance = (1 - share) * (self.variance + share * above**2)
        return found


@dataclass
class Reporter:
    """Reports each step after the next one has been dispatched, so that the device never waits for the report."""

    experiment: ExperimentConfig
    log: MetricsLog
    line: ProgressLine
    started: float
    """When the program was started, by perf_counter."""
    diagnosis: Callable[[TrainState, Batch], str]
    """Finds what is not finite in a failed step."""
    sound: Callable[[int], None]
    """Is told the number of each step that was finite."""
    epochs: Callable[[int], Row]
    """Says how often the data was read after so many steps."""
    mesh: Mesh
    remembered: Sequence[float]
    """What an earlier session remembered."""

    def __post_init__(self) -> None:
        training = self.experiment.training
        # Compiled as one function, so that the first line does not wait for a dozen compilations.
        self._rate = jax.jit(learning_rate(self.experiment.optimizer, training.steps))
        self._pending: tuple[int, StepMetrics, Batch] | None = None
        self._state: TrainState | None = None
        self._clock: float | None = None
        # Of the steps that count for speed: tokens, seconds, and floating-point operations that they needed.
        self._totals = self._logged = np.zeros(3)
        # What utilization is relative to. It takes half a second, in which nothing else may run.
        rate = product_rate(self.experiment.model.compute.dtype) if training.log_utilization else None
        self._peak = None if rate is None else rate * count()
        self._first_step: float | None = None
        steps, mean, variance, *noise = self.remembered
        self._spikes = Spikes(int(steps), mean, variance)
        # Of the steps that are not logged yet: how many, and the sums of `StepMetrics.noise`.
        self._noise = np.array(noise, float) * training.log_noise_scale

    @property
    def speed(self) -> Row:
        """tokens_per_second (of all processes), seconds_to_first_step (since `started`) and, if asked, utilization.

        tokens_per_second leaves out the first step, and that of each shape of batch, which also compile, and each
        step after an evaluation.
        """
        return {"tokens_per_second": None, "seconds_to_first_step": self._first_step} | self._speed_of(self._totals)

    @property
    def memory(self) -> list[float]:
        """What a later session needs to report as this one would: the losses so far, and what is not yet logged."""
        noise = self._noise if np.isfinite(self._noise).all() else np.zeros(3)
        return [self._spikes.steps, self._spikes.mean, self._spikes.variance, *noise.tolist()]

    def _speed_of(self, totals: np.ndarray) -> Row:
        """Returns tokens_per_second and, if the rate of products was measured, utilization; neither in no time."""
        tokens, seconds, work = totals.tolist()
        if not seconds:
            return {}
        utilization = {} if self._peak is None else {"utilization": work / seconds / self._peak}
        return {"tokens_per_second": round(tokens / seconds, 1)} | utilization

    def step(self, number: int, metrics: StepMetrics, state: TrainState, batch: Batch) -> None:
        """Reports the previous step, and keeps the metrics of update `number`, which made `state` from `batch`.

        Raises TrainingFailed if the previous step's loss or gradient norm is not finite.
        """
        self._state = state
        self.flush()
        self._pending = (number, metrics, batch)

    def check(self) -> None:
        """Raises TrainingFailed if the loss or the gradient norm of the step that is not yet reported is not finite."""
        if self._pending is not None:
            number, metrics, batch = self._pending
            self._require_finite(f"the loss of step {number}", float(metrics.loss), batch)
            self._require_finite(f"the gradient norm of step {number}", float(metrics.gradient_norm), batch)
            self.sound(number)

    def flush(self) -> None:
        """Reports the step that is not yet reported, if any; raises what `check` does."""
        if self._pending is None:
            return
        self.check()
        number, metrics, batch = self._pending
        self._pending = None
        now = time.perf_counter()
        if self._first_step is None:
            self._first_step = now - self.started
        elif self._clock is not None:
            source = batch["source"].shape[1] if "source" in batch else 0
            work = 0.0
            if self._peak is not None:
                # Of all processes; several may make the same rows.
                shape = abstract_batch(self.mesh, batch)["labels"].shape
                work = training_flops(self.experiment.model, *shape, source).needed
            self._totals = np.add(self._totals, (int(metrics.tokens), now - self._clock, work))
        self._clock = now
        loss = float(metrics.loss)
        speed = self._speed_of(self._totals - self._logged)
        self.line.update(number, loss, speed.get("tokens_per_second"))
        row: Row = {"step": number, "loss": loss}
        if (deviations := self._spikes.deviations(loss)) is not None:
            # Batches are numbered from 0.
            row |= {"spike": deviations, "batch": number - 1}
        if metrics.noise is not None:
            self._noise += (1, *map(float, metrics.noise))
        if number % self.experiment.training.log_every == 0:
            rate = float(self._rate(number - 1))
            row |= {"gradient_norm": float(metrics.gradient_norm), "learning_rate": rate}
            for name, x in jax.device_get(metrics.norms).items():
                row |= {f"{name}.{layer}": float(of) for layer, of in enumerate(x)} if x.ndim else {name: float(x)}
            row |= self.epochs(number)
            if self._noise[0]:
                signal, noise = map(float, self._noise[1:] / self._noise[0])
                row |= {"squared_gradient": signal, "gradient_variance": noise}
                row |= {"noise_scale": noise / signal} if signal > 0 else {}
                self._noise[:] = 0
            self.log.write(row | speed)
            self._logged = self._totals
        elif deviations is not None:
            self.log.write(row)

    def pause(self) -> None:
        """Does not count the time from the last report to the next one."""
        self._clock = None

    def evaluation(self, number: int, figures: Row, batch: Batch) -> None:
        """Reports an evaluation after update `number`, which is reported already; its time does not count as training.

        Raises TrainingFailed if the held-out loss is not finite, after a diagnosis with `batch`, an evaluated one.
        """
        self.pause()
        self._require_finite(f"the held-out loss after step {number}", figures["val_loss"], batch)
        self.log.write({"step": number, **figures})
        self.line.say(f"step {number}  {format_figures(figures)}")

    def _require_finite(self, what: str, value: float, batch: Batch) -> None:
        if math.isfinite(value):
            return
        assert self._state is not None
        try:
            where = self.diagnosis(self._state, batch)
        except (RuntimeError, MemoryError):
            # There may be no memory for the search; then report the failure without its place.
            where = ""
        raise TrainingFailed(
            f"{what} is {value}; {where + '; ' if where else ''}saved checkpoints are from before; "
            "try a lower --optimizer.learning-rate or a longer --optimizer.warmup-steps, "
            "with a new --run or --resume no"
        )
