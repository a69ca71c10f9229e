"""Many figures as one table: a row for each thing that was judged, a column for each gate; judged, and as Markdown."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

State = Literal["green", "red", "expected"]


class Gate(NamedTuple):
    """How a gate is shown."""

    short: str
    """At most five letters, as wide as a figure: all columns have to fit into a terminal."""
    meaning: str


GATES = {
    "1 activations": Gate(
        "value",
        "float64, forward: every output, and of models whatever is captured on the way. The figure is the largest "
        "relative error of any of them, in its norm or in its worst element.",
    ),
    "2 gradients": Gate(
        "grads",
        "float64, backward: the gradient of every parameter, each measured by itself; those that are said to be zero "
        "count against the norm of all together.",
    ),
    "3 float32 / allowed": Gate(
        "fp32",
        "float32: our distance from the float64 truth over the distance that is allowed, which is two and a half times "
        "PyTorch's own plus 2^-23.",
    ),
    "4 bfloat16 / allowed": Gate(
        "bf16",
        "bfloat16: the same ratio, with 1.8 times PyTorch's distance allowed (1.5 times for what models compute before "
        "the backward pass).",
    ),
    "4 parts, bfloat16 / allowed": Gate(
        "parts",
        "bfloat16, each part by itself from the same inputs, compiled so that every rounding is made: the same ratio, "
        "with 1.1 times PyTorch's distance allowed for what it computes, and 1.5 times for gradients.",
    ),
    "5 optimizer": Gate(
        "optim", "Fifty steps of AdamW in float64, with clipping that takes effect: losses and all parameters."
    ),
    "6 trajectory / allowed": Gate(
        "path",
        "Training in float32: how far our losses stray from the float64 path over what is allowed, three times as far "
        "as PyTorch's stray plus 1e-6.",
    ),
    "6 trajectory, float64": Gate(
        "f64",
        "The same steps in float64, on both sides: the largest relative difference of a loss or of a parameter at the "
        "end.",
    ),
    "7 dropout": Gate(
        "drop", "Dropout on: PyTorch drops exactly what JAX drew, and gates 1, 2 and 5 hold as they are."
    ),
    "8 decoding": Gate(
        "token",
        "Greedy and beam search: how many tokens differ from those that Hugging Face's generate chooses with the "
        "reference.",
    ),
    "8 decoding, float64": Gate(
        "cache",
        "float64: logits token by token from the cache against the whole forward pass, and the scores of beams.",
    ),
    "9 numbers lost": Gate("lost", "Weights converted there and back: how many numbers differ."),
    "9 bytes lost": Gate("bytes", "Weights converted there and back: how many bytes differ."),
    "10 draws": Gate(
        "draws",
        "Dropout masks, fresh parameters and successive tokens as draws: the worst statistic (rates, means, "
        "deviations, pairs that should be independent), in standard deviations from what chance gives.",
    ),
    "10 first loss": Gate(
        "loss",
        "The loss of a fresh model: how far it is from ln V, that of a guess, and what the spread of its logits adds; "
        "in parts of that addition.",
    ),
}


@dataclass(frozen=True)
class Cell:
    """The worst figure of one row and gate."""

    row: str
    gate: str
    figure: float
    bar: float
    name: str
    """Of the tensor with this figure."""
    expected: bool = False
    """Whether its test passed all the same: it asks for a red gate."""

    @property
    def within(self) -> bool:
        """Whether the figure is a number no larger than its bar."""
        return math.isfinite(self.bar) and 0 <= self.figure <= self.bar

    @property
    def state(self) -> State:
        """green; red; expected: red, as its test asks."""
        return "green" if self.within else "expected" if self.expected else "red"

    @property
    def severity(self) -> tuple[bool, bool, float]:
        """Larger is worse, across gates; what a test asks for is better than any red, and NaN as bad as infinity."""
        ratio = self.figure / (self.bar or 1.0)
        return self.state == "red", not self.within, ratio if math.isfinite(ratio) else math.inf


class Figures:
    """Cells by row and gate; of one row and gate the worst figure stays."""

    def __init__(self, cells: Iterable[Cell] = ()) -> None:
        self.cells: dict[tuple[str, str], Cell] = {}
        for cell in cells:
            known = self.cells.get((cell.row, cell.gate), cell)
            self.cells[cell.row, cell.gate] = max(known, cell, key=lambda each: each.severity)

    @property
    def gates(self) -> list[str]:
        """By number."""
        return sorted({gate for _, gate in self.cells}, key=lambda gate: (len(gate.split()[0]), gate))

    @property
    def rows(self) -> list[str]:
        """In the order in which they came."""
        return list(dict.fromkeys(row for row, _ in self.cells))

    @property
    def note(self) -> str:
        """What the one state that needs explaining means, where there is one."""
        asked = any(cell.state == "expected" for cell in self.cells.values())
        return "(red): above its bar, and its test passed: it asks for that." if asked else ""

    def worst(self, gate: str) -> Cell:
        """The figure of a gate that is nearest to its bar, or farthest above."""
        return max((cell for cell in self.cells.values() if cell.gate == gate), key=lambda cell: cell.severity)

    def bars(self, gate: str) -> str:
        """Of a gate, over all rows."""
        return "/".join(f"{bar:g}" for bar in sorted({cell.bar for cell in self.cells.values() if cell.gate == gate}))

    def state(self, gate: str) -> State:
        """The worst of a gate, over all rows."""
        return self.worst(gate).state


def short(gate: str) -> str:
    """What heads a narrow column: the gate's number over one word."""
    number, *_, last = gate.split()
    return f"{number}\n{GATES[gate].short if gate in GATES else last[:5]}"


def shown(figure: float, digits: int = 1) -> str:
    """A figure with so many digits after the point of its mantissa; ratios near 1 as decimals."""
    if not math.isfinite(figure) or (figure == int(figure) and abs(figure) < 1e4):
        return f"{figure:.0f}"
    return f"{figure:.2f}" if 0.01 <= abs(figure) < 100 else f"{figure:.{digits}e}"


def fault_rows(faults: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The lines of a table of planted faults, its header first; none without faults."""
    rows = [[shown(x) if isinstance(x, float) else str(x) for x in fault.values()] for fault in faults]
    return [list(faults[0]), *rows] if faults else []


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of Markdown."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def gates_markdown(figures: Figures, measured_on: str, *, summary: bool = False) -> str:
    """The table of rows and gates, or of the worst of all rows; what is not green is bold. Below: where measured."""

    def cell(found: Cell | None) -> str:
        if found is None or found.state == "green":
            return "" if found is None else shown(found.figure)
        return f"**{shown(found.figure)} {'red, as expected' if found.expected else 'red'}**"

    gates, count = figures.gates, len(figures.rows)
    rows = [[f"`{row}`", *(cell(figures.cells.get((row, gate))) for gate in gates)] for row in figures.rows]
    if summary:
        rows = [[f"worst of {count} row{'s' * (count != 1)}", *(cell(figures.worst(gate)) for gate in gates)]]
    rows.append(["bar", *map(figures.bars, gates)])
    return f"{markdown_table(['', *gates], rows)}\n\nMeasured on {measured_on}."
