"""What a run shows while it goes: a live line on a terminal, a plain line now and then elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_tformer.terminal import visible

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
                TextColumn("loss {task.fields[loss]}  {task.fields[speed]}  left"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task("", total=steps, completed=start, loss="", speed="")
        self._steps = steps
        self._first: tuple[int, float] | None = None
        self._shown = 0.0

    def __enter__(self) -> "ProgressLine":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Shows the state after `step` updates; the first of a session, which also compiles, has no speed."""
        speed = "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
        if self._live:
            self._live.update(self._task, completed=step, loss=f"{loss:.4f}", speed=speed)
            return
        now = time.perf_counter()
        if self._first is None:
            self._first, self._shown = (step, now), now
            self.say(f"step {step}/{self._steps}  loss {loss:.4f}")
        elif now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            left = (now - self._first[1]) / (step - self._first[0]) * (self._steps - step)
            self.say(f"step {step}/{self._steps}  loss {loss:.4f}  {speed}  {left:.0f} s left")

    def say(self, line: str) -> None:
        """Prints a line above the live one."""
        self._console.print(visible(line) if self._live else line, markup=False)
