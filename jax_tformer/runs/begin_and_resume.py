"""How a run begins with a Hugging Face folder, and how it goes on as if it had not stopped: its state, its place in the
data and its clock.

A run keeps the folder's settings and tokenizer in RUN/origin, and does not need the folder again once it has saved a
checkpoint.

A checkpoint counts once the next step was finite. A state of finite numbers may still be broken, so that every run from
it fails at its next step. So `Resumption.save` only begins a checkpoint. `Reporter` (`jax_tformer.runs.metrics`) calls
`Checkpoints.keep` with each step whose numbers are finite, and what is not kept by the end of a session is removed. How
arrays are written, verified and deleted stands in `jax_tformer.runs.checkpoints`.
"""

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import grain
import jax

from jax_tformer.config import StackConfig
from jax_tformer.config.errors import WHY, explained, require
from jax_tformer.config.experiment import ExperimentConfig, PairData, TokenizerConfig, trains_on
from jax_tformer.data.order import Batch
from jax_tformer.data.pipeline import build_tokenizer_for
from jax_tformer.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer
from jax_tformer.files import Changes, Json, changed_fields, combined_hash, shortened, user_path
from jax_tformer.functional import Params
from jax_tformer.hub.families import config_from_huggingface
from jax_tformer.hub.folder import defaults_of, open_tensors, read_origin
from jax_tformer.lora import join_adapters, split_adapters
from jax_tformer.runs.checkpoints import HELD_OUT_LOSS, Checkpoints
from jax_tformer.runs.folder import RunFolder
from jax_tformer.terminal import __version__
from jax_tformer.training.processes import ask_first, require_same
from jax_tformer.training.step import TrainState

_LEARNING_RATE = 5e-5
"""What `transformers` fine-tunes with by default; the experiments' own rates are for new weights."""
_FREE = ("dropout", "compute", "lora")
"""Parts of a model's config that a fine-tuning may choose."""
_ROUNDING = "the same function, summed in another order: from here on, numbers may differ from one long run by rounding"
_SAME_TEXT = "the text there must be the same"
_OWN_TOKENIZER = "the run keeps the tokenizer in its folder"
_FIGURES = "from here on, other figures are logged, and all may differ by rounding"
_MEANINGS = {
    "training.steps": "the learning rate follows the same schedule, only longer or shorter",
    "training.log_every": "existing rows of metrics.jsonl stay as they are",
    "training.log_norms": _FIGURES,
    "training.log_noise_scale": _FIGURES,
    "training.log_utilization": "from here on, it is logged or not",
    "training.evaluate_every": "from here on, the held-out loss is measured at other steps",
    "training.evaluate_batches": "from here on, held-out losses are measured on other batches",
    "training.evaluate_examples": "from here on, other held-out pairs are decoded",
    "training.checkpoint_every": "from here on, checkpoints are saved at other steps",
    "training.keep_checkpoints": "the next save deletes those beyond",
    "training.accumulation": f"{_ROUNDING}, and by what dropout draws",
    "sample": "the end of the run samples with it",
    "mesh": _ROUNDING,
    "model.compute.attention": _ROUNDING,
    "model.compute.remat": _ROUNDING,
    "model.compute.unroll": _ROUNDING,
    "data.path": _SAME_TEXT,
    "data.target_path": _SAME_TEXT,
    "data.tokenizer.name": _OWN_TOKENIZER,
    "data.tokenizer.revision": _OWN_TOKENIZER,
}
"""Field -> what changing it means. A continued run may change these: its results so far do not depend on them."""
_FALLING = (
    "the fall of the learning rate now ends there: from here on the schedule is another one, and the steps so far "
    "are not those of a run of this length"
)


def experiment_from(preset: ExperimentConfig, init: str) -> ExperimentConfig:
    """Returns `preset` with the architecture and the tokenizer of the Hugging Face folder `init`.

    Raises InputError if the folder is none, if we do not have its class or a setting, or if such a model does not suit
    the data of `preset`.
    """
    folder = user_path(init)
    require(folder.is_dir(), f"there is no folder {folder}; expected that of a Hugging Face model after --init")
    origin = read_origin(folder)
    # The arrays tell what config.json does not, such as whether a T5 has a head of its own.
    model = config_from_huggingface(origin.config, open_tensors(folder))
    data = preset.data
    kind = trains_on(model)
    holds = f"{folder} holds a {origin.architecture}"
    require(
        kind == data.kind,
        f"{holds}, which trains on {kind}; expected a model for {data.kind}; name the experiment {kind}",
    )
    classes = "BertForMaskedLM" if kind == "masked" else "a class for causal or conditional generation"
    require(
        model.predicts_tokens,
        f"{holds}, whose head is {model.head!r}; expected a head that predicts tokens ({classes} or the like)",
    )
    tokenizer = TokenizerConfig("huggingface", name=init)
    if isinstance(data, PairData):
        data = replace(
            data,
            tokenizer=tokenizer,
            source_length=_limit_length(data.source_length, model.encoder),
            target_length=_limit_length(data.target_length, model.decoder),
        )
    else:
        context = _limit_length(data.context_length, model.output_stack)
        data = replace(data, tokenizer=tokenizer, context_length=context)
    optimizer = replace(preset.optimizer, learning_rate=_LEARNING_RATE)
    return replace(preset, model=model, data=data, optimizer=optimizer, init=init)


