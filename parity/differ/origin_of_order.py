"""Whether what two places read is in one order; else where the order was lost before them."""

from typing import NamedTuple

import numpy as np

from parity.differ.alignment import Start
from parity.differ.element_order import exchanged_axes, order, swapped_blocks
from parity.differ.values import Values

_STEPS = 50
"""Values to go back, at most."""


class Origin(NamedTuple):
    """Where two values with the same numbers came into different orders."""

    inherited: tuple[int, int] | None
    """(ours, theirs): the first such values; None where the inputs are in one order."""
    checked: bool
    """Whether at least one input was compared element by element."""
    said: str = ""
    exchanged: bool = False
    """Whether an input is only the same with two axes of one size exchanged: each side may mean another one."""


def origin_of_order(first: Start, second: Start) -> Origin:
    """Looks at what both places read; walks back from an input that is in another order to where that begins."""
    ours, theirs = first.values, second.values
    checked = False
    for i in first.agreed:
        for j in [j for j in ours.equal.get(i, ()) if j in second.agreed][:1]:
            state = _order(ours, theirs, i, j)
            checked |= state == "same"
            here, there = ours.array(i), theirs.array(j)
            if here is None or there is None:
                continue
            if state == "same" and (axes := exchanged_axes(here, there)) is not None:
                return Origin(None, False, f"axes {axes[0]} and {axes[1]} of what both read are exchanged", True)
            if state == "other":
                return _walk(ours, theirs, i, j)
    for i in first.row.inputs if checked else ():
        for j in [] if ours.rows[i].data else [j for j in ours.equal.get(i, ()) if j in second.row.inputs][:1]:
            if _order(ours, theirs, i, j) == "other":
                return _walk(ours, theirs, i, j)
    return Origin(None, checked)


def _order(ours: Values, theirs: Values, i: int, j: int) -> str:
    here, there = ours.array(i), theirs.array(j)
    if here is None or there is None:
        return "unknown"
    state = order(here, there)
    # A table repeats some of its numbers, so that not every order shows; whole parts of it do.
    constant = not ours.rows[i].data and len(np.unique(here)) > 2
    return "other" if state == "unknown" and constant and swapped_blocks(here, there) else state


def _walk(ours: Values, theirs: Values, i: int, j: int) -> Origin:
    for _ in range(_STEPS):
        before = _mixed_before(ours, theirs, i, j)
        if before is None:
            break
        i, j = before
    here, there = ours.array(i), theirs.array(j)
    said = swapped_blocks(here, there) if here is not None and there is not None else None
    return Origin((i, j), True, said or "")


def _mixed_before(ours: Values, theirs: Values, i: int, j: int) -> tuple[int, int] | None:
    """An input of ours whose equal among their inputs, near or far, is in another order."""
    table = not ours.rows[i].data
    behind = [j] * table + _behind(theirs, j)
    for k in [i] * table + _behind(ours, i):
        for m in ours.equal.get(k, ()):
            # A table may be copied on one side alone, to the shape of what it is added to.
            if m in behind and (k, m) != (i, j) and _order(ours, theirs, k, m) == "other":
                return k, m
    return None


def _behind(values: Values, number: int, depth: int = 6) -> list[int]:
    """The values that a value was made from, near ones first."""
    found, layer = [], [number]
    data = values.rows[number].data
    for _ in range(depth):
        layer = [k for i in layer for k in values.rows[i].inputs if values.rows[k].data == data and k not in found]
        found += layer
    return list(dict.fromkeys(found))
