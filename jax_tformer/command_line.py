"""The command line of the programs: typed flags through tyro, and errors as one line."""

import contextlib
import dataclasses
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jax_tformer.errors import InputError, TrainingFailed
from jax_tformer.experiment import ExperimentConfig
from jax_tformer.paths import user_path
from jax_tformer.presets import DEFAULT_EXPERIMENT, EXPERIMENTS
from jax_tformer.terminal import one_line

C = TypeVar("C")
SHORT_NAMES = {
    "--steps": "--training.steps",
    "--lr": "--optimizer.learning-rate",
    "--batch-size": "--training.batch-size",
}
"""What may be typed in place of the fields that are changed most."""
_USAGE = """usage: train.py [EXPERIMENT] [--run FOLDER] [--resume auto|no] [--FIELD VALUE ...]

Trains a transformer; a folder that holds a run continues it. Without a name, python-docs.

experiments:
{experiments}

train.py EXPERIMENT --help shows every field with its default and meaning; --steps, --lr and --batch-size are short for
--training.steps, --optimizer.learning-rate and --training.batch-size."""


@dataclass(frozen=True)
class RunOptions:
    """Where a run lives."""

    run: Path | None = None
    """The run's folder; runs/EXPERIMENT unless given. A folder that holds a run continues it."""
    resume: Literal["auto", "no"] = "auto"
    """auto: continue the run in the folder; no: start afresh, the old run is moved aside."""


@dataclass(frozen=True)
class TrainOptions(RunOptions, ExperimentConfig):
    """The fields of an experiment, and where its run lives."""


def train_options(arguments: Sequence[str]) -> tuple[ExperimentConfig, Path, bool]:
    """(experiment, run folder, whether to continue what is there) from the command line of train.py.

    Raises InputError for an unknown experiment, field or value, in one line. `--help` prints and exits.
    """
    name, rest = chosen_experiment(arguments, DEFAULT_EXPERIMENT, _USAGE)
    preset = EXPERIMENTS[name]
    values = {field.name: getattr(preset.config, field.name) for field in dataclasses.fields(preset.config)}
    default = TrainOptions(**values)
    options = parse(
        TrainOptions,
        rest,
        prog=f"train.py {name}",
        description=preset.description,
        default=default,
        short_names=SHORT_NAMES,
    )
    experiment = ExperimentConfig(**{name: getattr(options, name) for name in values})
    return experiment, user_path(options.run or Path("runs") / name), options.resume == "auto"


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
        print(usage.format(experiments="\n".join(listed)))
        raise SystemExit(0)
    if name not in EXPERIMENTS:
        raise InputError(f"there is no experiment {name!r}; expected one of {', '.join(EXPERIMENTS)}")
    return name, rest


def parse(
    kind: Callable[..., C],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    default: Any = None,
    short_names: Mapping[str, str] = {},
) -> C:
    """`arguments` as a `kind` (a dataclass); raises InputError, in one line, for what does not fit.

    `short_names`: flags that stand for others. A whole number may also be written as 1e3.
    """
    told = io.StringIO()
    extra = {} if default is None else {"default": default}
    if short_names:
        meanings = ", ".join(f"{short} for {name}" for short, name in short_names.items())
        description = f"{description}\n\nShort names: {meanings}."
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=[_long_name(argument, short_names) for argument in arguments],
                config=(tyro.conf.AvoidSubcommands,),
                registry=_whole_numbers(),
                **extra,
            )
    except SystemExit as error:
        if not error.code:
            raise
        raise InputError(f"{_one_line(told.getvalue())}; see {prog} --help") from None


def _long_name(argument: str, short_names: Mapping[str, str]) -> str:
    flag, equals, value = argument.partition("=")
    return short_names.get(flag.replace("_", "-"), flag) + equals + value


def _whole_numbers() -> ConstructorRegistry:
    """How fields of type int, and int or None, are read: as a whole number, also one like 1e3."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(field: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int | None] | None:
        if field.type not in (int, int | None):
            return None
        absent = field.type is not int
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{None}|INT" if absent else "INT",
            instance_from_str=lambda texts: None if absent and texts == ["None"] else _whole_number(texts[0]),
            is_instance=lambda value: absent if value is None else type(value) is int,
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _whole_number(text: str) -> int:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a whole number") from None
    # The bound spares us the zeros of 1e999999999.
    if not number.is_finite() or number.adjusted() > 30 or number != number.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def run_program(program: Callable[[Sequence[str]], int], name: str) -> None:
    """Runs a program and exits with its status: 2, and one line on standard error, for what the user can mend."""
    try:
        status = program(sys.argv[1:])
        sys.stdout.flush()
    except InputError as error:
        print(f"{name}: error: {one_line(str(error))}", file=sys.stderr)
        status = 2
    except TrainingFailed as error:
        print(f"{name}: {one_line(str(error))}", file=sys.stderr)
        status = 1
    except BrokenPipeError:
        # The reader of our output has gone: nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{name}: error: {one_line(f'{where}{error.strerror or error}')}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except RuntimeError as error:
        # Python 3.11 wraps an interrupt in one of these while it makes certain classes, which flax has at import.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        status = 128 + signal.SIGINT
    raise SystemExit(status)


def _one_line(message: str) -> str:
    """The sentence inside the box that tyro draws around an error, with the names that it suggests."""
    lines = [line.strip("│╭╮╰╯─ ") for line in message.splitlines() if not line.startswith(("╭", "╰"))]
    ends = [i for i, line in enumerate(lines) if not line]
    text = " ".join(lines[: ends[0]] if ends else lines)
    text = re.sub(r"Error parsing (__tyro-dummy-inner__\.?|TrainOptions: )?", "", text).removeprefix(": ").rstrip(".")
    if "Perhaps you meant:" in lines:
        suggested = [line.split()[0] for line in lines[lines.index("Perhaps you meant:") :] if line.startswith("--")]
        text += f"; perhaps you meant {' or '.join(suggested)}"
    return text[:1].lower() + text[1:]