def require_same_architecture(experiment: ExperimentConfig, begun: ExperimentConfig) -> None:
    """Raises InputError if flags have changed what the checkpoint decides; `begun` is what `experiment_from` said."""
    free = {name: getattr(experiment.model, name) for name in _FREE}
    changed = changed_fields(replace(begun.model, **free), experiment.model)
    told = [f"model.{name} is {asked!r} and there {there!r}" for name, (there, asked) in changed.items()]
    require(
        not told,
        f"the checkpoint {begun.init} decides its architecture, and flags contradict it: {shortened(told)}; leave them "
        "out (model.dropout, model.compute and --lora may change)",
    )
    require(
        experiment.data.tokenizer == begun.data.tokenizer,
        f"the checkpoint {begun.init} has a tokenizer of its own; leave --data.tokenizer out",
    )


def _limit_length(length: int, stack: StackConfig | None) -> int:
    return min(length, (stack and stack.max_positions) or length)


def new_tokenizer(experiment: ExperimentConfig) -> Tokenizer:
    """Makes the tokenizer of a new run: that of its checkpoint, or the one that its data describes.

    Raises InputError if it needs more rows than the model's vocabulary has.
    """
    vocabulary = experiment.model.vocab_size
    if experiment.init is None:
        tokenizer = build_tokenizer_for(experiment.data)
    else:
        folder = user_path(experiment.init)
        translates = isinstance(experiment.data, PairData)
        defaults, _ = defaults_of(read_origin(folder), folder, translates=translates, vocabulary=vocabulary)
        tokenizer = load_tokenizer(folder).framed(defaults.start_id, defaults.end_ids)
    check_vocabulary(tokenizer, vocabulary or tokenizer.vocab_size)
    return tokenizer


def permitted_changes(run: ExperimentConfig | None, wanted: ExperimentConfig) -> tuple[Changes, list[str]]:
    """Returns (the fields that change when `run` continues as `wanted`, what each change means); nothing without a run.

    Raises InputError for changes that would have changed the results so far.
    """
    if run is None:
        return {}, []
    fields = changed_fields(run, wanted)
    meanings = dict(_MEANINGS)
    if run.optimizer.schedule not in ("constant", "inverse_sqrt"):
        meanings["training.steps"] = _FALLING
    notes = []
    refused = []
    for name, (before, now) in fields.items():
        told = f"{name}: {json.dumps(before)} -> {json.dumps(now)}"
        meaning = meanings.get(name) or meanings.get(name.partition(".")[0])
        if meaning is None:
            refused.append(told)
        else:
            notes.append(f"changed {told}: {meaning}")
    require(
        not refused,
        f"the results of this run so far would be different with {shortened(refused)}; "
        "leave that out to continue it, or start again with a new --run or --resume no",
    )
    return fields, notes


def require_same_run(experiment: ExperimentConfig, tokenizer: Tokenizer, fingerprint: str, *, continues: bool) -> None:
    """Raises InputError, naming what differs, unless all processes train this experiment on this data with this code.

    `fingerprint` is that of the batches. `continues`: whether this process sees a run in the folder.
    """
    require_same(
        {
            "jax_tformer": __version__,
            "jax": jax.__version__,
            "config": asdict(experiment),
            "the tokenizer": combined_hash([tokenizer.as_json])[:8],
            "the data": fingerprint[:8],
            "a run to continue in the folder of --run": continues,
        }
    )


