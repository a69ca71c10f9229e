"""From the metrics of steps to rows, a progress line, and a speed."""

import math
import time
from collections.abc import Callable

import jax

from jax_tformer.data.batches import Batch
from jax_tformer.errors import TrainingFailed
from jax_tformer.experiment import ExperimentConfig
from jax_tformer.run.progress import ProgressLine
from jax_tformer.run.results import MetricsLog, Row, described
from jax_tformer.training.optimizer import learning_rate
from jax_tformer.training.step import StepMetrics, TrainState


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
        """`diagnosis` finds what is not finite where a step is not; `finite` is told the number of each that is."""
        self._log, self._line, self._started = log, line, started
        self._diagnosis, self._finite = diagnosis, finite
        self._every = experiment.training.log_every
        # Compiled as one: operation by operation, the first line of a run would wait for a dozen compilations.
        self._rate = jax.jit(learning_rate(experiment.optimizer, experiment.training.steps))
        self._pending: tuple[int, StepMetrics, Batch] | None = None
        self._state: TrainState | None = None
        self._clock: float | None = None
        self._tokens = self._recent_tokens = 0
        self._seconds = self._recent_seconds = 0.0
        self.seconds_to_first_step: float | None = None
        """From `started` (time.perf_counter) to the first finished step of this process."""
        self.loss = math.nan
        """Of the last step that was reported."""

    @property
    def tokens_per_second(self) -> float | None:
        """Over the steps of this process but the first, which also compiles, and those that follow an evaluation."""
        return round(self._tokens / self._seconds, 1) if self._seconds else None

    def step(self, number: int, metrics: StepMetrics, state: TrainState, batch: Batch) -> None:
        """Takes the metrics of update `number` of `batch`, which made `state`, and reports those before.

        Raises TrainingFailed if a loss or a gradient norm of those is not finite.
        """
        self._state = state
        self.flush()
        self._pending = (number, metrics, batch)

    def flush(self) -> None:
        """Reports what has not been reported."""
        if self._pending is None:
            return
        (number, metrics, batch), self._pending = self._pending, None
        self.loss, tokens = float(metrics.loss), int(metrics.tokens)
        now = time.perf_counter()
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = now - self._started
        elif self._clock is not None:
            self._seconds, self._tokens = self._seconds + now - self._clock, self._tokens + tokens
            self._recent_seconds, self._recent_tokens = (
                self._recent_seconds + now - self._clock,
                self._recent_tokens + tokens,
            )
        self._clock = now
        self._check(number, metrics, batch)
        speed = round(self._recent_tokens / self._recent_seconds, 1) if self._recent_seconds else None
        self._line.update(number, self.loss, speed)
        if number % self._every == 0:
            figures = {"step": number, "loss": self.loss, "gradient_norm": float(metrics.gradient_norm)}
            figures["learning_rate"] = float(self._rate(number - 1))
            if speed is not None:
                figures["tokens_per_second"] = speed
            self._log.write(figures)
            self._recent_tokens, self._recent_seconds = 0, 0.0

    def unreported(self, number: int, metrics: StepMetrics, state: TrainState, batch: Batch) -> None:
        """Reports the steps before, and of update `number`, which is thrown away, only whether it was finite."""
        self.step(number, metrics, state, batch)
        self._pending = None
        self._check(number, metrics, batch)

    def evaluation(self, number: int, figures: Row, batch: Batch) -> None:
        """Reports an evaluation after update `number`; the time that it took does not count as training.

        `batch` is one that was evaluated, to look at if the loss is not finite: TrainingFailed is raised then.
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
            # There may be no room to look; what failed is worth more than where.
            where = ""
        raise TrainingFailed(
            f"{what} is {value}; {where + '; ' if where else ''}what is saved is from before; "
            "try a lower --optimizer.learning-rate or a longer --optimizer.warmup-steps, "
            "with a new --run or --resume no"
        )
