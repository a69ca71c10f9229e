"""Ctrl-C, SIGTERM, and SIGHUP of a terminal that closes: the run finishes its step, saves, and ends."""

import signal
from types import FrameType, TracebackType


class Interruption:
    """Inside `with Interruption() as stop`, the first signal sets `stop.signal`; a second one breaks off the step.

    SIGHUP never does: a terminal that closes sends it several times. Under nohup it stays ignored.
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
        """Ends the run as SIGPIPE would: what it prints reaches nobody any more."""
        if self.signal is None:
            self.signal = signal.SIGPIPE

    @property
    def status(self) -> int:
        """The exit status of a program that ended on this signal."""
        return 128 + (self.signal or 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
        elif number != signal.SIGHUP:
            raise KeyboardInterrupt
