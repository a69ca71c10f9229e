"""Many figures as one table: a row for each thing that was judged, a column for each gate; judged, and as Markdown."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

from parity.gates.ulps import EDGES, Ulps

State = Literal["green", "red", "cut", "expected"]


class Gate(NamedTuple):
    """How a gate is shown."""

    short: str
    """At most five letters, as wide as a figure: all columns have to fit into a terminal."""
    meaning: str


GATES = {
    "1 activations": Gate(
        "value",
        "float64, forward: every output. The figure is the largest relative error of any of them, in its norm or in "
        "its worst element.",
    ),
    "2 gradients": Gate(
        "grads",
        "float64, backward: the gradient of every parameter, each measured by itself; those that are said to be zero "
        "count against the norm of all together.",
    ),
    "3 float32 / allowed": Gate(
        "fp32",
        "float32: our distance from the float64 truth over the distance that is allowed, which is two and a "
        "half times PyTorch's own plus 2^-23.",
    ),
    "4 bfloat16 / allowed": Gate("bf16", "bfloat16: the same ratio, with 1.8 times PyTorch's distance allowed."),
    "5 optimizer": Gate("optim", "Fifty steps of AdamW in float64, with clipping that takes effect: all parameters."),
    "9 numbers lost": Gate("lost", "Weights converted there and back: how many numbers differ."),
}
"""The gates of anyone's pair."""


@dataclass(frozen=True)
class Cell:
    """The worst figure of one row and gate."""

    row: str
    gate: str
    figure: float
    bar: float
    name: str
    """Of the tensor with this figure."""
    finished: bool = True
    """False where a test that contributed failed: figures that it did not come to may be worse."""
    expected: bool = False
    """Whether its test passed all the same: it asks for a red gate."""

    @property
    def within(self) -> bool:
        """Whether the figure is a number no larger than its bar."""
        return math.isfinite(self.bar) and 0 <= self.figure <= self.bar

    @property
    def state(self) -> State:
        """green; red; expected: red, as its test asks; cut: within the bar as far as its tests came."""
        if self.within:
            return "green" if self.finished else "cut"
        return "expected" if self.expected else "red"

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


@dataclass
class Figures:
    """Cells by row and gate, and the tests that failed."""

    known: ClassVar[Mapping[str, Gate]] = GATES
    """What is said of each gate."""
    heading: ClassVar[str] = "test"
    """What a row is."""

    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Test -> the line that says why."""
    outcomes: dict[str, str] = field(default_factory=dict)
    ulps: dict[tuple[str, str], dict[str, Ulps]] = field(default_factory=dict)
    """Row and gate -> tensor -> how far its numbers are from the truth."""

    def put(self, cell: Cell) -> None:
        """Takes in a figure; of one row and gate the worst stays."""
        self.cells[cell.row, cell.gate] = cell.merged(self.cells.get((cell.row, cell.gate), cell))

    def put_ulps(self, row: str, gate: str, ulps: Mapping[str, Ulps]) -> None:
        """Takes in histograms; those of one row, gate and tensor add up."""
        known = self.ulps.setdefault((row, gate), {})
        for name, each in ulps.items():
            known[name] = known[name].plus(each) if name in known else each

    @property
    def gates(self) -> list[str]:
        """By number."""
        return sorted({gate for _, gate in self.cells}, key=lambda gate: (len(number(gate)), gate))

    @property
    def rows(self) -> list[str]:
        """In the order in which they came."""
        return list(dict.fromkeys(row for row, _ in self.cells))

    def ordered(self) -> Iterator[Cell]:
        """Row by row, and gate by gate."""
        yield from (self.cells[row, gate] for row in self.rows for gate in self.gates if (row, gate) in self.cells)

    def column(self, gate: str) -> tuple[str, State]:
        """The bar and the state of a gate, over all rows."""
        cells = [cell for (_, name), cell in self.cells.items() if name == gate]
        bars, states = sorted({cell.bar for cell in cells}), {cell.state for cell in cells}
        worst: tuple[State, ...] = ("red", "cut", "expected", "green")
        return "/".join(f"{bar:g}" for bar in bars), next(state for state in worst if state in states)

    def worst(self, gate: str | None = None) -> Cell | None:
        """The figure nearest to its bar, or farthest above; of one gate, or of all."""
        cells = (cell for (_, name), cell in self.cells.items() if gate in (None, name))
        return max(cells, key=lambda cell: cell.severity, default=None)

    @classmethod
    def short(cls, gate: str) -> str:
        """What heads a narrow column: the gate's number over one word."""
        known = cls.known.get(gate, Gate(gate.split()[-1][:5], ""))
        return f"{number(gate)}\n{known.short}"