@dataclass
class Resumption:
    """Saves and restores a training state with the position in its data.

    Times are in seconds by time.perf_counter.
    """

    run: RunFolder
    checkpoints: Checkpoints
    fingerprint: str
    """Of the data."""
    experiment: ExperimentConfig
    started: float
    """When this session began, or would have begun, had the run been one session so far."""
    remembered: Sequence[float] = (0,) * 6
    """What the reporter of an earlier session remembered."""
    best: float = math.inf
    """The lowest held-out loss that was saved."""
    notes: list[str] = field(default_factory=list)
    """The damaged checkpoints that were skipped, and why."""

    @property
    def seconds(self) -> float:
        """The seconds spent on the run so far, in all its sessions."""
        return time.perf_counter() - self.started

    def restore(self, abstract: TrainState, batches: grain.DatasetIterator[Batch]) -> TrainState | None:
        """Restores the newest intact state, and `batches` to the next one; returns None if there is no checkpoint yet.

        `abstract` has the shapes, types and shardings of the arrays. Raises InputError if the data, the model or the
        tokenizer has changed since the run began, if no checkpoint is intact, or if they hold other arrays or more
        steps than wanted.
        """
        wanted, frozen = arrays_to_save(abstract)
        restored = self.checkpoints.restore(wanted)
        if restored is None:
            return None
        extra = restored.extra
        reached = restored.step
        self.run.require_recorded(extra, reached)
        # Something is missing or has a wrong type, which Grain does not check either.
        with explained(
            f"the checkpoint of step {reached} does not hold all that training continues from ({WHY}); "
            "start a new run with --run",
            (LookupError, TypeError, ValueError),
        ):
            fingerprint = extra["fingerprint"]
            self.started -= float(extra["seconds"])
            planned = extra["config"]["training"]["steps"]
            batches.set_state(extra["batches"])
            # Runs from before 2026-11-26 have none.
            self.remembered = _numbers(extra.get("remembered") or self.remembered)
        require(
            fingerprint == self.fingerprint,
            "the text or its tokenizer has changed since the run began; restore it, or start a new run with --run",
        )
        steps = self.experiment.training.steps
        require(
            reached < steps or reached == steps == planned,
            f"the run has done {reached} steps, and {steps} are wanted; expected more than {reached} "
            "(--report shows the results of a run)",
        )
        self.best = self.checkpoints.best_loss()
        self.notes += restored.skipped
        arrays = restored.state
        arrays["params"] = join_adapters(arrays["params"], self.run.load_frozen(frozen))
        return TrainState(**arrays)

    @cached_property
    def _unchanging(self) -> Json:
        # Read once, at the first save: by then the files exist, and are those that the session uses.
        return {"fingerprint": self.fingerprint, "config": asdict(self.experiment), **self.run.digests()}

    def improves(self, held_out_loss: float | None) -> bool:
        """Whether this held-out loss is below all that were saved, so that the state should be saved."""
        return held_out_loss is not None and held_out_loss < self.best

    def save(
        self,
        state: TrainState,
        batches: grain.DatasetIterator[Batch],
        held_out_loss: float | None = None,
        remembered: Sequence[float] = (0,) * 6,
    ) -> None:
        """Begins to save in the background a state whose own step the reporter has found finite; it may be donated.

        `held_out_loss` is that of this state, if known; `remembered` is `Reporter.memory`.
        """
        step = int(state.step)
        extra = self._unchanging | {
            "batches": batches.get_state(),
            "seconds": self.seconds,
            "remembered": list(remembered),
            HELD_OUT_LOSS: held_out_loss,
        }
        if held_out_loss is not None:
            self.best = min(self.best, held_out_loss)
        self.checkpoints.begin(step, arrays_to_save(state)[0], extra)


def _numbers(told: Any) -> list[float]:
    """Returns what a reporter remembers; raises ValueError for something else."""
    steps, _, variance, count, *_ = numbers = [float(x) for x in told]
    if len(numbers) != 6 or isinstance(told, str) or min(steps, variance, count) < 0 or steps % 1:
        raise ValueError(f"remembered is {told!r:.60}")
    return numbers


def save_frozen(run: RunFolder, state: TrainState) -> None:
    """Saves what does not train, if anything, beside all checkpoints of a new run, which are worth nothing without it.

    Returns when it is on the disk.
    """
    _, frozen = arrays_to_save(state)
    if frozen:
        # A run that was stopped before its first checkpoint may have left that of another model.
        ask_first(lambda: _remove(run.frozen))
        with Checkpoints(run.frozen, 1) as checkpoints:
            checkpoints.save(0, {"params": frozen}, {})


def _remove(folder: Path) -> None:
    with explained(f"{folder} is of an earlier start, and cannot be removed ({WHY}); remove it"):
        if folder.exists():
            shutil.rmtree(folder)


def arrays_to_save(state: TrainState) -> tuple[dict[str, Any], Params]:
    """Returns the arrays of a checkpoint, and the parameters that do not train, which are saved once beside all.

    Whether the state is finite is not saved, since a checkpoint of one that is not never counts.
    """
    params, frozen = split_adapters(state.params)
    averages = {} if state.average is None else {"average": state.average}
    return {"params": params, "opt_state": state.opt_state, "step": state.step, "key": state.key} | averages, frozen
