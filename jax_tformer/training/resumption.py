"""What a run needs in order to continue as if it had not stopped: its state, its place in the data, its clock."""

import math
import time

import grain

from jax_tformer.config_file import to_dict
from jax_tformer.data.batches import Batch
from jax_tformer.errors import InputError
from jax_tformer.experiment import ExperimentConfig
from jax_tformer.training.checkpoint import HELD_OUT_LOSS, Checkpoints
from jax_tformer.training.step import TrainState


class Resumption:
    """Saves and restores a training state together with the state of the batches that feed it."""

    def __init__(
        self, checkpoints: Checkpoints, fingerprint: str, experiment: ExperimentConfig, started: float
    ) -> None:
        """`started` is when this session began, by time.perf_counter."""
        self._checkpoints, self._fingerprint, self._experiment = checkpoints, fingerprint, experiment
        self._earlier, self._started, self._best = 0.0, started, math.inf
        self.notes: list[str] = []
        """Which damaged checkpoints were passed over, and why."""

    @property
    def seconds(self) -> float:
        """Time spent on the run so far, in all its sessions."""
        return self._earlier + time.perf_counter() - self._started

    def restore(self, abstract: TrainState, batches: grain.DatasetIterator[Batch]) -> TrainState | None:
        """The newest intact state, with `batches` set to what comes next; None if there is no checkpoint yet.

        `abstract` has the shapes, types and shardings of its arrays. Raises InputError if the data is not what the run
        began with, if checkpoints exist but none is intact, or if they hold other arrays.
        """
        restored = self._checkpoints.restore(abstract._asdict())
        if restored is None:
            return None
        if restored.extra["fingerprint"] != self._fingerprint:
            raise InputError(
                "the text or its tokenizer has changed since the run began; restore it, or start a new run with --run"
            )
        batches.set_state(restored.extra["batches"])
        self._earlier = restored.extra["seconds"]
        self._best = self._checkpoints.best_loss()
        self.notes += restored.skipped
        return TrainState(**restored.state)

    def improves(self, held_out_loss: float | None) -> bool:
        """Whether this is the lowest held-out loss of all that were saved: then the state should be saved too."""
        return held_out_loss is not None and held_out_loss < self._best

    def save(
        self, state: TrainState, batches: grain.DatasetIterator[Batch], held_out_loss: float | None = None
    ) -> None:
        """Saves in the background; `state` may be donated at once. `held_out_loss`: of this state, if it is known."""
        extra = {
            "batches": batches.get_state(),
            "fingerprint": self._fingerprint,
            "seconds": self.seconds,
            "config": to_dict(self._experiment),
            HELD_OUT_LOSS: held_out_loss,
        }
        if held_out_loss is not None:
            self._best = min(self._best, held_out_loss)
        self._checkpoints.save(int(state.step), state._asdict(), extra)