def number(gate: str) -> str:
    """The 3 of "3 float32 / allowed"."""
    return gate.split()[0]


def plain(figure: float) -> float | str:
    """For JSON, which has no NaN: "nan" and "inf" stand in."""
    return figure if math.isfinite(figure) else str(figure)


def with_ulps(document: str, figures: Figures) -> str:
    """A JSON object with the histograms as its last entry, a line for each row and gate; as it is if there are none.

    {"edges": of the bins, in ulps, "of": [{"row", "gate", "unit", "tensors": {name: [counts of ours, of theirs]}}]}
    """
    lines = [
        json.dumps(
            {"row": row, "gate": gate, "unit": next(iter(ulps.values())).unit}
            | {"tensors": {name: each.as_json() for name, each in ulps.items()}},
            separators=(",", ":"),
            ensure_ascii=False,
        )
        for (row, gate), ulps in figures.ulps.items()
        if ulps
    ]
    if not lines:
        return document
    listed = ",\n      ".join(lines)
    edges = json.dumps(EDGES)
    body = document.rstrip().removesuffix("}").rstrip()
    return f'{body},\n  "ulps": {{\n    "edges": {edges},\n    "of": [\n      {listed}\n    ]\n  }}\n}}\n'


def cause(report: Any) -> str:
    """The error of a failed report of pytest in one line, without the module path of its class."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines() or ["no message"]
    line = lines[0] if crash else lines[-1]
    return re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", line.removeprefix("E").strip())


def shown(figure: float, digits: int = 1) -> str:
    """A figure with so many digits after the point of its mantissa; ratios near 1 as decimals."""
    if not math.isfinite(figure) or (figure == int(figure) and abs(figure) < 1e4):
        return f"{figure:.0f}"
    return f"{figure:.2f}" if 0.01 <= abs(figure) < 100 else f"{figure:.{digits}e}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of Markdown."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def gates_markdown(figures: Figures, measured_on: str) -> str:
    """The table of rows and gates; what is not green is bold. Below it stands where it was measured."""
    rows = [[f"`{row}`", *(_cell(figures.cells.get((row, gate))) for gate in figures.gates)] for row in figures.rows]
    return f"{markdown_table(['', *figures.gates], [*rows, _bars(figures)])}\n\nMeasured on {measured_on}."


def summary_markdown(figures: Figures, measured_on: str) -> str:
    """One row: the worst figure of every gate."""
    count = len(figures.rows)
    row = [f"worst of {count} row{'s' * (count != 1)}", *(_cell(figures.worst(gate)) for gate in figures.gates)]
    return f"{markdown_table(['', *figures.gates], [row, _bars(figures)])}\n\nMeasured on {measured_on}."


def _bars(figures: Figures) -> list[str]:
    return ["bar", *(figures.column(gate)[0] for gate in figures.gates)]


def _cell(found: Cell | None) -> str:
    if found is None:
        return ""
    word = "red, as expected" if found.state == "expected" else found.state
    return shown(found.figure) if found.state == "green" else f"**{shown(found.figure)} {word}**"
