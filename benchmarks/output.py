"""What all benchmarks have alike: options, sides in processes of their own, tables, notes, the file of figures."""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from benchmarks.harness import Alone, Here, side_environment
from jax_tformer_comparison.machine import Machine, describe_machine

_QUIET = 0.05
"""Up to this fraction of other work the times mean something."""


def options(
    name: str,
    description: str | None,
    arguments: Sequence[str],
    extra: Callable[[argparse.ArgumentParser], object] | None = None,
) -> argparse.Namespace:
    """`device`, `rounds`, `quick` and `out` for `python -m benchmarks.NAME`, and what `extra` adds to the parser."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="where all sides compute (default: cpu)"
    )
    parser.add_argument("--rounds", type=positive, help="turns of every side (default: as many as each case names)")
    parser.add_argument("--quick", action="store_true", help="tiny models: shows that it runs, measures nothing")
    default = Path(f"benchmarks/results/{name}.json")
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help=f"JSON (default: {default})")
    if extra is not None:
        extra(parser)
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


class Session:
    """One run of a benchmark: its clock, its screen, how its sides start, and where its figures go.

    Make it before JAX is imported: where sides have processes of their own, this one takes no accelerator.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """`options` are those of `options`."""
        self.options = options
        # The smoke test runs in one process; on an accelerator both frameworks need their environment.
        self.alone = not options.quick or options.device == "gpu"
        if self.alone:
            os.environ["JAX_PLATFORMS"] = "cpu"
        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = 120
        self._began = time.perf_counter()

    def start(self, kind: str, *given: Any, uses_jax: bool = True) -> Alone | Here:
        """A side, "module:Class" made with `given`; one that computes with torch alone gets no GPU for its JAX."""
        if not self.alone:
            return Here(kind, *given)
        environment = side_environment(kind, self.options.device)
        return Alone(kind, *given, environment=environment if uses_jax else environment | {"JAX_PLATFORMS": "cpu"})

    def say(self, text: str) -> None:
        """A line about what goes on, with the seconds so far."""
        self.console.print(f"{time.perf_counter() - self._began:5.0f} s  {text}", highlight=False)

    def finish(self, figures: Mapping[str, Any], shown: Sequence[RenderableType], notes: Sequence[str]) -> None:
        """Writes the figures with the machine, the notes and the seconds to the file; prints all but the figures."""
        machine, out = describe_machine(self.options.device), self.options.out
        notes = [*notes, *_machine_notes(machine)]
        seconds = time.perf_counter() - self._began
        report = {"machine": machine.as_dict(), **figures, "notes": notes, "seconds": seconds}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        self.console.print(f"\nmeasured on {machine}; device: {machine.device}; {versions}", highlight=False)
        for item in (*shown, "", *(f"- {note}" for note in notes)):
            self.console.print(item, highlight=False)
        self.console.print(f"written to {out} after {seconds:.0f} s", highlight=False, soft_wrap=True)


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The first column holds names, the others numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    return table


def milliseconds(spread: Mapping[str, float], digits: int = 2) -> str:
    """A Spread of seconds (`_asdict`), as "median (low..high)"."""
    median, low, high = (f"{1000 * spread[name]:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low}..{high})"


def megabytes(host: int, device: int | None) -> str:
    """What a process held, and on an accelerator: "123 + 456"."""
    return f"{host / 1e6:.0f}" if device is None else f"{host / 1e6:.0f} + {device / 1e6:.0f}"


def other_work_line(name: str, share: float | None) -> str | None:
    """How busy the machine was with other things while `name` was measured; None where that is not known."""
    if share is None:
        return None
    warning = "; too much to compare times, and PyTorch suffers most" if share > _QUIET else ""
    return f"{name}: {share:.0%} of the processors' time went to other work{warning}"


def _machine_notes(machine: Machine) -> list[str]:
    if machine.device != "cpu":
        return []
    notes = ["On the processor every side has the allocator settings of jax_tformer.run.startup."]
    if machine.vendor == "AuthenticAMD":
        notes.append("This is an AMD processor: torch multiplies matrices with MKL, which is slow on those.")
    return notes
