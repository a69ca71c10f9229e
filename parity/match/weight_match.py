"""What `match_weights` answers: the rows of a weight map with what speaks for each, to approve and to paste."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from parity.gates.weight_map import LEFT_OUT, Weight, WeightMap
from parity.match.candidates import Candidate

Confidence = Literal["verified", "likely", "unsure"]
"""verified: both sides were run, and the outputs depend on it; likely: one candidate stands out; unsure: several do."""
Row = str | Weight | list[Weight]
WIDTH = 80


@dataclass(frozen=True)
class MatchRow:
    """One of our parameters, and which of the module's numbers it holds."""

    ours: str
    """Dotted path in our parameters."""
    shape: tuple[int, ...]
    theirs: Row
    confidence: Confidence
    reason: str


@dataclass(frozen=True)
class WeightMatch:
    """What `match_weights` proposes."""

    rows: tuple[MatchRow, ...]
    unmatched_ours: Mapping[str, str]
    """Our parameters that have no equal in the module, each with what is known of it."""
    unmatched_theirs: Mapping[str, str]
    """The module's parameters and buffers that no row takes, each with what is known of it."""
    verified: bool
    """Whether gate 1, run on both with this map, was green, and every trained parameter that matters has a row."""
    figures: str
    """What was run, and what it showed."""
    left_out: tuple[str | Weight, ...] = ()
    """Parameters of the module, or parts of them, that no row takes and no output depends on, where verified."""

    @property
    def weights(self) -> WeightMap:
        """The map, for `check_parity` and `first_difference`."""
        rest: WeightMap = {LEFT_OUT: list(self.left_out)} if self.left_out else {}
        return {**{row.ours: row.theirs for row in self.rows}, **rest}

    @property
    def unsure(self) -> tuple[MatchRow, ...]:
        """The rows to look at."""
        return tuple(row for row in self.rows if row.confidence == "unsure")

    def table(self) -> str:
        """The map to read and approve, at most 80 columns wide: unsure rows first, and marked."""
        state = "verified" if self.verified else "NOT verified"
        lines = _wrapped(f"{len(self.rows)} rows, {len(self.unsure)} unsure; {state}: {self.figures}", "")
        for row in sorted(self.rows, key=lambda row: row.confidence != "unsure"):
            lines += ["", *_wrapped(f"{row.ours} {list(row.shape)}", "? " if row.confidence == "unsure" else "")]
            lines += _wrapped(f"= {said(row.theirs)}", "    ")
            why = row.reason if row.reason.startswith(row.confidence) else f"{row.confidence}: {row.reason}"
            lines += _wrapped(why, "    ")
        for title, rest in self._unmatched:
            if rest:
                lines += ["", f"{title}:"]
                lines += [line for name, what in rest.items() for line in _wrapped(f"{name} {what}", "    ")]
        return "\n".join(lines)

    def python(self) -> str:
        """The map as Python to paste; run, `weights` is the same map."""
        body = []
        for row in self.rows:
            note = f"  # {row.reason}" if row.confidence == "unsure" else ""
            body.append(f"    {row.ours!r}: {row.theirs!r},{note}")
        if self.left_out:
            body.append(f"    LEFT_OUT: {[*self.left_out]!r},")
        notes = [f"# {title}: {name} {what}" for title, rest in self._unmatched for name, what in rest.items()]
        text = "\n".join(["weights = {", *body, "}", *notes, ""])
        names = ", ".join(name for name in ("LEFT_OUT", "Weight") if re.search(rf"{name}[:(]", text))
        return f"from parity import {names}\n\n{text}" if names else text

    @property
    def _unmatched(self) -> list[tuple[str, Mapping[str, str]]]:
        return [
            ("Of yours, without an equal in the module", self.unmatched_ours),
            ("Of the module, in no row", self.unmatched_theirs),
        ]

    def __str__(self) -> str:
        return self.table()


def as_weights(candidate: Candidate, numbers: Sequence[int] = ()) -> list[Weight]:
    """What a candidate stands for in a map. Where ours are one parameter for each layer: of that with these numbers."""
    found = []
    for tensor, layout in candidate.pieces:
        pattern, sizes, part, into = layout.of_one(numbers).pattern()
        before, after = pattern.split(" -> ")
        moved = before != after or part or into
        found.append(Weight(tensor.name, pattern, sizes, part, into) if moved else Weight(tensor.name))
    return found


def as_row(weights: list[Weight]) -> Row:
    """A row of a map: a name alone where nothing moves."""
    first = weights[0]
    return weights if len(weights) > 1 else first if first != Weight(first.name) or "{" in first.name else first.name


def said(row: Row) -> str:
    """A row in words."""
    if isinstance(row, list):
        return "; ".join(map(said, row))
    if isinstance(row, str):
        return row
    moved = "" if row.axes == "... -> ..." else f", {row.axes}"
    sizes = "".join(f", {name}={size}" for name, size in row.sizes.items())
    cuts = "".join(
        f", {into}{name} {rows}" if isinstance(rows, int) else f", {into}{name} {rows[0]} to {rows[1] - 1}"
        for into, part in (("", row.part), ("into ", row.into))
        for name, rows in part.items()
    )
    return f"{row.name}{moved}{sizes}{cuts}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent) + "    ", break_on_hyphens=False
    )
