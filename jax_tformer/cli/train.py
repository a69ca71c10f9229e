"""Train a transformer: `python train.py [EXPERIMENT] [--FIELD VALUE ...]`; `--help` lists the experiments.

`--run FOLDER` continues the run in a folder; with `--report` it only shows the run's results.

`main` and `train` are the whole way of a run, in seven chapters; a `Session` has 2 to 4, its `begin` 5 and its
`take_steps` 6. Where each of them leads, for `train.py dates`:

    1. the config      EXPERIMENTS["dates"] (config/presets.py) and the flags, of the classes in config/experiment.py
    2. the mesh        make_mesh (training/sharding.py)
    3. the data        build_pipeline (data/pipeline.py), of the pairs in data/generated.py
    4. the model       transformer (functional.py); train_step (training/step.py) by optimizer (training/optimizer.py),
                       compiled by prepare (training/prepare.py)
    5. the run         RunFolder (runs/folder.py) and, where it goes on, Resumption
                       (runs/begin_and_resume.py)
    6. the loop        here; Reporter (runs/metrics.py) logs, Evaluator (runs/evaluation.py) judges, Resumption saves
    7. the results     sample_text and finish (runs/evaluation.py)
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jax_tformer.config import LoraConfig
from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import (
    DebugConfig,
    DistributedConfig,
    ExperimentConfig,
    PairData,
    TextData,
    TokenizerConfig,
)
from jax_tformer.config.presets import DEFAULT_EXPERIMENT, EXPERIMENTS
from jax_tformer.files import changed_fields, require_new_folder, shortened, user_path, value_in
from jax_tformer.startup import set_malloc
from jax_tformer.terminal import Interruption, as_called, given_flags, parse, say

if TYPE_CHECKING:
    from concurrent.futures import Future

    import jax

    from jax_tformer.data.order import Batch
    from jax_tformer.data.pipeline import Pipeline
    from jax_tformer.data.tokenizers import Tokenizer
    from jax_tformer.runs.folder import RunFolder
    from jax_tformer.runs.metrics import Row
    from jax_tformer.training.step import StepMetrics, TrainState

SHORT_NAMES = {
    "--steps": "--training.steps",
    "--lr": "--optimizer.learning-rate",
    "--batch-size": "--training.batch-size",
    "--lora.": "--model.lora.",
}
"""Short flag -> the flag that it stands for. One that ends in a dot stands for the beginnings of flags."""
_PLACES = ("data.path", "data.target_path")
_USAGE = """usage: train.py [EXPERIMENT] [--run FOLDER] [--resume auto|no] [--FIELD VALUE ...]
       train.py text|pairs|masked --init HUGGING_FACE_FOLDER [--export FOLDER] [--FIELD VALUE ...]
       train.py --run FOLDER [--FIELD VALUE ...]
       train.py --run FOLDER --report [--sample.FIELD VALUE ...]

Trains a transformer. If the folder holds a run, continues it with the run's own settings; flags may change those that
its results so far do not depend on, such as --steps. --report draws loss.png and samples of a run, whether it is
running, stopped or finished. --init fine-tunes the model in a Hugging Face folder, and --export writes such a folder.
Without an experiment and a folder, trains python-docs.

experiments:
{experiments}

--lora.rank 8 trains low-rank adapters alone (LoRA); so does any other --lora.FIELD, and with one of them --help shows
all: --lora.alpha, --lora.targets query,value, --lora.dropout, --lora.rank-stabilized.

