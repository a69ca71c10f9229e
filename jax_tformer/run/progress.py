"""What a run shows while it goes: a live line on a terminal, a plain line now and then elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jax_tformer.terminal import visible

PLAIN_SECONDS = 10.0
"""Seconds between two progress lines where there is no terminal."""
_GAP, _NARROWEST_BAR, _WIDEST_BAR = 2, 10, 60


class PatientConsole(Console):
    """A console that raises BrokenPipeError where its reader has gone; rich would end the program."""

    def on_broken_pipe(self) -> None:
        """Called where the error is being handled."""
        raise BrokenPipeError


class ProgressLine:
    """Steps, what is being done, loss, tokens/s and time left. `say` prints a line that stays."""

    def __init__(self, start: int, steps: int, unheard: Callable[[], None], console: Console | None = None) -> None:
        """`unheard` is called when nothing can be shown any more: the run should save and end."""
        self._console = console or PatientConsole(highlight=False, soft_wrap=True)
        self._unheard: Callable[[], None] | None = unheard
        self._live = Live(self, console=self._console, transient=True) if self._console.is_terminal else None
        self._step, self._steps = start, steps
        self._loss = self._speed = ""
        self._first: tuple[int, float] | None = None
        self._shown = 0.0
        self._doing: tuple[str, float] | None = None

    def __enter__(self) -> "ProgressLine":
        if self._live:
            self._show(self._live.start)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As much as there is room for in one line, the most important first; a bar where room is left."""
        counter = f"step {self._step}/{self._steps}"
        doing = f"{self._doing[0]} {time.perf_counter() - self._doing[1]:.0f} s" if self._doing else ""
        left = self._seconds_left()
        ending = "" if left is None or self._doing else f"{left // 60:.0f}:{left % 60:02.0f} left"
        room = options.max_width - len(counter)
        kept = set()
        for piece in (doing, self._loss, ending, self._speed):
            if piece and len(piece) + _GAP <= room:
                room -= len(piece) + _GAP
                kept.add(piece)
        cells = [piece for piece in (doing, self._loss, self._speed, ending) if piece in kept]
        bar = [ProgressBar(self._steps, self._step, width=min(room - _GAP, _WIDEST_BAR))]
        line = Table.grid(padding=(0, _GAP))
        line.add_row(
            Text(counter, no_wrap=True, overflow="ellipsis"), *(bar if room - _GAP >= _NARROWEST_BAR else []), *cells
        )
        yield line

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Shows `what` is being done, and for how long, in place of what is known of steps in general."""
        self._doing = what, time.perf_counter()
        try:
            yield
        finally:
            self._doing = None

    def update(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Shows the state after `step` updates; the first of a session, which also compiles, has no speed."""
        self._step, self._loss = step, f"loss {loss:.4f}"
        self._speed = "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
        now = time.perf_counter()
        first, self._first = self._first, self._first or (step, now)
        if self._live or (first and now - self._shown < PLAIN_SECONDS):
            return
        self._shown = now
        left = self._seconds_left()
        ending = "" if left is None else f"  {self._speed}  {left:.0f} s left"
        self.say(f"step {step}/{self._steps}  {self._loss}{ending}")

    def say(self, line: str) -> None:
        """Prints a line above the live one."""
        self._show(lambda: self._console.print(visible(line) if self._live else line, markup=False))

    def _show(self, write: Callable[[], None]) -> None:
        """Writes, unless that has failed before: a full disk or a lost terminal must not cost what was learned."""
        if self._unheard is None:
            return
        try:
            write()
        except OSError:
            unheard, self._unheard = self._unheard, None
            unheard()

    def _seconds_left(self) -> float | None:
        """At the pace since the first step of this session, which may have waited for the compiler."""
        if self._first is None or self._first[0] == self._step:
            return None
        return (time.perf_counter() - self._first[1]) / (self._step - self._first[0]) * (self._steps - self._step)
