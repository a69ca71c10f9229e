"""What a run shows while it goes: a live line on a terminal, a plain line now and then elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_SECONDS = 10.0
"""Seconds between two progress lines where there is no terminal."""


class ProgressLine:
    """Loss, tokens/s and time left. `say` prints a line that stays."""

    def __init__(self, start: int, steps: int) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        if self._console.is_terminal:
            self._live = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s  left"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task("", total=steps, completed=start, loss="-", speed="-")
        self._start, self._steps = start, steps
        self._begun = self._shown = time.perf_counter()

    def __enter__(self) -> "ProgressLine":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Shows the state after `step` updates."""
        if self._live:
            self._live.update(self._task, completed=step, loss=f"{loss:.4f}", speed=f"{tokens_per_second:,.0f}")
            return
        now = time.perf_counter()
        if now - self._shown >= PLAIN_SECONDS or step == self._start + 1:
            self._shown = now
            done = step - self._start
            left = (now - self._begun) / done * (self._steps - step)
            self.say(
                f"step {step}/{self._steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {left:.0f} s left"
            )

    def say(self, line: str) -> None:
        """Prints a line above the live one."""
        self._console.print(line, markup=False)