train.py EXPERIMENT --help shows every field with its default and meaning; --steps, --lr and --batch-size are short for
--training.steps, --optimizer.learning-rate and --training.batch-size."""


def main(arguments: Sequence[str]) -> int:
    """Trains, or reports on a run, as the command line says; returns the exit status."""
    # 1. The config: a preset and the flags that change it, checked before the slow imports.
    started = time.perf_counter()
    set_malloc(M_ARENA_MAX=1)
    plan = train_options(arguments)

    from jax_tformer.data.sources import check_files
    from jax_tformer.training import processes

    if plan.options.report:
        from jax_tformer.runs.evaluation import report

        processes.require_alone("train.py --report", plan.options.distributed)
        plan.run.check()
        say(report(plan.run, plan.experiment))
        return 0
    # Several processes run all of this; what one refuses, all refuse.
    with processes.joined(plan.options.distributed):
        with processes.together():
            plan.run.check()
            check_files(plan.experiment.data)
        return train(plan, started)


def train(plan: "TrainPlan", started: float) -> int:
    """Trains the experiment of `plan` in its folder; `started` is when the program was, by perf_counter."""
    import jax

    from jax_tformer.functional import transformer
    from jax_tformer.lora import merge_lora
    from jax_tformer.runs.evaluation import finish, sample_text
    from jax_tformer.runs.folder import export_pretrained
    from jax_tformer.training.processes import ask_first, is_first

    session = Session(plan, started)
    run = plan.run
    export = plan.options.export
    begun = session.begin()
    if begun is None:
        other = "--steps N continues it, --run FOLDER or --resume no starts another"
        complete = f"the run in {run.path} is complete; {other}"
        say(ask_first(lambda: export_pretrained(run, export)) if export else complete)
        return 0
    state, step, signal, speed = session.take_steps(*begun)
    run.unlock()
    if step < plan.experiment.training.steps:
        say(f"stopped at step {step}; the same command continues the run, as train.py --run {run.path} does")
        return 128 + (signal or 0)

    # 7. The results.
    net, params = merge_lora(transformer(session.net.config.for_other_shapes()), state.params)
    samples = sample_text(net, params, session.experiment, session.tokenizer, lambda: session.pipeline)
    if is_first():
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        figures = {**speed, "wall_seconds": session.resumption.seconds, "parameters": parameters}
        say(finish(run, step, figures, samples))
    if export is not None:
        say(ask_first(lambda: export_pretrained(run, export)))
    return 0


class Session:
    """A session of a run. Making this object refuses what does not fit, before anything is written."""

    def __init__(self, plan: "TrainPlan", started: float) -> None:
        from jax_tformer.data.pipeline import build_pipeline
        from jax_tformer.functional import transformer
        from jax_tformer.hub.pretrained import load_pretrained
        from jax_tformer.runs.begin_and_resume import Resumption, new_tokenizer, permitted_changes, require_same_run
        from jax_tformer.runs.checkpoints import Checkpoints
        from jax_tformer.startup import set_up_jax
        from jax_tformer.training.optimizer import optimizer
        from jax_tformer.training.prepare import fit_to_devices, prepare, require_room_for_batches
        from jax_tformer.training.processes import ask_first, first_then_others, together
        from jax_tformer.training.sharding import abstract_batch, local_rows, make_mesh

        self.plan = plan
        self.started = started
        experiment = plan.experiment
        training = plan.experiment.training
        run = plan.run
        with together():
            set_up_jax(experiment.model)
            require_room_for_batches(experiment.data, training)
            self.checkpoints = Checkpoints(run.checkpoints, training.keep_checkpoints, run.saved)

            # 2. The mesh: one device is the mesh 1 x 1 x 1 x 1.
            self.mesh = mesh = make_mesh(experiment.mesh, training.batch_size // training.accumulation)
        before = plan.before if ask_first(self.checkpoints.saved_before) else None
        self.continues = before is not None

        # 3. The data, of which each process makes the rows that its devices hold. A continued run keeps its tokenizer.
        def build_data() -> "tuple[Tokenizer, Pipeline]":
            tokenizer = new_tokenizer(experiment) if before is None else run.read_tokenizer(experiment.model.vocab_size)
            rows = local_rows(mesh, training.batch_size)
            return tokenizer, build_pipeline(experiment.data, training, tokenizer, rows)

        self.tokenizer, self.pipeline = first_then_others(build_data)
        model = experiment.model.with_vocab_size(self.tokenizer.vocab_size)
        self.experiment = replace(experiment, model=model)
        fingerprint = self.pipeline.fingerprint
        require_same_run(self.experiment, self.tokenizer, fingerprint, continues=self.continues)
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
        self.resumption = Resumption(run, self.checkpoints, fingerprint, self.experiment, started)

    def begin(self) -> "tuple[TrainState, Future[jax.stages.Compiled]] | None":
        """Returns the state of the newest checkpoint, or of step 0, and the step, which compiles meanwhile.

        Returns None if the run is complete.
        """
        from jax_tformer.runs.begin_and_resume import save_frozen
        from jax_tformer.training.prepare import compile_beside
        from jax_tformer.training.processes import ask_first, together

        # 5. The run: from its newest checkpoint, or from step 0.
        plan = self.plan
        run = plan.run
        prepared = self.prepared
        steps = plan.experiment.training.steps
        state = self.resumption.restore(prepared.abstract, self.batches) if self.continues else None
        if plan.before is not None and state is None:
            self.notes.append("the run was stopped before its first checkpoint, so it starts again at step 0")
        if moved := ask_first(lambda: run.take(plan.options.resume == "auto", plan.before)):
            say(f"the run that was in {run.path} is now in {moved}")
        if state is not None and int(state.step) == steps == ask_first(lambda: value_in(run.summary, "steps")):
            run.unlock()
            return None
        compiling = compile_beside(prepared.step)
        if state is None:
            ask_first(lambda: run.create(self.experiment, self.tokenizer))
            with together():
                run.require_begun()
            state = prepared.first_state(self.given)
            save_frozen(run, state)
        told = {"step": int(state.step), "devices": self.devices, "changed": self.changes}
        ask_first(lambda: run.record_session(self.experiment, name=plan.name, **told))
        return state, compiling

    def take_steps(
        self, state: "TrainState", compiling: "Future[jax.stages.Compiled]"
    ) -> "tuple[TrainState, int, int | None, Row]":
        """Trains from `state` to the last step, or to a signal; evaluates and saves on the way.

        Returns the last state, how many updates the run has, the signal, and `Reporter.speed`.
        """
        from jax_tformer.data.pipeline import check_batch_ids
        from jax_tformer.runs.evaluation import Evaluator, find_not_finite
        from jax_tformer.runs.metrics import MetricsLog, ProgressLine, Reporter
        from jax_tformer.startup import keep_freed_memory
        from jax_tformer.training import processes
        from jax_tformer.training.sharding import describe_shards

        plan = self.plan
        mesh = self.mesh
        net = self.net
        resumption = self.resumption
        pipeline = self.pipeline
        training = self.experiment.training
        number = start = int(state.step)
        signal = None

        # 6. The loop: dispatch a step, then report the previous one.
        evaluate = Evaluator(net, self.experiment.data, pipeline, self.tokenizer, mesh)
        nans = plan.options.debug.nans
        diagnosis = partial(find_not_finite, net, mesh, self.tokenizer, training, operation=nans)
        log = MetricsLog(plan.run, start, plan.options.track, self.experiment)
        signals = processes.Signals(mesh)
        with Interruption() as stop, ProgressLine(start, training.steps, stop.unheard) as line, self.checkpoints:
            for told in (*self.introduction(state), *log.notes):
                line.say(told)
            with line.during("compiling"):
                compiled = compiling.result()
            keep_freed_memory(compiled)
            sound = self.checkpoints.keep
            past = resumption.remembered
            reporter = Reporter(self.experiment, log, line, self.started, diagnosis, sound, pipeline.epochs, mesh, past)
            abstract = self.prepared.abstract
            for told in describe_shards(mesh, abstract, abstract.params, compiled.as_text() or ""):
                line.say(told)
            step = self.of_each_shape(compiled, reporter.pause)
            processes.wait_for_all()
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
                if last or number % training.checkpoint_every == 0 or resumption.improves(held_out_loss):
                    reporter.flush()
                    log.sync()
                    resumption.save(state, self.batches, held_out_loss, reporter.memory)
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

    def of_each_shape(
        self, compiled: "jax.stages.Compiled", pause: Callable[[], None]
    ) -> "Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]":
        """Returns the step, which is compiled for another shape of batches where it first comes, in a `pause`."""
        from jax_tformer.training.sharding import place_batch, shape_of

        by_shape = {shape_of(self.largest): compiled}

        def step(state: "TrainState", batch: "Batch") -> "tuple[TrainState, StepMetrics]":
            placed = place_batch(self.mesh, batch)
            if (shape := shape_of(placed)) not in by_shape:
                by_shape[shape] = self.prepared.compile(placed)
                pause()
            return by_shape[shape](state, placed)

        return step

    def introduction(self, state: "TrainState") -> Iterator[str]:
        """Says what is trained, how and from where, a line each."""
        import jax

        from jax_tformer.lora import trained
        from jax_tformer.training.prepare import describe_compute

        config = self.net.config
        parameters, adapters = (
            sum(leaf.size for leaf in jax.tree.leaves(params)) for params in (state.params, trained(state.params))
        )
        steps = f"steps {int(state.step)} to {self.experiment.training.steps}"
        yield f"{self.plan.run.path}: {parameters:,} parameters, {steps}, {self.devices}"
        if config.lora is not None:
            yield f"{adapters:,} of them train: adapters of rank {config.lora.rank} (LoRA)"
        yield f"computed with {describe_compute(config, self.mesh, self.largest['labels'].shape[1])}"
        yield from (*self.plan.notes, *self.notes, *self.pipeline.notes, *self.resumption.notes)

    @property
    def devices(self) -> str:
        """How many devices of which kind."""
        return f"{self.mesh.size} {self.mesh.devices.flat[0].device_kind} device(s)"


@dataclass(frozen=True)
class TrainOptions(ExperimentConfig):
    """The fields of an experiment, and its run's folder."""

    run: Path | None = None
    """The run's folder; None: runs/EXPERIMENT. If it holds a run, that run continues."""
    resume: Literal["auto", "no"] = "auto"
    """auto: continue the run in the folder; no: start a new one, and move the old one aside."""
    export: Path | None = None
    """At the end, write the model to this new folder, which Hugging Face's from_pretrained opens."""
    report: bool = False
    """Train nothing: draw loss.png and samples.txt of a run in any state; --sample.FIELD changes how it samples."""
    track: str | None = None
    """Send the metrics to this project of trackio, too."""
    distributed: DistributedConfig = DistributedConfig()
    debug: DebugConfig = DebugConfig()


