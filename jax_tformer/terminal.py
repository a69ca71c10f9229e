"""The terminal: control characters are shown and not obeyed, and Ctrl-C ends a run at the next step.

Texts, paths and messages may come from anybody's file, and a terminal would obey the control characters in them. Files,
pipes and JSON get the text unchanged.
"""

import re
import signal
import sys
from types import FrameType, TracebackType

# C0 without tab and newline, delete, C1; characters that change the direction of text; lone surrogates.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})


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
