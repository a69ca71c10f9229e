"""A program and its terminal: errors are one line, and Ctrl-C ends a run at the next step.

Texts, paths and messages may come from anybody's file, and a terminal would obey the control characters in them: they
are shown instead. Files, pipes and JSON get the text unchanged.
"""

import contextlib
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

from jax_tformer.config.errors import InputError, TrainingFailed

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


class Interruption:
    """Inside `with Interruption() as stop`, Ctrl-C, SIGTERM or SIGHUP sets `stop.signal`; a second breaks off the step.

    A second SIGHUP does not, because a closing terminal sends several. Under nohup SIGHUP stays ignored.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> "Interruption":
        kinds = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            kinds.append(signal.SIGHUP)
        self._before = {kind: signal.signal(kind, self._handle) for kind in kinds}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
            self.signal = number
        elif number != signal.SIGHUP:
            raise KeyboardInterrupt


def as_called(text: str) -> str:
    """Replaces the scripts' names in `text` if the user started `jax-tformer PROGRAM`."""
    if not sys.argv[0].startswith("jax-tformer "):
        return text
    return re.sub(r"(?<![\w./-])(python )?(train|generate|compare)\.py\b", r"jax-tformer \2", text)


def say_version() -> int:
    """Prints what `--version` asks for."""
    # Imported by now, as the package of this module.
    print(f"jax-tformer {sys.modules['jax_tformer'].__version__}")
    return 0


def run_program(program: Callable[[Sequence[str]], int], name: str, *, smaller: str = SMALLER_TRAINING) -> None:
    """Runs a program and exits with its status: 2, with one line on standard error, for what the user can mend.

    `smaller` says what to change if there is not enough memory.
    """
    if sys.stderr is None:
        # Otherwise messages would be printed among the answers.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    message = None
    try:
        if sys.stdout is None:
            raise InputError("standard output is closed; redirect it to a file, or to /dev/null")
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A model may write any character, whatever the locale says.
            sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
        status = say_version() if sys.argv[1:] == ["--version"] else program(sys.argv[1:])
        sys.stdout.flush()
    except InputError as error:
        status, message = 2, f"error: {error}"
    except TrainingFailed as error:
        status, message = 1, str(error)
    except BrokenPipeError:
        # Nobody reads our output any more.
        status = 128 + signal.SIGPIPE
    except OSError as error:
        # An error from a file has its name (`named_errors` sees to ours), but one from printing has none.
        where = error.filename or ("standard output" if error.errno in _CANNOT_WRITE else "")
        status, message = 2, f"error: {f'{where}: ' if where else ''}{error.strerror or error}"
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:
        # Python 3.11 wraps a KeyboardInterrupt in one of these while it makes certain classes, as flax does at import.
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
            # Otherwise Python would try again at exit, fail with a message, and change the status.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    for ending in ENDINGS:
        ending(status, message)
    raise SystemExit(status)


def _too_large(error: Exception) -> str | None:
    """Says in a few words which memory, of the host or a device, is too small, if that is what `error` means."""
    told = " ".join(str(error).split())
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
