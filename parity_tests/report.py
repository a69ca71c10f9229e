"""What the parity tests measured: gathered from pytest's reports, judged, written as JSON and Markdown."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax_tformer.presets import ARCHITECTURES

TOLERANCES = {"softmax_1e-2": "softmax, 1e-2", "logits_1e-4": "logits, 1e-4", "logits_1e-5": "logits, 1e-5"}
"""Comparisons by a tolerance picked by hand: the property's key -> the column's title."""


@dataclass(frozen=True)
class Cell:
    """The worst figure of one preset and gate."""

    preset: str
    gate: str
    figure: float
    bar: float
    name: str
    """Of the tensor with this figure."""
    finished: bool = True
    """False where a test that contributed failed: figures that it did not come to may be worse."""

    @property
    def within(self) -> bool:
        """Whether the figure is a number no larger than its bar."""
        return math.isfinite(self.bar) and 0 <= self.figure <= self.bar

    @property
    def state(self) -> str:
        """green, red, or cut: within the bar as far as its tests came."""
        return "red" if not self.within else "green" if self.finished else "cut"

    @property
    def severity(self) -> tuple[bool, float]:
        """Larger is worse, across gates; NaN is as bad as infinity."""
        if not math.isfinite(self.figure):
            return True, math.inf
        zero = 0.0 if self.figure == 0 else math.inf
        return not self.within, self.figure / self.bar if self.bar else zero

    def merged(self, other: "Cell") -> "Cell":
        """The worse of the two, finished where both are."""
        return replace(max(self, other, key=lambda cell: cell.severity), finished=self.finished and other.finished)


@dataclass(frozen=True)
class Fault:
    """A fault that a test planted in one framework, and the gate that saw it."""

    fault: str
    planted: str
    """In the reference, or in the library."""
    gate: str
    figure: float
    bar: float
    margin: float
    missed: tuple[bool | None, ...]
    """By TOLERANCES: would that comparison have let the fault pass; None where it does not apply."""
    test: str = ""

    @classmethod
    def read(cls, value: Mapping[str, Any], test: str = "") -> "Fault":
        """From a recorded property; raises KeyError for a missing key."""
        figure, bar, margin = (float(value[key]) for key in ("figure", "bar", "margin"))
        missed = tuple(value[key] if value[key] is None else bool(value[key]) for key in TOLERANCES)
        return cls(str(value["fault"]), str(value["planted"]), str(value["gate"]), figure, bar, margin, missed, test)

    @property
    def caught(self) -> bool:
        """Whether the gate was red."""
        return not Cell("", self.gate, self.figure, self.bar, "").within


@dataclass
class Results:
    """What the tests' reports add up to."""

    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Test -> the line that says why."""
    outcomes: dict[str, str] = field(default_factory=dict)
    collected: list[str] = field(default_factory=list)
    """Known once the tests have been collected; empty where nobody told."""
    remarks: list[str] = field(default_factory=list)
    """Why the run as a whole is red, beyond figures and tests."""

    def add(self, report: Any) -> None:
        """Takes in pytest's report on one phase of a test."""
        test = report.nodeid
        if report.failed:
            phase = "" if report.when == "call" else f" (in {report.when})" if report.when != "???" else ""
            self.failures.setdefault(test, cause(report) + phase)
            self.outcomes[test] = "failed"
        elif report.when == "call" or report.skipped:
            self.outcomes.setdefault(test, "skipped" if report.skipped else "passed")
        # A failing teardown repeats what its test recorded: cells merge, faults would double.
        for kind, value in getattr(report, "user_properties", ()):
            if kind == "parity":
                preset, gate, figure, bar, name = value
                cell = Cell(preset, gate, float(figure), float(bar), name, report.passed)
                self.cells[preset, gate] = cell.merged(self.cells.get((preset, gate), cell))
            elif kind == "fault" and report.when == "call":
                try:
                    self.faults.append(Fault.read(value, test))
                except KeyError as missing:
                    self.failures.setdefault(test, f"it recorded a fault without {missing}")

    @property
    def gates(self) -> list[str]:
        """By number."""
        return sorted({gate for _, gate in self.cells}, key=lambda gate: (len(number(gate)), gate))

    @property
    def presets(self) -> list[str]:
        """In the order of the presets; then other configs; then variants, which have a comma."""
        known = list(ARCHITECTURES)

        def place(preset: str) -> tuple[bool, int, str]:
            base, comma, _ = preset.partition(",")
            return bool(comma), known.index(base) if base in known else len(known), preset

        return sorted({preset for preset, _ in self.cells}, key=place)

    @property
    def ordered_faults(self) -> list[Fault]:
        """As the tests are written, whichever process ran them first."""
        places = {test: place for place, test in enumerate(self.collected)}
        return sorted(self.faults, key=lambda fault: (places.get(fault.test, len(places)), fault.test))

    def column(self, gate: str) -> tuple[str, str]:
        """The bar and the state of a gate, over all presets."""
        cells = [cell for (_, name), cell in self.cells.items() if name == gate]
        bars, states = sorted({cell.bar for cell in cells}), {cell.state for cell in cells}
        return "/".join(f"{bar:g}" for bar in bars), next(s for s in ("red", "cut", "green") if s in states)

    def worst(self, gate: str | None = None) -> Cell | None:
        """The figure nearest to its bar, or farthest above; of one gate, or of all."""
        cells = (cell for (_, name), cell in self.cells.items() if gate in (None, name))
        return max(cells, key=lambda cell: cell.severity, default=None)

    def faults_line(self) -> str:
        """How many planted faults were seen, and which of them came nearest to passing."""
        if not self.faults:
            return "no faults were planted in this run"
        least = min(self.faults, key=lambda fault: -math.inf if math.isnan(fault.margin) else fault.margin)
        seen = sum(fault.caught for fault in self.faults)
        return (
            f"{seen} of {len(self.faults)} planted faults turned a gate red; "
            f"nearest to passing, at {shown(least.margin)} times the bar: {least.fault}"
        )

    def complaints(self) -> list[str]:
        """Everything that makes the verdict red; empty where it is green."""
        states = Counter(cell.state for cell in self.cells.values())
        missed = sum(not fault.caught for fault in self.faults)
        unrun = len(set(self.collected) - self.outcomes.keys())
        counted = (
            (states["red"], "figure above its bar", "figures above their bars"),
            (states["cut"], "figure of a test that did not finish", "figures of tests that did not finish"),
            (missed, "planted fault that its gate let pass", "planted faults that their gates let pass"),
            (len(self.failures), "failed test", "failed tests"),
            (unrun, "test that did not run", "tests that did not run"),
        )
        return [f"{count} {one if count == 1 else many}" for count, one, many in counted if count] + self.remarks

    def verdict(self) -> str:
        """One line that starts with GREEN or RED."""
        ended = Counter(self.outcomes.values())
        tests = ", ".join(f"{ended[state]} {state}" for state in ("passed", "failed", "skipped") if ended[state])
        if complaints := self.complaints():
            return f"RED: {', '.join(complaints)} (tests: {tests or 'none'})"
        counts = {"figure": len(self.cells), "row": len(self.presets), "planted fault": len(self.faults)}
        figures, rows, faults = (f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items())
        seen = f"; {faults}, all seen" if self.faults else ""
        return f"GREEN: {figures} in {rows}, none above its bar{seen} (tests: {tests})"

    def as_json(self, facts: Mapping[str, Any]) -> str:
        """`facts` (machine, versions, date ...) and everything measured; JSON has no NaN, so "nan", "inf" stand in."""

        def plain(figure: float) -> float | str:
            return figure if math.isfinite(figure) else str(figure)

        cells = [self.cells[key] for key in self._keys()]
        document = {
            "verdict": "red" if self.complaints() else "green",
            "complaints": self.complaints(),
            **facts,
            "tests": dict(Counter(self.outcomes.values())) | {"collected": len(self.collected or self.outcomes)},
            "cells": [
                {"preset": c.preset, "gate": c.gate, "figure": plain(c.figure), "bar": plain(c.bar)}
                | {"passed": c.state == "green", "state": c.state, "worst_tensor": c.name}
                for c in cells
            ],
            "faults": [
                {"fault": f.fault, "planted": f.planted, "gate": f.gate, "figure": plain(f.figure)}
                | {"bar": plain(f.bar), "margin": plain(f.margin), "caught": f.caught}
                | dict(zip(TOLERANCES, f.missed, strict=True))
                for f in self.ordered_faults
            ],
            "failures": [{"test": test, "message": message} for test, message in sorted(self.failures.items())],
        }
        return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def _keys(self) -> Iterator[tuple[str, str]]:
        yield from ((p, g) for p in self.presets for g in self.gates if (p, g) in self.cells)


