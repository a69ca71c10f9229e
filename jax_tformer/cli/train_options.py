"""The options of train.py: an experiment, or the run in a folder, and the flags that change it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jax_tformer.cli.options import given_flags, parse
from jax_tformer.config import LoraConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import DistributedConfig, ExperimentConfig
from jax_tformer.config.presets import DEFAULT_EXPERIMENT, EXPERIMENTS
from jax_tformer.files import changed_fields, require_new_folder, shortened, to_dict, user_path
from jax_tformer.terminal import as_called

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
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True)
class TrainPlan:
    """What train.py is to do."""

    name: str | None
    """The experiment's name; None if only the run's folder was given."""
    experiment: ExperimentConfig
    run: Path
    resume: bool
    """Whether to continue the run in the folder."""
    report: bool
    """Whether to report on the run in the folder, and train nothing."""
    before: ExperimentConfig | None
    """The experiment of the run to continue, without the flags that change it; None for a new run."""
    export: Path | None
    """Where to write the model for Hugging Face in the end."""
    notes: list[str]
    """Notes for the user, a line each."""
    distributed: DistributedConfig
    """Where this process meets the others that train with it."""


def train_options(arguments: Sequence[str]) -> TrainPlan:
    """Parses the command line of train.py.

    Raises InputError for an unknown experiment, field or value, in one line. `--help` prints and exits.
    """
    name, rest = choose_experiment(arguments, DEFAULT_EXPERIMENT, _USAGE)

    # Imported here, so that --help is fast.
    from jax_tformer.runs.folder import RunFolder

    # The run's folder decides what the other flags change.
    flags = given_flags(rest, SHORT_NAMES)
    where, resume = flags.get("--run"), flags.get("--resume")
    named = list(arguments[:1]) == [name] or where is None
    folder = RunFolder(user_path(Path("runs") / name if where is None else where))
    preset, before, notes = EXPERIMENTS[name], None, list[str]()
    prog = f"train.py {name}" if named or not folder.holds_run() else f"train.py --run {folder.path}"
    if folder.holds_run() and resume in (None, "auto"):
        before = folder.read_config()
        if named:
            _require_same_experiment(folder, before, name)
            notes = _own_settings(before, name, flags)
    elif folder.holds_run() and resume == "no" and not named:
        raise InputError("--resume no starts a new run: name the experiment, as in train.py EXPERIMENT --run FOLDER")
    start = with_adapters(_start(folder, before, preset.config, flags.get("--init")), rest)
    options = parse(
        TrainOptions,
        rest,
        prog=prog,
        description=f"the run in {folder.path}" if before else preset.description,
        default=TrainOptions(**vars(start)),
        short_names=SHORT_NAMES,
    )
    experiment = ExperimentConfig(**{field: getattr(options, field) for field in vars(preset.config)})
    if options.report:
        _require_report(folder, before, experiment)
    if before is None and not named:
        raise InputError(
            f"there is no run in {folder.path} to continue; check the path, or name the experiment to begin "
            f"there, as in train.py EXPERIMENT --run {folder.path}"
        )
    if before is None and experiment.init is not None:
        from jax_tformer.runs.huggingface import require_same_architecture

        require_same_architecture(experiment, start)
    export = None if options.export is None else user_path(options.export)
    if export is not None:
        from jax_tformer.runs.huggingface import require_expressible

        require_new_folder(export)
        require_expressible(experiment)
    name_said = name if named else None
    resume_it, report = options.resume == "auto", options.report
    return TrainPlan(name_said, experiment, folder.path, resume_it, report, before, export, notes, options.distributed)


def _start(
    folder: "RunFolder", before: ExperimentConfig | None, preset: ExperimentConfig, init: str | None
) -> ExperimentConfig:
    """Returns the experiment that flags change: of the run `before`, of the checkpoint `init`, or the preset."""
    if init is None or init == "None":
        return before or preset
    if before is None:
        from jax_tformer.runs.huggingface import experiment_from

        return experiment_from(preset, init)
    if before.init != init:
        began = "new weights" if before.init is None else before.init
        raise InputError(
            f"{folder.path} holds a run that began with {began}; expected the same --init to continue it; leave that "
            "out, or start again with a new --run or --resume no"
        )
    return before


def with_adapters(experiment: ExperimentConfig, arguments: Sequence[str]) -> ExperimentConfig:
    """Returns `experiment`, with adapters if it has none and a flag describes them."""
    asked = any(flag.startswith("--model.lora.") for flag in given_flags(arguments, SHORT_NAMES))
    if not asked or experiment.model.lora is not None:
        return experiment
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, lora=LoraConfig()))


def _require_same_experiment(folder: "RunFolder", run: ExperimentConfig, name: str) -> None:
    """Raises InputError if the run in `folder` is known not to be of the experiment `name`."""
    began = folder.began_as()
    kinds = [(type(config.data).__name__, config.data.source) for config in (run, EXPERIMENTS[name].config)]
    if began != name and (began is not None or kinds[0] != kinds[1]):
        raise InputError(
            f"{folder.path} holds a run of {began or 'another experiment'}, not of {name}; continue it without a name, "
            "with --run alone, or start again with a new --run or --resume no"
        )


def _require_report(folder: "RunFolder", run: ExperimentConfig | None, wanted: ExperimentConfig) -> None:
    """Raises InputError unless there is a run to report on, and flags change only its samples and paths."""
    if run is None:
        raise InputError(f"there is no run in {folder.path} to report on; expected --run with a folder that holds one")
    changed = changed_fields(to_dict(run), to_dict(wanted))
    others = [name for name in changed if not name.startswith("sample.") and name not in _PLACES]
    if others:
        raise InputError(f"--report trains nothing, so that {shortened(others)} cannot be changed; leave that out")


def _own_settings(run: ExperimentConfig, name: str, flags: Mapping[str, str]) -> list[str]:
    """Returns a note about settings in which the run differs from the named experiment and no flag repeats."""
    own = [
        f"{field} {json.dumps(value)}"
        for field, (_, value) in changed_fields(to_dict(EXPERIMENTS[name].config), to_dict(run)).items()
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
    if name not in EXPERIMENTS:
        raise InputError(f"there is no experiment {name!r}; expected one of {', '.join(EXPERIMENTS)}")
    return name, rest
