"""Train a transformer: `python train.py [EXPERIMENT] [--FIELD VALUE ...]`; `--help` lists the experiments.

`--run FOLDER` continues the run in a folder; with `--report` it only shows the run's results.

`main` and `train` are the whole way of a run, in seven chapters; those of a `Session` (runs/session.py) are 2 to 6.
Where each of them leads, for `train.py dates`:

    1. the config      EXPERIMENTS["dates"] (config/presets.py) and the flags, of the classes in config/experiment.py
    2. the mesh        make_mesh (training/sharding.py)
    3. the data        build_pipeline (data/pipeline.py), of the pairs in data/generated.py
    4. the model       transformer (functional.py); train_step (training/step.py) by optimizer (training/optimizer.py),
                       compiled by prepare (training/prepare.py)
    5. the run         RunFolder (runs/folder.py) and, where it goes on, Session.restore
    6. the loop        Session.take_steps; Reporter (runs/metrics.py) logs, Evaluator (runs/evaluation.py) judges,
                       Session.save saves
    7. the results     sample_text and finish (runs/evaluation.py)
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jax_tformer.config import LoraConfig
from jax_tformer.config.errors import require
from jax_tformer.config.experiment import (
    DebugConfig,
    DistributedConfig,
    ExperimentConfig,
    PairData,
    TextData,
    TokenizerConfig,
)
from jax_tformer.config.presets import DEFAULT_EXPERIMENT, EXPERIMENTS
from jax_tformer.files import changed_fields, require_new_folder, shortened, user_path
from jax_tformer.startup import set_malloc
from jax_tformer.terminal import as_called, given_flags, parse, say

if TYPE_CHECKING:
    from jax_tformer.runs.folder import RunFolder

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
    import optax

    from jax_tformer.functional import transformer
    from jax_tformer.lora import merge_lora
    from jax_tformer.runs.evaluation import finish, sample_text
    from jax_tformer.runs.folder import export_pretrained
    from jax_tformer.runs.session import Session
    from jax_tformer.training.processes import ask_first, is_first

    run = plan.run
    session = Session(run, plan.experiment, plan.before, started)
    export = plan.options.export
    begun = session.begin(name=plan.name, resume=plan.options.resume == "auto")
    if begun is None:
        other = "--steps N continues it, --run FOLDER or --resume no starts another"
        complete = f"the run in {run.path} is complete; {other}"
        say(ask_first(lambda: export_pretrained(run, export)) if export else complete)
        return 0
    options = plan.options
    state, step, signal, speed = session.take_steps(*begun, plan.notes, track=options.track, nans=options.debug.nans)
    run.unlock()
    if step < plan.experiment.training.steps:
        say(f"stopped at step {step}; the same command continues the run, as train.py --run {run.path} does")
        return 128 + (signal or 0)

    # 7. The results.
    net, params = merge_lora(transformer(session.net.config.for_other_shapes()), state.params)
    samples = sample_text(net, params, session.experiment, session.tokenizer, lambda: session.pipeline)
    if is_first():
        parameters = optax.tree.size(state.params)
        figures = {**speed, "wall_seconds": session.seconds, "parameters": parameters}
        say(finish(run, step, figures, samples))
    if export is not None:
        say(ask_first(lambda: export_pretrained(run, export)))
    return 0


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
    named = list(arguments[:1]) == [name] or "--run" not in flags
    folder = RunFolder(user_path(flags.get("--run", f"runs/{name}")))
    resume = flags.get("--resume", "auto") if folder.holds_run() else None
    require(
        named or resume != "no",
        "--resume no starts a new run: name the experiment, as in train.py EXPERIMENT --run FOLDER",
    )
    before = folder.read_config() if resume == "auto" else None
    notes = [] if before is None or not named else _own_settings(folder, before, name, flags)
    preset = EXPERIMENTS[name]
    start = before or preset.config
    init = flags.get("--init", "None")
    if before is None and init != "None":
        from jax_tformer.runs.session import experiment_from

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
        prog=f"train.py {name}" if named or resume is None else f"train.py --run {folder.path}",
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
    empty = f"there is no run in {folder.path}"
    if options.report:
        require(before is not None, f"{empty} to report on; expected --run with a folder that holds one")
        others = [
            name
            for name in changed_fields(before, experiment)
            if not name.startswith("sample.") and name not in _PLACES
        ]
        require(not others, f"--report trains nothing, so that {shortened(others)} cannot be changed; leave that out")
    require(
        before is not None or named,
        f"{empty} to continue; check the path, or name the experiment to begin there, as in train.py EXPERIMENT --run "
        f"{folder.path}",
    )
    if before is None and experiment.init is not None:
        from jax_tformer.runs.session import require_same_architecture

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
