"""What train.py is asked for: an experiment, or the run in a folder, and the flags that change it."""

import argparse
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jax_tformer.errors import InputError
from jax_tformer.experiment import ExperimentConfig
from jax_tformer.files import changed_fields, shortened, to_dict, user_path
from jax_tformer.presets import DEFAULT_EXPERIMENT, EXPERIMENTS
from jax_tformer.run.command_line import as_called, long_name, parse

if TYPE_CHECKING:
    from jax_tformer.run.run_folder import RunFolder

SHORT_NAMES = {
    "--steps": "--training.steps",
    "--lr": "--optimizer.learning-rate",
    "--batch-size": "--training.batch-size",
}
"""What may be typed in place of the fields that are changed most."""
_PLACES = ("data.path", "data.target_path")
_USAGE = """usage: train.py [EXPERIMENT] [--run FOLDER] [--resume auto|no] [--FIELD VALUE ...]
       train.py --run FOLDER [--FIELD VALUE ...]
       train.py --run FOLDER --report [--sample.FIELD VALUE ...]

Trains a transformer. A folder that holds a run continues it, by itself: what is not said stays as it is, and flags
change what its numbers so far do not depend on, such as --steps. --report shows what a run, running, stopped or ended,
has come to: loss.png and samples. Without a name and a run, python-docs.

experiments:
{experiments}

train.py EXPERIMENT --help shows every field with its default and meaning; --steps, --lr and --batch-size are short for
--training.steps, --optimizer.learning-rate and --training.batch-size."""


@dataclass(frozen=True)
class _RunOptions:
    run: Path | None = None
    """The run's folder; runs/EXPERIMENT unless given. A folder that holds a run continues it."""
    resume: Literal["auto", "no"] = "auto"
    """auto: continue the run in the folder; no: start afresh, the old run is moved aside."""
    report: bool = False
    """Train nothing: draw loss.png and samples.txt again, of a run in any state; --sample.FIELD says how it samples."""


@dataclass(frozen=True)
class TrainOptions(_RunOptions, ExperimentConfig):
    """The fields of an experiment, and where its run lives."""


@dataclass(frozen=True)
class TrainPlan:
    """What train.py is to do."""

    name: str | None
    """Of the experiment; None where the run's folder says all."""
    experiment: ExperimentConfig
    run: Path
    resume: bool
    """Whether to continue what is in the folder."""
    report: bool
    """Whether to show what is in the folder, and train nothing."""
    before: ExperimentConfig | None
    """The experiment of the run in the folder, without the flags that change it; None where none is to be continued."""
    notes: list[str]
    """What the user should know, a line each."""


def train_options(arguments: Sequence[str]) -> TrainPlan:
    """What the command line of train.py asks for: an experiment, or the run in a folder, and the flags that change it.

    Raises InputError for an unknown experiment, field or value, in one line. `--help` prints and exits.
    """
    name, rest = chosen_experiment(arguments, DEFAULT_EXPERIMENT, _USAGE)

    # Only now: --help alone has nothing to wait for.
    from jax_tformer.run.run_folder import RunFolder

    # Where the run lives decides what the other arguments are flags of.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--run")
    first.add_argument("--resume")
    where = argparse.Namespace(run=None, resume=None)
    with contextlib.suppress(argparse.ArgumentError):  # told by `parse`, with all other options
        first.parse_known_args(rest, where)
    named = list(arguments[:1]) == [name] or where.run is None
    folder = RunFolder(user_path(Path("runs") / name if where.run is None else where.run))
    preset, before, notes = EXPERIMENTS[name], None, list[str]()
    prog = f"train.py {name}" if named or not folder.holds_run() else f"train.py --run {folder.path}"
    if folder.holds_run() and where.resume in (None, "auto"):
        before = folder.read_config()
        if named:
            _require_same_experiment(folder, before, name)
            notes = _own_settings(before, name, rest)
    elif folder.holds_run() and where.resume == "no" and not named:
        raise InputError("--resume no starts afresh: name the experiment, as in train.py EXPERIMENT --run FOLDER")
    options = parse(
        TrainOptions,
        rest,
        prog=prog,
        description=f"the run in {folder.path}" if before else preset.description,
        default=TrainOptions(**vars(before or preset.config)),
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
    name_said = name if named else None
    return TrainPlan(name_said, experiment, folder.path, options.resume == "auto", options.report, before, notes)


def _require_same_experiment(folder: "RunFolder", run: ExperimentConfig, name: str) -> None:
    """Raises InputError unless the run in `folder` is one of the experiment `name`, as far as that can be known."""
    began = folder.began_as()
    kinds = [(type(config.data).__name__, config.data.source) for config in (run, EXPERIMENTS[name].config)]
    if began != name and (began is not None or kinds[0] != kinds[1]):
        raise InputError(
            f"{folder.path} holds a run of {began or 'another experiment'}, not of {name}; continue it without a name, "
            "with --run alone, or start afresh with a new --run or --resume no"
        )


def _require_report(folder: "RunFolder", run: ExperimentConfig | None, wanted: ExperimentConfig) -> None:
    """Raises InputError unless there is a run to report on, and nothing changes but how and where it samples."""
    if run is None:
        raise InputError(f"there is no run in {folder.path} to report on; expected --run with a folder that holds one")
    changed = changed_fields(to_dict(run), to_dict(wanted))
    others = [name for name in changed if not name.startswith("sample.") and name not in _PLACES]
    if others:
        raise InputError(f"--report trains nothing, so that {shortened(others)} cannot be changed; leave that out")


def _own_settings(run: ExperimentConfig, name: str, arguments: Sequence[str]) -> list[str]:
    """A line about what the run has otherwise than the experiment that was named, and was not said again."""
    said = {long_name(argument, SHORT_NAMES).partition("=")[0].replace("_", "-") for argument in arguments}
    own = [
        f"{field} {json.dumps(value)}"
        for field, (_, value) in changed_fields(to_dict(EXPERIMENTS[name].config), to_dict(run)).items()
        if f"--{field.replace('_', '-')}" not in said and field not in ("model.vocab_size", *_PLACES)
    ]
    return [f"the run keeps its own settings where {name} has others: {shortened(own)}"] if own else []


def chosen_experiment(arguments: Sequence[str], default: str, usage: str) -> tuple[str, list[str]]:
    """(the experiment that the first argument names, or `default`; the other arguments).

    `--help` in its place prints `usage` with the experiments, and exits. Raises InputError for an unknown one.
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
