"""What all benchmarks have alike: the command line, sides by turns, medians and spreads, tables, the file of figures.

Every process of a side imports the program again, so that neither this nor a program imports a framework, or what
draws tables, before it is needed.
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.compare import compare, read_saved
from benchmarks.sides import HUGGING_FACE, REFERENCE
from jax_tformer.config.errors import InputError, Positive, check_fields
from parity.machine import count_cores
from twin.machine import Neighbours, describe_machine
from twin.sides import HUGE_PAGES, Alone, Here, SideFailed

Kinds = dict[str, tuple[Any, ...]]
"""Side -> the "module:name" that makes it, and what it is given."""
Sides = dict[str, Alone | Here]
_QUIET = 0.05
"""Up to this fraction of other work the times mean something."""


class Report(NamedTuple):
    """What a benchmark found."""

    figures: dict[str, Any]
    """For JSON."""
    ours: Mapping[str, Mapping[str, float]]
    """The seconds that ours takes in each case, as spreads: what `--against` compares."""
    shown: Sequence[Any]
    """Tables and lines for people."""
    notes: Sequence[str]
    """What the figures mean, a line each."""
    agreed: bool = True
    """Whether the sides computed the same."""


@dataclass(frozen=True)
class Options:
    """The options of every benchmark."""

    device: Literal["cpu", "gpu"] = "cpu"
    """Where all sides compute."""
    rounds: Positive | None = None
    """Turns of every side; None: as many as each case names."""
    quick: bool = False
    """Take tiny models: shows that it runs, measures nothing."""
    out: Path | None = None
    """The file of figures; None: benchmarks/results/NAME.json."""
    against: Path | None = None
    """An earlier --out: status 1 where ours became 10% slower."""


@dataclass(frozen=True)
class ModelOptions(Options):
    """The options of a benchmark of several models."""

    model: str | None = None
    """This one alone, as the tables name it; None: all."""


def run_benchmark(
    name: str,
    description: str | None,
    arguments: Sequence[str],
    measure: Callable[["Session"], Report],
    kind: type[Options] = Options,
) -> int:
    """Runs `python -m benchmarks.NAME` with options of this kind: writes and prints what `measure` finds.

    Returns the exit status: 1 where sides disagree or ours became slower than `--against` says (the figures are written
    all the same), and where a side fails that must not; 2 for bad input.
    """
    from jax_tformer.terminal import parse

    prog, saved = f"python -m benchmarks.{name}", None
    try:
        options = parse(kind, arguments, prog=prog, description=description or "")
        check_fields(options)
        session, against = Session(name, options), options.against
        if against is not None:
            if against.resolve() == session.out.resolve():
                raise InputError(
                    f"--against and --out are both {session.out}; expected two files, as --out is overwritten"
                )
            saved = read_saved(against, name, describe_machine(name_device(session.device)))
        report = measure(session)
    except (InputError, SideFailed) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    session.finish(report)
    return 0 if (saved is None or compare(saved, report.ours)) and report.agreed else 1


class Session:
    """One run of a benchmark: its options, its clock, its screen, and how its sides start.

    It is made before JAX is imported: where sides have processes of their own, this one takes no accelerator.
    """

    def __init__(self, name: str, options: Any) -> None:
        from rich.console import Console

        self.name, self.options, self.device, self.quick = name, options, options.device, options.quick
        self.out = options.out or Path(f"benchmarks/results/{name}.json")
        # The smoke test runs in one process; on an accelerator both frameworks need their environment.
        self.alone = not options.quick or options.device == "gpu"
        if self.alone:
            os.environ["JAX_PLATFORMS"] = "cpu"
        self._console = Console()
        if not self._console.is_terminal:
            self._console.width = 120
        self._began, self._others = time.perf_counter(), Neighbours()

    @contextmanager
    def sides(self, kinds: Kinds) -> Iterator[Sides]:
        """Starts the side that each "module:name" makes of what stands behind it, and ends all at last."""
        started: Sides = {}
        try:
            for name, (kind, *given) in kinds.items():
                if self.alone:
                    uses_jax = not kind.startswith((HUGGING_FACE, REFERENCE))
                    environment = side_environment(self.device, uses_jax=uses_jax)
                    started[name] = Alone(kind, *given, environment=environment)
                else:
                    started[name] = Here(kind, *given)
            yield started
        finally:
            for side in started.values():
                side.close()

    def chosen(self, cases: Sequence[Any]) -> Sequence[Any]:
        """Picks the cases that `--model` names. Raises InputError for a name that none has."""
        wanted, known = self.options.model, [case.model for case in cases]
        if wanted not in (None, *known):
            raise InputError(f"--model is {wanted!r}; expected one of {', '.join(map(repr, known))}")
        return [case for case in cases if wanted in (None, case.model)]

    def rounds(self, usual: int) -> int:
        """How many turns every side gets: what `--rounds` says, or as many as usual."""
        return self.options.rounds or usual

    def say(self, text: str) -> None:
        """Prints a line about what goes on, with the seconds so far."""
        self._console.print(f"{time.perf_counter() - self._began:5.0f} s  {text}", highlight=False)

    def finish(self, found: Report) -> None:
        """Writes the figures with the machine, the notes and the seconds to the file; prints all but the figures.

        Both say how much other work ran all the while.
        """
        from rich.table import Table

        machine, share = describe_machine(name_device(self.device)), self._others.share()
        notes = [*found.notes]
        if self.device == "cpu" and machine.vendor == "AuthenticAMD":
            notes.append("This is an AMD processor: torch multiplies matrices with MKL, which is slow on some of them.")
        seconds = time.perf_counter() - self._began
        measured = {"benchmark": self.name, "machine": vars(machine), "ours": found.ours, **found.figures}
        measured |= {"notes": notes, "seconds": seconds, "other_work": share}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(measured, indent=1, allow_nan=False) + "\n")
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        self._console.print(f"\nmeasured on {machine}; device: {machine.device}; {versions}", highlight=False)
        for item in (*found.shown, *other_work("all of it", share), "", *(f"- {note}" for note in notes)):
            if isinstance(item, Table):
                # A table is copied without what stands around it.
                item.title = f"{item.title}; {machine}"
            self._console.print(item, highlight=False)
        self._console.print(f"written to {self.out} after {seconds:.0f} s", highlight=False, soft_wrap=True)


def name_device(device: str) -> str:
    """Returns "cpu", or "gpu" with the name that the driver knows it by; asking the driver occupies nothing."""
    tool = shutil.which("nvidia-smi")
    if device == "cpu" or tool is None:
        return device
    asked = subprocess.run([tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return ": ".join([device, *asked.stdout.splitlines()[:1]])


def side_environment(device: str, *, uses_jax: bool = True) -> dict[str, str]:
    """The variables that a side's process begins with: full float32, no caches of compiled programs, all cores.

    On the processor all sides alike have huge pages, which make PyTorch faster too. Where a side needs no JAX, its JAX
    gets no GPU.
    """
    general = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": str(count_cores()),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    if device == "cpu":
        return general | HUGE_PAGES | {"JAX_PLATFORMS": "cpu"}
    # Products of float32 numbers in float32, as PyTorch computes them; and no more memory than is needed.
    precise = {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return general | precise | {"JAX_PLATFORMS": "cuda,cpu" if uses_jax else "cpu"}


def by_turns(calls: Mapping[str, Callable[[], Any]], rounds: int, *, seconds: float = math.inf) -> dict[str, list[Any]]:
    """Calls each in turn, A B A B, so that a slow minute of the machine strikes all alike; returns all answers.

    After `seconds` no round begins beyond the second: a busy machine must not take hours.
    """
    found: dict[str, list[Any]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(rounds):
        if turn >= 2 and time.perf_counter() - began > seconds:
            break
        for name, call in calls.items():
            found[name].append(call())
    return found


def spread(numbers: Sequence[float], unit: float = 1.0) -> dict[str, float]:
    """Sums up several measurements of one thing, times `unit`: median, low, high."""
    scaled = [unit * number for number in numbers]
    return {"median": statistics.median(scaled), "low": min(scaled), "high": max(scaled)}


def spreads(turns: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Sums up several measurements of the same things, each by its name."""
    return {name: spread([turn[name] for turn in turns]) for name in turns[0]}


def megabytes(side: Alone | Here) -> str:
    """The most that a side's process has held so far; beside it what was held on its accelerator: "123 + 456"."""
    held = (side.call(name) for name in ("peak_memory", "device_memory"))
    return " + ".join(f"{size / 1e6:.0f}" for size in held if size is not None)


def make_table(title: str, rows: Mapping[str, Mapping[str, Any]], bold: str | None = None) -> Any:
    """Makes a table of rows by name, all with the same columns; the row of the name `bold` stands out."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in next(iter(rows.values())):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *map(show, row.values()), style="bold" if name == bold else None)
    return table


def show(figure: Any) -> str:
    """Shows a number with four digits, a spread as "median (low..high)", and None as nothing."""
    if isinstance(figure, dict):
        return "{} ({}..{})".format(*(show(figure[name]) for name in ("median", "low", "high")))
    if isinstance(figure, float):
        return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}"
    return "" if figure is None else str(figure)


def other_work(name: str, share: float | None) -> list[str]:
    """Says in a line how much other work ran while `name` was measured; no line where nobody knows."""
    if share is None:
        return []
    warning = "; too much to compare times, and PyTorch suffers most" if share > _QUIET else ""
    return [f"{name}: {share:.0%} of the processors' time went to other work{warning}"]
