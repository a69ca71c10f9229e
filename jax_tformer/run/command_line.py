"""The command line of the programs: typed flags through tyro, and errors as one line."""

import contextlib
import difflib
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jax_tformer.errors import InputError, TrainingFailed
from jax_tformer.terminal import one_line

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry

C = TypeVar("C")
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
SMALLER_ANSWERS = "give a lower --batch-size, --max-new-tokens or --beam"
SMALLER_TRAINING = (
    "make the batch (--training.batch-size), its rows (--data.context-length) or the model smaller, or compute the "
    "batch in more parts (--training.accumulation)"
)


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
    import tyro  # only here, so that the programs are there at once

    told, prog, description = io.StringIO(), as_called(prog), as_called(description)
    extra = {} if default is None else {"default": default}
    if short_names:
        meanings = ", ".join(f"{short} for {name}" for short, name in short_names.items())
        description = f"{description}\n\nShort names: {meanings}."
    try:
        with contextlib.redirect_stderr(told):
            found: C = tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=[long_name(argument, short_names) for argument in arguments],
                config=(tyro.conf.AvoidSubcommands,),
                registry=_whole_numbers(),
                **extra,
            )
            return found
    except SystemExit as error:
        if not error.code:
            raise
        raise InputError(f"{_one_line(told.getvalue(), list(short_names))}; see {prog} --help") from None


def checkpoint_step(asked: str) -> int | Literal["best"] | None:
    """The checkpoint that --checkpoint asks for, as `load_trained` takes it; raises InputError for what is none."""
    if asked not in ("newest", "best") and re.fullmatch("[0-9]{1,18}", asked) is None:
        raise InputError(f"--checkpoint is {asked!r}; expected newest, best, or the number of a step")
    if asked == "best":
        return "best"
    return None if asked == "newest" else int(asked)


def as_called(text: str) -> str:
    """`text`, in which the programs are scripts, for a user who has started one as `jax-tformer PROGRAM`."""
    if not sys.argv[0].startswith("jax-tformer "):
        return text
    return re.sub(r"(?<![\w./-])(python )?(train|generate|compare)\.py\b", r"jax-tformer \2", text)


def long_name(argument: str, short_names: Mapping[str, str]) -> str:
    """An argument with its flag written out."""
    flag, equals, value = argument.partition("=")
    return short_names.get(flag.replace("_", "-"), flag) + equals + value


def _whole_numbers() -> "ConstructorRegistry":
    """How fields of type int, and int or None, are read: as a whole number, also one like 1e3."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

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


def run_program(program: Callable[[Sequence[str]], int], name: str, *, smaller: str = SMALLER_TRAINING) -> None:
    """Runs a program and exits with its status: 2, and one line on standard error, for what the user can mend.

    `smaller` says what to change where there is not enough memory.
    """
    if sys.stderr is None:
        # Otherwise what is meant for it would be printed among the answers.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    message = None
    try:
        if sys.stdout is None:
            raise InputError("standard output is closed; let it go to a file, or to /dev/null")
        status = program(sys.argv[1:])
        sys.stdout.flush()
    except InputError as error:
        status, message = 2, f"error: {error}"
    except TrainingFailed as error:
        status, message = 1, str(error)
    except BrokenPipeError:
        # The reader of our output has gone: nothing is left to say.
        status = 128 + signal.SIGPIPE
    except OSError as error:
        # What writes to a file names it; printing names nothing.
        where = error.filename or ("standard output" if error.errno in _CANNOT_WRITE else "")
        status, message = 2, f"error: {f'{where}: ' if where else ''}{error.strerror or error}"
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:
        # Python 3.11 wraps an interrupt in one of these while it makes certain classes, which flax has at import.
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise SystemExit(128 + signal.SIGINT) from None
        message = _too_large(error)
        if message is None:
            raise
        status, message = 2, f"error: {message}; {smaller}"
    if message is not None:
        with contextlib.suppress(OSError):
            print(f"{name}: {one_line(message)}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            # What could not be written must not be tried again at exit, which would say so, and change the status.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    raise SystemExit(status)


def _too_large(error: Exception) -> str | None:
    """What cannot be had, in a few words, if that is what `error` says: memory, of the host or a device."""
    told = " ".join(str(error).split())
    if isinstance(error, OverflowError):
        return f"a size is larger than any computer has room for ({told})"
    # Of XLA, of PyTorch on the processor, of PyTorch on a GPU.
    signs = "RESOURCE_EXHAUSTED|can't allocate memory|CUDA out of memory"
    if not (isinstance(error, MemoryError) or re.search(signs, told)):
        return None
    size = re.search(r"([\d.]+) ?([KMGTPE]i?B|bytes)\b", told)
    if size is None:
        return "there is not enough memory"
    asked = f"{size[1]} {size[2]}" if size[2] != "bytes" else f"{int(size[1]) / 2**30:,.1f} GiB"
    return f"there is not enough memory: {asked} more could not be had"


def _one_line(message: str, short_names: Sequence[str] = ()) -> str:
    """The sentence inside the box that tyro draws around an error, with the names that it suggests, or one of ours."""
    lines = [line.strip("│╭╮╰╯─ ") for line in message.splitlines() if not line.startswith(("╭", "╰"))]
    if "╭" not in message:
        # Where a terminal lacks these characters there is a title, and lines of hyphens.
        lines = ["" if set(line) == {"-"} else line for line in lines[2:]]
    text = " ".join(lines[: lines.index("")] if "" in lines else lines)
    text = re.sub(r"Error parsing (__tyro-dummy-inner__\.?|TrainOptions: )?", "", text).removeprefix(": ").rstrip(".")
    text = re.sub(r"^Missing from [^:]*: (\S+) (.*)\. \(required\)$", r"\1 is missing: \2", text)
    text = re.sub(r"^Missing value for argument '(.*)'\. Expected 1 values$", r"\1 has no value", text)
    suggested = list[str]()
    if text.startswith("Unrecognized"):
        suggested += difflib.get_close_matches(text.split()[2].partition("=")[0].rstrip(","), short_names, 1, 0.75)
    if "Perhaps you meant:" in lines:
        suggested += [line.split()[0] for line in lines[lines.index("Perhaps you meant:") :] if line.startswith("--")]
    if suggested:
        text += f"; perhaps you meant {' or '.join(suggested)}"
    kept = re.match(r"--|[A-Z]+ is missing", text)
    return text if kept else text[:1].lower() + text[1:]
