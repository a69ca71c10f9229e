"""The place where two sides part, and the values around it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parity.differ.alignment import Equal, Start
from parity.differ.fingerprints import Index
from parity.differ.values import Values

NEAR = 24
"""Values after the start, in the order of execution, among which a kind is looked for."""
REACH = 40 * NEAR
"""Values of the program, at most, among which these are found."""


@dataclass
class Divergence:
    """The place where two sides part, and what is known about it."""

    ours: Values
    theirs: Values
    equal: Equal
    here: Start
    there: Start
    array: Callable[[Values, int], np.ndarray | None]
    """(side, value) -> its numbers."""

    def near(self, values: Values, start: Start, equal: Mapping[int, list[int]]) -> list[int]:
        """The unmatched values from the start on that follow from it, the start first."""
        found, seen = [start.number], {start.number}
        for i in range(start.number + 1, min(start.number + REACH, len(values.rows))):
            row = values.rows[i]
            if i not in equal and any(k in seen for k in row.inputs):
                seen.add(i)
                found.append(i)
            if len(found) >= NEAR:
                break
        return found

    @cached_property
    def ours_near(self) -> list[int]:
        """Ours from the start on."""
        return self.near(self.ours, self.here, self.equal.ours)

    @cached_property
    def theirs_near(self) -> list[int]:
        """Theirs from the start on."""
        return self.near(self.theirs, self.there, self.equal.theirs)

    @cached_property
    def shared(self) -> list[tuple[int, int]]:
        """(ours, theirs) of the values that both starts read."""
        return [(i, j) for i in self.here.agreed for j in self.equal.ours.get(i, ()) if j in self.there.agreed]


def among(values: Values, numbers: Iterable[int]) -> Index:
    """Finds some values of a side by their fingerprints."""
    chosen = set(numbers)
    return Index(
        [row.features if i in chosen else None for i, row in enumerate(values.rows[: max(chosen, default=-1) + 1])]
    )