@dataclass(frozen=True)
class TrainPlan:
    """What train.py is to do."""

    name: str | None
    """The experiment's name; None if only the run's folder was given."""
    experiment: ExperimentConfig
    run: "RunFolder"
    before: ExperimentConfig | None
    """The experiment of the run to continue, without the flags that change it; None for a new run."""
    options: TrainOptions
    notes: list[str]
    """Notes for the user, a line each."""


def train_options(arguments: Sequence[str]) -> TrainPlan:
    """Parses the command line of train.py.

    Raises InputError for an unknown experiment, field or value, in one line. `--help` prints and exits.
    """
    name, rest = choose_experiment(arguments, DEFAULT_EXPERIMENT, _USAGE)

    # Imported here, so that --help is fast.
    from jax_tformer.runs.folder import RunFolder, require_expressible

    # The run's folder decides what the other flags change.
    flags = given_flags(rest, SHORT_NAMES)
    where = flags.get("--run")
    resume = flags.get("--resume")
    named = list(arguments[:1]) == [name] or where is None
    folder = RunFolder(user_path(Path("runs") / name if where is None else where))
    preset = EXPERIMENTS[name]
    before = None
    notes = []
    prog = f"train.py {name}" if named or not folder.holds_run() else f"train.py --run {folder.path}"
    if folder.holds_run() and resume in (None, "auto"):
        before = folder.read_config()
        notes = _own_settings(folder, before, name, flags) if named else []
    elif folder.holds_run() and resume == "no" and not named:
        raise InputError("--resume no starts a new run: name the experiment, as in train.py EXPERIMENT --run FOLDER")
    start = before or preset.config
    init = flags.get("--init", "None")
    if before is None and init != "None":
        from jax_tformer.runs.begin_and_resume import experiment_from

        start = experiment_from(start, init)
    require(
        init in ("None", start.init),
        f"{folder.path} holds a run that began with {start.init or 'new weights'}; expected the same --init to "
        "continue it; leave that out, or start again with a new --run or --resume no",
    )
    start = with_adapters(start, flags)
    options = parse(
        TrainOptions,
        rest,
        prog=prog,
        description=f"the run in {folder.path}" if before else preset.description,
        default=TrainOptions(**vars(start)),
        short_names=SHORT_NAMES,
    )
    experiment = ExperimentConfig(**{field: getattr(options, field) for field in vars(preset.config)})
    if before is None and experiment.init is None:
        experiment = replace(experiment, data=with_own_tokenizer(experiment.data, flags))
    require(
        options.track is None or find_spec("trackio") is not None,
        "--track needs trackio; pip install '.[track]' adds it, or leave it out",
    )
    begin = f"train.py EXPERIMENT --run {folder.path}"
    told = f"to continue; check the path, or name the experiment to begin there, as in {begin}"
    if options.report:
        told = "to report on; expected --run with a folder that holds one"
    require(before is not None or (named and not options.report), f"there is no run in {folder.path} {told}")
    if options.report:
        others = [
            name
            for name in changed_fields(before, experiment)
            if not name.startswith("sample.") and name not in _PLACES
        ]
        require(not others, f"--report trains nothing, so that {shortened(others)} cannot be changed; leave that out")
    if before is None and experiment.init is not None:
        from jax_tformer.runs.begin_and_resume import require_same_architecture

        require_same_architecture(experiment, start)
    if options.export is not None:
        require_new_folder(export := user_path(options.export))
        options = replace(options, export=export)
        require_expressible(experiment)
    return TrainPlan(name if named else None, experiment, folder, before, options, notes)


