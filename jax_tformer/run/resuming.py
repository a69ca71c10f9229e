"""Continues a run as if it had not stopped: its state, its place in the data, its clock."""

import json
import math
import time
from functools import cached_property
from typing import Any

import grain

from jax_tformer.data.batches import Batch
from jax_tformer.data.tokenizer_sources import tokenizer_digests
from jax_tformer.errors import InputError
from jax_tformer.experiment import ExperimentConfig
from jax_tformer.files import changed_fields, shortened, to_dict
from jax_tformer.run.checkpoints import Checkpoints
from jax_tformer.run.restoring import HELD_OUT_LOSS
from jax_tformer.run.run_folder import RunFolder
from jax_tformer.training.step import TrainState

_ROUNDING = (
    "the same function, summed in another order: numbers from here on may differ from those of one go by rounding"
)
_MEANINGS = {
    "training.steps": "the learning rate follows the same schedule, only longer or shorter",
    "training.log_every": "rows of metrics.jsonl so far stay as they are",
    "training.evaluate_every": "the held-out loss is measured at other steps from here on",
    "training.evaluate_batches": "held-out losses from here on are of other batches than those before",
    "training.checkpoint_every": "checkpoints are saved at other steps from here on",
    "training.keep_checkpoints": "it is the next save that deletes those beyond",
    "training.accumulation": f"{_ROUNDING}, and by what dropout draws",
    "sample": "it is the end of the run that samples so",
    "mesh": _ROUNDING,
    "model.compute.attention": _ROUNDING,
    "model.compute.remat": _ROUNDING,
    "model.compute.unroll": _ROUNDING,
    "data.path": "the text there must be the same",
    "data.target_path": "the text there must be the same",
    "data.tokenizer.name": "it is the tokenizer in the run's folder that is used",
    "data.tokenizer.revision": "it is the tokenizer in the run's folder that is used",
}
"""Field -> what changing it means; the numbers so far do not depend on these, so a run may continue with others."""
_COSINE = (
    "the cosine of the learning rate ends there now: from here on it is another schedule than before, and the steps so "
    "far are not those that a run of this length would have had"
)


Changes = dict[str, tuple[Any, Any]]
"""By field: the value before, the value from now on."""


def permitted_changes(run: ExperimentConfig | None, wanted: ExperimentConfig) -> tuple[Changes, list[str]]:
    """(what continuing `run` as `wanted` changes, what each of it means); nothing where there is no run.

    Raises InputError if the numbers of the run so far would have been others.
    """
    if run is None:
        return {}, []
    fields = changed_fields(to_dict(run), to_dict(wanted))
    meanings = dict(_MEANINGS)
    if run.optimizer.schedule == "cosine":
        meanings["training.steps"] = _COSINE
    notes, refused = [], []
    for name, (before, now) in fields.items():
        told = f"{name}: {json.dumps(before)} -> {json.dumps(now)}"
        meaning = meanings.get(name) or meanings.get(name.partition(".")[0])
        if meaning is None:
            refused.append(told)
        else:
            notes.append(f"changed {told}: {meaning}")
    if refused:
        raise InputError(
            f"the numbers of this run so far would have been others with {shortened(refused)}; "
            "leave that out to continue it, or start afresh with a new --run or --resume no"
        )
    return fields, notes


class Resumption:
    """Saves and restores a training state together with the state of the batches that feed it."""

    def __init__(
        self, run: RunFolder, checkpoints: Checkpoints, fingerprint: str, experiment: ExperimentConfig, started: float
    ) -> None:
        """`started` is when this session began, by time.perf_counter."""
        self._run = run
        self._checkpoints, self._fingerprint, self._experiment = checkpoints, fingerprint, experiment
        self._earlier, self._started, self._best, self._saved = 0.0, started, math.inf, 0
        self.notes: list[str] = []
        """The damaged checkpoints that were skipped, and why."""

    @property
    def seconds(self) -> float:
        """Time spent on the run so far, in all its sessions."""
        return self._earlier + time.perf_counter() - self._started

    def restore(self, abstract: TrainState, batches: grain.DatasetIterator[Batch]) -> TrainState | None:
        """The newest intact state, with `batches` set to what comes next; None if there is no checkpoint yet.

        `abstract` has the shapes, types and shardings of its arrays. Raises InputError if the data is not what the run
        began with, if checkpoints exist but none is intact, if they hold other arrays, or more steps than are wanted,
        or if the model or the tokenizer is another one.
        """
        restored = self._checkpoints.restore(abstract._asdict())
        if restored is None:
            return None
        self._run.require_recorded(restored.extra, restored.step)
        try:
            fingerprint, seconds = restored.extra["fingerprint"], float(restored.extra["seconds"])
            planned = restored.extra["config"]["training"]["steps"]
            batches.set_state(restored.extra["batches"])
        except (LookupError, TypeError, ValueError) as error:
            # It lacks something, or holds something else in its place: Grain checks as little as this does.
            raise InputError(
                f"the checkpoint of step {restored.step} does not say all that training goes on with ({error}); "
                "start a new run with --run"
            ) from error
        if fingerprint != self._fingerprint:
            raise InputError(
                "the text or its tokenizer has changed since the run began; restore it, or start a new run with --run"
            )
        steps, reached = self._experiment.training.steps, restored.step
        if reached > steps or (reached == steps != planned):
            raise InputError(
                f"the run has done {reached} steps, and {steps} are wanted; expected more than {reached} "
                "(--report shows what a run has come to)"
            )
        self._earlier = seconds
        self._best = self._checkpoints.best_loss()
        self.notes += restored.skipped
        return TrainState(**restored.state)

    @cached_property
    def _tokenizer(self) -> dict[str, str]:
        # Read once, at the first save: the files are there by then, and are those that the session works with.
        return tokenizer_digests(self._run.path)

    def improves(self, held_out_loss: float | None) -> bool:
        """Whether this held-out loss is below all that were saved, so that the state should be saved."""
        return held_out_loss is not None and held_out_loss < self._best

    def save(
        self, state: TrainState, batches: grain.DatasetIterator[Batch], held_out_loss: float | None = None
    ) -> None:
        """Begins to save in the background; `state` may be donated at once. Kept is what `finite` then says is sound.

        A state may hold finite numbers and yet be ruined: continued from, it would fail again, for ever.
        `held_out_loss`: of this state, if it is known.
        """
        extra = {
            "batches": batches.get_state(),
            "fingerprint": self._fingerprint,
            "seconds": self.seconds,
            "config": to_dict(self._experiment),
            "tokenizer": self._tokenizer,
            HELD_OUT_LOSS: held_out_loss,
        }
        if held_out_loss is not None:
            self._best = min(self._best, held_out_loss)
        self._saved = int(state.step)
        self._checkpoints.begin(self._saved, state._asdict(), extra)

    def finite(self, step: int) -> None:
        """Keeps the state saved before `step`, because the loss and gradients of `step` are finite."""
        if self._saved < step:
            self._checkpoints.keep()
