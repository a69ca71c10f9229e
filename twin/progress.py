"""Shows a running comparison: as a table on a terminal, as a plain line now and then elsewhere."""

import statistics
import time
from types import TracebackType

from rich.live import Live
from rich.table import Table

from jax_tformer.runs.metrics import PatientConsole
from jax_tformer.terminal import visible
from twin.machine import peak_memory, quiet
from twin.record import SeedRecord
from twin.sides import Side

PLAIN_SECONDS, _REFRESH_SECONDS = 10.0, 0.25
"""Seconds between two lines without a terminal, and between two refreshes of the table on one."""


class LiveView:
    """Shows both sides next to each other. Draws between steps only, because a thread would disturb the timing."""

    def __init__(self, steps: int, seeds: int, sides: tuple[Side, Side]) -> None:
        self._console = PatientConsole(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._steps, self._seeds, self._sides = steps, seeds, sides
        self._first = self._shown = 0.0
        self._done = 0

    def __enter__(self) -> "LiveView":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def say(self, line: str) -> None:
        """Prints a permanent line."""
        self._console.print(visible(line) if self._live else line, markup=False)

    def update(self, record: SeedRecord) -> None:
        """Shows the newest step of `record`, if enough time has passed since the last update."""
        self._done += 1
        now, last = time.perf_counter(), record.steps == self._steps
        if self._done == 1:
            self._first = now
        elif not last and now - self._shown < (_REFRESH_SECONDS if self._live else PLAIN_SECONDS):
            return
        self._shown = now
        # Counts from the second step, because the first one also compiles.
        left = (now - self._first) / max(self._done - 1, 1) * (self._steps * self._seeds - self._done)
        rest = f"{left:.0f} s left" if self._done > 1 else ""
        if self._live:
            self._live.update(self._table(record, rest), refresh=True)
        else:
            self.say(self._line(record, rest))

    def _line(self, record: SeedRecord, rest: str) -> str:
        jax, torch = record.jax[-1], record.torch[-1]
        ours, theirs = self._milliseconds(record)
        seed = f"seed {record.seed}  " if self._seeds > 1 else ""
        disturbed = record.other_work is not None and not quiet(record.other_work)
        others = f" (other work {record.other_work:.0%})" if disturbed else ""
        return (
            f"{seed}step {record.steps}/{self._steps}  loss JAX {jax.loss:.6f}  PyTorch {torch.loss:.6f}  "
            f"difference {abs(jax.loss - torch.loss):.1e}  ms a step {ours:.1f} / {theirs:.1f}{others}  {rest}"
        )

    def _table(self, record: SeedRecord, rest: str) -> Table:
        jax, torch = record.jax[-1], record.torch[-1]
        ours, theirs = self._milliseconds(record)
        seed = f"  seed {record.seed}" if self._seeds > 1 else ""
        table = Table(title=f"step {record.steps}/{self._steps}{seed}  {rest}", title_justify="left")
        table.add_column("")
        for name in ("JAX", "PyTorch", "JAX - PyTorch"):
            table.add_column(name, justify="right", min_width=12)
        table.add_row("loss, nats a token", f"{jax.loss:.8f}", f"{torch.loss:.8f}", f"{jax.loss - torch.loss:+.2e}")
        if record.truth:
            truth = record.truth[-1].loss
            table.add_row("from the float64 truth", f"{jax.loss - truth:+.2e}", f"{torch.loss - truth:+.2e}", "")
        norms = jax.gradient_norm, torch.gradient_norm
        table.add_row("gradient norm", f"{norms[0]:.6f}", f"{norms[1]:.6f}", f"{norms[0] - norms[1]:+.2e}")
        speeds = [1000 * jax.tokens / milliseconds for milliseconds in (ours, theirs)]
        ratios = [f"{ours / theirs - 1:+.0%}", f"{speeds[0] / speeds[1] - 1:+.0%}"]
        if not quiet(record.other_work):
            # Times on a busy machine are not comparable; in the first second it is not known to be quiet.
            ratios = ["" if record.other_work is None else f"other work {record.other_work:.0%}", ""]
        table.add_row("ms a step, median", f"{ours:.1f}", f"{theirs:.1f}", ratios[0])
        table.add_row("tokens/s", *(f"{speed:,.0f}" for speed in speeds), ratios[1])
        memory = [side.device_memory() for side in self._sides]
        if memory[0] is not None and memory[1] is not None:
            table.add_row("peak memory, MB", *(f"{size / 1e6:,.0f}" for size in memory if size is not None), "")
        else:
            table.add_row("peak memory, MB", "", "", f"together {peak_memory() / 1e6:,.0f}")
        return table

    @staticmethod
    def _milliseconds(record: SeedRecord) -> tuple[float, float]:
        # Leaves out the first step, which also compiles, once there is another.
        ours, theirs = ([1000 * figures.seconds for figures in side[1:] or side] for side in (record.jax, record.torch))
        return statistics.median(ours), statistics.median(theirs)