def with_adapters(experiment: ExperimentConfig, flags: Iterable[str]) -> ExperimentConfig:
    """Returns `experiment`, with adapters if it has none and one of `flags`, by its full name, describes them."""
    if not any(flag.startswith("--model.lora.") for flag in flags) or experiment.model.lora is not None:
        return experiment
    return replace(experiment, model=replace(experiment.model, lora=LoraConfig()))


def with_own_tokenizer(data: TextData | PairData, flags: Iterable[str]) -> TextData | PairData:
    """Returns `data`, with the tokenizer that stands beside its shards if none of `flags` describes another."""
    if isinstance(data, PairData) or any(flag.startswith("--data.tokenizer.") for flag in flags):
        return data
    from jax_tformer.data.sources import read_manifest, shard_files, sources_of

    for part, _ in sources_of(data):
        paths = shard_files(part)
        if paths and read_manifest(paths[0].parent) is not None:
            return replace(data, tokenizer=TokenizerConfig("huggingface", name=str(paths[0].parent)))
    return data


def _own_settings(folder: "RunFolder", run: ExperimentConfig, name: str, flags: Mapping[str, str]) -> list[str]:
    """Returns a note about settings in which the run differs from the named experiment and no flag repeats.

    Raises InputError if the run in `folder` is known not to be of the experiment `name`.
    """
    preset = EXPERIMENTS[name].config
    began = folder.began_as()
    kinds = [(type(config.data).__name__, config.data.source) for config in (run, preset)]
    require(
        began == name or (began is None and kinds[0] == kinds[1]),
        f"{folder.path} holds a run of {began or 'another experiment'}, not of {name}; continue it without a name, "
        "with --run alone, or start again with a new --run or --resume no",
    )
    own = [
        f"{field} {json.dumps(value)}"
        for field, (_, value) in changed_fields(preset, run).items()
        if f"--{field.replace('_', '-')}" not in flags and field not in ("model.vocab_size", *_PLACES)
    ]
    return [f"the run keeps its own settings where {name} has others: {shortened(own)}"] if own else []


def choose_experiment(arguments: Sequence[str], default: str, usage: str) -> tuple[str, list[str]]:
    """Returns (the experiment that the first argument names, or `default`; the other arguments).

    `--help` as first argument prints `usage` with the experiments, and exits. Raises InputError for an unknown name.
    """
    arguments = list(arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, default)
    name, *rest = arguments
    if name in ("-h", "--help"):
        width = max(map(len, EXPERIMENTS))
        listed = [f"  {name:<{width}}  {experiment.description}" for name, experiment in EXPERIMENTS.items()]
        print(as_called(usage).format(experiments="\n".join(listed)))
        raise SystemExit(0)
    require(name in EXPERIMENTS, f"there is no experiment {name!r}; expected one of {', '.join(EXPERIMENTS)}")
    return name, rest
