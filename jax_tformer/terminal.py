"""A program and its terminal: its command line is parsed, errors are one line, Ctrl-C ends a run at the next step.

Texts, paths and messages may come from anybody's file, and a terminal would obey the control characters in them: they
are shown instead. Files, pipes and JSON get the text unchanged.
"""

import contextlib
import difflib
import errno
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import dropwhile, pairwise, takewhile
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from jax_tformer.config.errors import InputError, TrainingFailed, reason_of, require

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry

C = TypeVar("C")
__version__ = "0.1.0"
# C0 without tab and newline, delete, C1; characters that change the direction of text; lone surrogates.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
ENDINGS: list[Callable[[int, str | None], None]] = []
"""Called in turn at the very end of a program, with its exit status and its message on standard error."""
SMALLER_ANSWERS = "give a lower --batch-size, --max-new-tokens or --beam"
SMALLER_TRAINING = (
    "make the batch (--training.batch-size), its rows (--data.context-length) or the model smaller, or compute the "
    "batch in more parts (--training.accumulation)"
)


def visible(text: str) -> str:
    """`text` with control characters escaped like \\u001b. JSON stays JSON; tabs and newlines stay."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """`visible`, on one line, for messages."""
    return visible(text.translate(_LINE))


def say(text: str, *, end: str = "\n") -> None:
    """Prints `text` and flushes; made `visible` on a terminal, unchanged elsewhere."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    print(visible(text) if on_terminal else text, end=end, flush=True)


_AT_ONCE = 1.0
"""Seconds after a signal in which others are the same: launchers send it to a process and to its group."""
_unheard: list[int] = []
"""Signals before the training that have not ended the program."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, and remembers why: what a garbage collector calls, as JAX does, would swallow it."""
    _unheard.append(number)
    raise KeyboardInterrupt


class Interruption:
    """Inside `with Interruption() as stop`, Ctrl-C, SIGTERM or SIGHUP sets `stop.signal`; a second breaks off the step.

    A second at once does not, nor a second SIGHUP, because a closing terminal sends several. Under nohup SIGHUP stays
    ignored.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0

    def __enter__(self) -> "Interruption":
        self.signal = _unheard[-1] if _unheard else None
        self._since = time.monotonic()
        _unheard.clear()
        kinds = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            kinds.append(signal.SIGHUP)
        self._before = {kind: signal.signal(kind, self._handle) for kind in kinds}
        return self

    def __exit__(self, *failure: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def unheard(self) -> None:
        """Ends the run as SIGPIPE would, because nobody reads its output any more."""
        if self.signal is None:
            self.signal = signal.SIGPIPE

    @property
    def status(self) -> int:
        """The exit status after this signal."""
        return 128 + (self.signal or 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
        elif number != signal.SIGHUP and time.monotonic() - self._since > _AT_ONCE:
            raise KeyboardInterrupt(self.signal)


def as_called(text: str) -> str:
    """Replaces the scripts' names in `text` if the user started `jax-tformer PROGRAM`."""
    if not sys.argv[0].startswith("jax-tformer "):
        return text
    return re.sub(r"(?<![\w./-])(python )?(train|generate|compare)\.py\b", r"jax-tformer \2", text)


def parse(
    kind: Callable[..., C],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    default: Any = None,
    short_names: Mapping[str, str] = {},
) -> C:
    """Parses `arguments` into a `kind` (a dataclass); raises InputError, in one line, for what does not fit.

    `short_names` maps short flags to full ones. Whole numbers may also be written like 1e3.
    """
    import tyro  # imported here, so that programs start fast

    told = io.StringIO()
    prog = as_called(prog)
    description = as_called(description)
    if short_names:
        fields = {short: "FIELD" if short.endswith(".") else "" for short in short_names}
        meanings = ", ".join(f"{short}{fields[short]} for {name}{fields[short]}" for short, name in short_names.items())
        description = f"{description}\n\nShort names: {meanings}."
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=[long_name(argument, short_names) for argument in arguments],
                config=(tyro.conf.AvoidSubcommands,),
                registry=_ways_to_write(),
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit as error:
        if not error.code:
            raise
        raise InputError(f"{_parse_error(told.getvalue(), list(short_names))}; see {prog} --help") from None


def long_name(argument: str, short_names: Mapping[str, str]) -> str:
    """Replaces a short flag in `argument` by the full one."""
    flag, equals, value = argument.partition("=")
    name = flag.replace("_", "-")
    for short, full in short_names.items():
        # A short name that ends in a dot stands for the beginnings of flags.
        if name == short or (short.endswith(".") and name.startswith(short)):
            return full + name[len(short) :] + equals + value
    return argument


def given_flags(arguments: Sequence[str], short_names: Mapping[str, str] = {}) -> dict[str, str]:
    """Returns the flags among `arguments`, each by its full name and with hyphens, and what stands behind each."""
    flags = {}
    for argument, following in pairwise([*arguments, ""]):
        if argument.startswith("--"):
            flag, equals, value = long_name(argument, short_names).partition("=")
            flags[flag.replace("_", "-")] = value if equals else following
    return flags