def number(gate: str) -> str:
    """The 3 of "3 float32 / allowed"."""
    return gate.split()[0]


def cause(report: Any) -> str:
    """The error of a failed report in one line, without the module path of its class."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines() or ["no message"]
    line = lines[0] if crash else lines[-1]
    return re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", line.removeprefix("E").strip())


def shown(figure: float, digits: int = 1) -> str:
    """A figure with so many digits after the point of its mantissa; ratios near 1 as decimals."""
    if not math.isfinite(figure) or (figure == int(figure) and abs(figure) < 1e4):
        return f"{figure:.0f}"
    return f"{figure:.2f}" if 0.01 <= abs(figure) < 100 else f"{figure:.{digits}e}"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def gates_markdown(results: Results, measured_on: str) -> str:
    """The table of presets and gates; what is not green is bold. Below it stands where it was measured."""
    rows = [[f"`{p}`", *(_cell(results.cells.get((p, gate))) for gate in results.gates)] for p in results.presets]
    return f"{_markdown(['', *results.gates], [*rows, _bars(results)])}\n\nMeasured on {measured_on}."


def summary_markdown(results: Results, measured_on: str) -> str:
    """One row: the worst figure of every gate."""
    count = len(results.presets)
    row = [f"worst of {count} row{'s' * (count != 1)}", *(_cell(results.worst(gate)) for gate in results.gates)]
    return f"{_markdown(['', *results.gates], [row, _bars(results)])}\n\nMeasured on {measured_on}."


def _bars(results: Results) -> list[str]:
    return ["bar", *(results.column(gate)[0] for gate in results.gates)]


def _cell(found: Cell | None) -> str:
    if found is None:
        return ""
    return shown(found.figure) if found.state == "green" else f"**{shown(found.figure)} {found.state}**"


def faults_markdown(faults: Sequence[Fault], measured_on: str) -> str:
    """The table of planted faults: which gate saw each, and whether a hand-picked tolerance would have missed it."""
    words = {True: "missed", False: "seen", None: ""}
    rows = []
    for f in faults:
        gate = f.gate if f.caught else f"**none** ({f.gate})"
        figures = (shown(f.figure), f"{f.bar:g}", shown(f.margin))
        rows.append([f.fault, f.planted, gate, *figures, *(words[missed] for missed in f.missed)])
    header = ["fault", "planted in", "seen by gate", "figure", "bar", "figure / bar", *TOLERANCES.values()]
    return f"{_markdown(header, rows)}\n\nMeasured on {measured_on}."
