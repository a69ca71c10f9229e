"""A session of a run: how it begins, perhaps with a Hugging Face folder, or goes on as if it had not stopped, with its
state, its place in the data and its clock; and the loop over its steps.

A run keeps the folder's settings and tokenizer in RUN/origin, and does not need the folder again once it has saved a
checkpoint.

A checkpoint counts once the next step was finite. A state of finite numbers may still be broken, so that every run from
it fails at its next step. So `Session.save` only begins a checkpoint. `Reporter` (`jax_tformer.runs.metrics`) calls
`Checkpoints.keep` with each step whose numbers are finite, and what is not kept by the end of a session is removed. How
arrays are written, verified and deleted stands in `jax_tformer.runs.checkpoints`.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import optax

from jax_tformer.config import StackConfig
from jax_tformer.config.errors import WHY, explained, require
from jax_tformer.config.experiment import ExperimentConfig, PairData, TokenizerConfig, trains_on
from jax_tformer.data.order import Batch
from jax_tformer.data.pipeline import Pipeline, build_pipeline, build_tokenizer_for, check_batch_ids
from jax_tformer.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer
from jax_tformer.files import Changes, Json, changed_fields, combined_hash, shortened, user_path, value_in
from jax_tformer.functional import Params, transformer
from jax_tformer.hub.families import config_from_huggingface
from jax_tformer.hub.folder import defaults_of, open_tensors, read_origin
from jax_tformer.hub.pretrained import load_pretrained
from jax_tformer.lora import join_adapters, split_adapters, trained
from jax_tformer.runs.checkpoints import HELD_OUT_LOSS, Checkpoints
from jax_tformer.runs.evaluation import Evaluator, find_not_finite
from jax_tformer.runs.folder import RunFolder
from jax_tformer.runs.metrics import MetricsLog, ProgressLine, Reporter, Row
from jax_tformer.startup import keep_freed_memory, set_up_jax
from jax_tformer.terminal import Interruption, __version__, say
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.prepare import describe_compute, fit_to_devices, prepare, require_room_for_batches
from jax_tformer.training.processes import Signals, ask_first, first_then_others, require_same, together, wait_for_all
from jax_tformer.training.sharding import (
    abstract_batch,
    describe_shards,
    local_rows,
    make_mesh,
    place_batch,
    shape_of,
)
from jax_tformer.training.step import StepMetrics, TrainState

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


class Session:
    """A session of a run. Making this object refuses what does not fit, before anything is written."""

    def __init__(
        self, run: RunFolder, experiment: ExperimentConfig, before: ExperimentConfig | None, started: float
    ) -> None:
        """Takes the experiment of the run, and of the run to continue, and when the program was started."""
        self.run = run
        self.before = before
        self.started = started
        training = experiment.training
        with together():
            set_up_jax(experiment.model)
            require_room_for_batches(experiment.data, training)
            self.checkpoints = Checkpoints(run.checkpoints, training.keep_checkpoints, run.saved)

            # 2. The mesh: one device is the mesh 1 x 1 x 1 x 1.
            self.mesh = mesh = make_mesh(experiment.mesh, training.batch_size // training.accumulation)
        before = before if ask_first(self.checkpoints.saved_before) else None
        self.continues = before is not None

        # 3. The data, of which each process makes the rows that its devices hold. A continued run keeps its tokenizer.
        def build_data() -> tuple[Tokenizer, Pipeline]:
            tokenizer = new_tokenizer(experiment) if before is None else run.read_tokenizer(experiment.model.vocab_size)
            rows = local_rows(mesh, training.batch_size)
            return tokenizer, build_pipeline(experiment.data, training, tokenizer, rows)

        self.tokenizer, self.pipeline = first_then_others(build_data)
        model = experiment.model.with_vocab_size(self.tokenizer.vocab_size)
        self.experiment = replace(experiment, model=model)
        # All processes train this experiment on this data with this code.
        require_same(
            {
                "jax_tformer": __version__,
                "jax": jax.__version__,
                "config": asdict(self.experiment),
                "the tokenizer": combined_hash([self.tokenizer.as_json])[:8],
                "the data": self.pipeline.fingerprint[:8],
                "a run to continue in the folder of --run": self.continues,
            }
        )
        self.changes, self.notes = permitted_changes(before, self.experiment)
        self.batches = self.pipeline.train_iterator()
        self.largest = abstract_batch(mesh, self.pipeline.evaluation[0])

        # 4. The model, its optimizer and their step.
        self.net = transformer(fit_to_devices(model, self.largest, mesh, training.accumulation))
        with together():
            tx = optimizer(experiment.optimizer, training.steps)
            self.prepared = prepare(self.net, tx, mesh, training, self.largest)
            self.given = None
            if before is None and experiment.init is not None:
                _, self.given, _ = load_pretrained(experiment.init, dtype=model.compute.parameter_dtype, mesh=mesh)
        self.earlier = 0.0
        """The seconds that earlier sessions took."""
        self.remembered: Sequence[float] = (0,) * 6
        """What the reporter of an earlier session remembered."""
        self.best = math.inf
        """The lowest held-out loss that was saved."""

    def begin(self, *, name: str | None, resume: bool) -> tuple[TrainState, Future[jax.stages.Compiled]] | None:
        """Returns the state of the newest checkpoint, or of step 0, and the step, which compiles meanwhile.

        Returns None if the run is complete. `name` is that of the experiment; without `resume`, an old run is moved.
        """
        # 5. The run: from its newest checkpoint, or from step 0.
        run = self.run
        prepared = self.prepared
        steps = self.experiment.training.steps
        state = self.restore() if self.continues else None
        if self.before is not None and state is None:
            self.notes.append("the run was stopped before its first checkpoint, so it starts again at step 0")
        if moved := ask_first(lambda: run.take(resume, self.before)):
            say(f"the run that was in {run.path} is now in {moved}")
        if state is not None and int(state.step) == steps == ask_first(lambda: value_in(run.summary, "steps")):
            run.unlock()
            return None
        # In a thread: XLA compiles without Python's lock.
        pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
        compiling = pool.submit(prepared.step.compile)
        pool.shutdown(wait=False)
        if state is None:
            ask_first(lambda: run.create(self.experiment, self.tokenizer))
            with together():
                run.require_begun()
            state = prepared.first_state(self.given)
            save_frozen(run, state)
        told = {"step": int(state.step), "devices": self.devices, "changed": self.changes}
        ask_first(lambda: run.record_session(self.experiment, name=name, **told))
        return state, compiling

    def take_steps(
        self,
        state: TrainState,
        compiling: Future[jax.stages.Compiled],
        notes: Sequence[str],
        *,
        track: str | None,
        nans: bool,
    ) -> tuple[TrainState, int, int | None, Row]:
        """Trains from `state` to the last step, or to a signal; evaluates and saves on the way, and says the `notes`.

        Metrics go to the project `track` of trackio, too. `nans`: says which operation of a failed step made a NaN.

        Returns the last state, how many updates the run has, the signal, and `Reporter.speed`.
        """
        mesh = self.mesh
        net = self.net
        pipeline = self.pipeline
        training = self.experiment.training
        number = start = int(state.step)
        signal = None

        # 6. The loop: dispatch a step, then report the previous one.
        evaluate = Evaluator(net, self.experiment.data, pipeline, self.tokenizer, mesh)
        diagnosis = partial(find_not_finite, net, mesh, self.tokenizer, training, operation=nans)
        log = MetricsLog(self.run, start, track, self.experiment)
        signals = Signals(mesh)
        with Interruption() as stop, ProgressLine(start, training.steps, stop.unheard) as line, self.checkpoints:
            said = *notes, *self.notes, *pipeline.notes, *log.notes
            for told in (*self.introduction(state), *said):
                line.say(told)
            with line.during("compiling"):
                compiled = compiling.result()
            keep_freed_memory(compiled)
            reporter = Reporter(
                self.experiment,
                log,
                line,
                self.started,
                diagnosis,
                self.checkpoints.keep,
                pipeline.epochs,
                mesh,
                self.remembered,
            )
            abstract = self.prepared.abstract
            for told in describe_shards(mesh, abstract, abstract.params, compiled.as_text() or ""):
                line.say(told)
            by_shape = {shape_of(self.largest): compiled}

            def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
                """Takes a step, which is compiled for another shape of batches where that first comes, in a pause."""
                placed = place_batch(mesh, batch)
                if (shape := shape_of(placed)) not in by_shape:
                    by_shape[shape] = self.prepared.compile(placed)
                    reporter.pause()
                return by_shape[shape](state, placed)

            wait_for_all()
            for number in range(start + 1, training.steps + 1):
                batch = next(self.batches)
                check_batch_ids(batch, net.config.vocab_size)
                state, metrics = step(state, batch)
                reporter.step(number, metrics, state, batch)
                signal = signals(stop.signal)
                last = number == training.steps or signal is not None
                held_out_loss = None
                if number == training.steps or number % training.evaluate_every == 0:
                    # The time of an evaluation is not that of the step before it.
                    reporter.flush()
                    with line.during("evaluating"):
                        figures = evaluate.of_state(state)
                    reporter.evaluation(number, figures, pipeline.evaluation[0])
                    held_out_loss = figures["val_loss"]
                improves = held_out_loss is not None and held_out_loss < self.best
                if last or number % training.checkpoint_every == 0 or improves:
                    reporter.flush()
                    log.sync()
                    self.save(state, held_out_loss, reporter.memory)
                if last:
                    break
            if number < training.steps:
                # One step more, whose result is thrown away: the checkpoint of the last one counts only if it is finite
                # (see `jax_tformer.runs.checkpoints`). The last step of a whole run was evaluated instead.
                state, metrics = step(state, batch := next(self.batches))
                reporter.step(number + 1, metrics, state, batch)
                reporter.check()
            self.checkpoints.keep()
        log.close()
        return state, number, signal, reporter.speed

    def introduction(self, state: TrainState) -> Iterator[str]:
        """Says what is trained, how and from where, a line each."""
        config = self.net.config
        parameters, adapters = map(optax.tree.size, (state.params, trained(state.params)))
        steps = f"steps {int(state.step)} to {self.experiment.training.steps}"
        yield f"{self.run.path}: {parameters:,} parameters, {steps}, {self.devices}"
        if config.lora is not None:
            yield f"{adapters:,} of them train: adapters of rank {config.lora.rank} (LoRA)"
        yield f"computed with {describe_compute(config, self.mesh, self.largest['labels'].shape[1])}"

    @property
    def devices(self) -> str:
        """How many devices of which kind."""
        return f"{self.mesh.size} {self.mesh.devices.flat[0].device_kind} device(s)"

    @property
    def seconds(self) -> float:
        """The seconds spent on the run so far, in all its sessions."""
        return time.perf_counter() - self.started + self.earlier

    def restore(self) -> TrainState | None:
        """Restores the newest intact state, and the batches to the next one; None: there is no checkpoint yet.

        Raises InputError if the data, the model or the tokenizer has changed since the run began, if no checkpoint is
        intact, or if they hold other arrays or more steps than wanted.
        """
        wanted, frozen = arrays_to_save(self.prepared.abstract)
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
            self.earlier = float(extra["seconds"])
            planned = extra["config"]["training"]["steps"]
            self.batches.set_state(extra["batches"])
            # Runs from before 2026-11-26 have none.
            self.remembered = _numbers(extra.get("remembered") or self.remembered)
        require(
            fingerprint == self.pipeline.fingerprint,
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
        said = {"fingerprint": self.pipeline.fingerprint, "config": asdict(self.experiment)}
        return said | self.run.digests()

    def save(self, state: TrainState, held_out_loss: float | None, remembered: Sequence[float]) -> None:
        """Begins to save in the background a state whose own step the reporter has found finite; it may be donated.

        `held_out_loss` is that of this state, if known; `remembered` is `Reporter.memory`.
        """
        extra = self._unchanging | {
            "batches": self.batches.get_state(),
            "seconds": self.seconds,
            "remembered": list(remembered),
            HELD_OUT_LOSS: held_out_loss,
        }
        if held_out_loss is not None:
            self.best = min(self.best, held_out_loss)
        self.checkpoints.begin(int(state.step), arrays_to_save(state)[0], extra)


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