def _ways_to_write() -> "ConstructorRegistry":
    """Makes tyro read fields of type int, or int or None, as whole numbers, also like 1e3, and lists like a,b,c."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(field: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        read: Callable[[str], Any] = _whole_number
        write: Callable[[Any], str] = str
        kind = field.type
        metavar = "INT"
        if get_origin(kind) is tuple and get_origin(item := get_args(kind)[0]) is Literal:
            read = lambda text: tuple(name.strip() for name in text.split(","))  # noqa: E731
            write = ",".join
            kind = tuple
            metavar = f"{{{'|'.join(get_args(item))}}},..."
        elif kind is not int:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda texts: read(texts[0]),
            is_instance=lambda value: type(value) is kind,
            str_from_instance=lambda value: [write(value)],
        )

    return registry


def _whole_number(text: str) -> int:
    with contextlib.suppress(InvalidOperation):
        number = Decimal(text)
        # The bound avoids writing out 1e999999999.
        if number.is_finite() and number.adjusted() <= 30 and number == number.to_integral_value():
            return int(number)
    raise ValueError(f"{text!r} is not a whole number")


def _parse_error(message: str, short_names: Sequence[str]) -> str:
    """Takes the sentence out of the box that tyro draws around an error, and adds similar names, tyro's or ours."""
    # On terminals without these characters, tyro prints lines of hyphens.
    lines = [line.strip("│╭╮╰╯─ ") for line in message.splitlines()]
    lines = ["" if set(line) <= {"-"} else line for line in lines]
    text = " ".join(takewhile(bool, dropwhile(lambda line: not line, lines[1:])))
    text = re.sub(r"Error parsing (__tyro-dummy-inner__\.?|TrainOptions: )?", "", text).removeprefix(": ").rstrip(".")
    text = re.sub(r"^Missing from [^:]*: (\S+) (.*)\. \(required\)$", r"\1 is missing: \2", text)
    text = re.sub(r"^Missing value for argument '(.*)'\. Expected 1 values$", r"\1 has no value", text)
    text = re.sub(
        r": no type matching \{None\}\|(\S+) could be .* from \['(.*)'\]$", r" is '\2'; expected None or \1", text
    )
    if choices := re.search(r"\. Expected one of \((.*)\)$", text):
        # tyro's order changes from one process to the next.
        named = sorted(name.strip(" '") for name in choices[1].rstrip(",").split(","))
        text = f"{text[: choices.start()]}; expected one of {', '.join(named)}"
    suggested = []
    if text.startswith("Unrecognized"):
        suggested += difflib.get_close_matches(text.split()[2].partition("=")[0].rstrip(","), short_names, 1, 0.75)
    if "Perhaps you meant:" in lines:
        suggested += [line.split()[0] for line in lines[lines.index("Perhaps you meant:") :] if line.startswith("--")]
    if suggested:
        text += f"; perhaps you meant {' or '.join(suggested)}"
    kept = re.match(r"--|[A-Z]+ is missing", text)
    return text if kept else text[:1].lower() + text[1:]


def run_program(program: Callable[[Sequence[str]], int], name: str, *, smaller: str = SMALLER_TRAINING) -> None:
    """Runs a program and exits with its status: 2, with one line on standard error, for what the user can mend.

    `smaller` says what to change if there is not enough memory.
    """
    if sys.stderr is None:
        # Otherwise messages would be printed among the answers.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    message = None
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # only the main thread hears signals
            signal.signal(signal.SIGINT, _interrupt)
    try:
        require(sys.stdout is not None, "standard output is closed; redirect it to a file, or to /dev/null")
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A model may write any character, whatever the locale says.
            sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
        status = 0
        if sys.argv[1:] == ["--version"]:
            print(f"jax-tformer {__version__}")
        else:
            status = program(sys.argv[1:])
        sys.stdout.flush()
    except InputError as error:
        status = 2
        message = f"error: {error}"
    except TrainingFailed as error:
        status = 1
        message = str(error)
    except BrokenPipeError:
        # Nobody reads our output any more.
        status = 128 + signal.SIGPIPE
    except OSError as error:
        # An error from a file has its name (`named_errors` sees to ours), but one from printing has none.
        where = error.filename or ("standard output" if error.errno in _CANNOT_WRITE else "")
        status = 2
        message = f"error: {f'{where}: ' if where else ''}{error.strerror or error}"
    except KeyboardInterrupt as error:
        status = 128 + next((x for x in error.args if isinstance(x, int)), signal.SIGINT)
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:
        # Python 3.11 wraps a KeyboardInterrupt in one of these while it makes certain classes, as flax does at import.
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise SystemExit(128 + signal.SIGINT) from None
        message = _too_large(error)
        if message is None:
            raise
        status = 2
        message = f"error: {message}; {smaller}"
    if message is not None:
        message = as_called(message)
        with contextlib.suppress(OSError):
            print(f"{name}: {one_line(message)}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            # Otherwise Python would try again at exit, fail with a message, and change the status.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    for ending in ENDINGS:
        ending(status, message)
    raise SystemExit(status)


def _too_large(error: Exception) -> str | None:
    """Says in a few words which memory, of the host or a device, is too small, if that is what `error` means."""
    told = reason_of(error)
    if isinstance(error, OverflowError):
        return f"a size is larger than any computer has room for ({told})"
    # From XLA, from PyTorch on a CPU, from PyTorch on a GPU.
    signs = "RESOURCE_EXHAUSTED|can't allocate memory|CUDA out of memory"
    if not (isinstance(error, MemoryError) or re.search(signs, told)):
        return None
    size = re.search(r"([\d.]+) ?([KMGTPE]i?B|bytes)\b", told)
    if size is None:
        return "there is not enough memory"
    asked = f"{size[1]} {size[2]}" if size[2] != "bytes" else f"{int(size[1]) / 2**30:,.1f} GiB"
    return f"there is not enough memory: {asked} more could not be allocated"
