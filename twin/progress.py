"""Shows a running comparison: as a table on a terminal, as a plain line now and then elsewhere."""

import statistics
import time
from collections.abc import Iterable
from contextlib import ExitStack

from rich.live import Live
from rich.table import Table

from jax_tformer.runs.metrics import PatientConsole
from jax_tformer.terminal import visible
from twin.jax_side import JaxSide
from twin.machine import peak_memory, quiet
from twin.record import SeedRecord
from twin.sides import StepFigures
from twin.torch_side import TorchSide

PLAIN_SECONDS, _REFRESH_SECONDS = 10.0, 0.25
"""Seconds between two lines without a terminal, and between two refreshes of the table on one."""


class LiveView(ExitStack):
    """Shows both sides next to each other. Draws between steps only, because a thread would disturb the timing."""

    def __init__(self, steps: int, seeds: int, *sides: JaxSide | TorchSide) -> None:
        super().__init__()
        self._console = PatientConsole(highlight=False, soft_wrap=True)
        table = Live(console=self._console, auto_refresh=False)
        self._live = self.enter_context(table) if self._console.is_terminal else None
        self._steps, self._seeds, self._sides = steps, seeds, sides
        self._first = self._shown = 0.0
        self._done = 0

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
        step = f"step {record.steps}/{self._steps}"
        seed = f"seed {record.seed}" if self._seeds > 1 else ""
        if self._live:
            title = "  ".join(filter(None, (step, seed, rest)))
            self._live.update(make_table(record, title, self._sides), refresh=True)
        else:
            self.say("  ".join(filter(None, (seed, step, describe(record), rest))))


def describe(record: SeedRecord) -> str:
    """Says in a line where both sides are."""
    jax, torch, ours, theirs = _newest(record)
    disturbed = record.other_work is not None and not quiet(record.other_work)
    others = f" (other work {record.other_work:.0%})" if disturbed else ""
    return (
        f"loss JAX {jax.loss:.6f}  PyTorch {torch.loss:.6f}  difference {abs(jax.loss - torch.loss):.1e}  "
        f"ms a step {ours:.1f} / {theirs:.1f}{others}"
    )


def make_table(record: SeedRecord, title: str, sides: Iterable[JaxSide | TorchSide]) -> Table:
    """Makes a table of where both sides are."""
    jax, torch, ours, theirs = _newest(record)
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("JAX", "PyTorch", "JAX - PyTorch"):
        table.add_column(name, justify="right", min_width=12)
    table.add_row("loss, nats a token", f"{jax.loss:.8f}", f"{torch.loss:.8f}", f"{jax.loss - torch.loss:+.2e}")
    if "truth" in record.figures:
        truth = record.figures["truth"][-1].loss
        table.add_row("from the float64 truth", f"{jax.loss - truth:+.2e}", f"{torch.loss - truth:+.2e}")
    norms = jax.gradient_norm, torch.gradient_norm
    table.add_row("gradient norm", *(f"{norm:.6f}" for norm in norms), f"{norms[0] - norms[1]:+.2e}")
    speeds = 1000 * jax.tokens / ours, 1000 * torch.tokens / theirs
    slower, faster = f"{ours / theirs - 1:+.0%}", f"{speeds[0] / speeds[1] - 1:+.0%}"
    if not quiet(record.other_work):
        # Times on a busy machine are not comparable; in the first second it is not known to be quiet.
        slower, faster = "" if record.other_work is None else f"other work {record.other_work:.0%}", ""
    table.add_row("ms a step, median", f"{ours:.1f}", f"{theirs:.1f}", slower)
    table.add_row("tokens/s", *(f"{speed:,.0f}" for speed in speeds), faster)
    memory = [size for side in sides if (size := side.device_memory()) is not None]
    together = [] if memory else ["", "", f"together {peak_memory() / 1e6:,.0f}"]
    table.add_row("peak memory, MB", *(f"{size / 1e6:,.0f}" for size in memory), *together)
    return table


def _newest(record: SeedRecord) -> tuple[StepFigures, StepFigures, float, float]:
    """The newest step of both sides, and the median milliseconds of theirs: without the first, which also compiles."""
    jax, torch = record.figures["jax"], record.figures["torch"]
    ours, theirs = (1000 * statistics.median([step.seconds for step in steps[1:] or steps]) for steps in (jax, torch))
    return jax[-1], torch[-1], ours, theirs
