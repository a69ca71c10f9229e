"""Which weights stand behind the first product of two activations after the place where two sides part."""

import re
from collections.abc import Iterable, Mapping, Sequence

from parity.differ.values import Values

_PRODUCT = re.compile(r"(dot_general|bmm|\bmm|matmul|conv)")
_STEPS = 12

Held = Mapping[str, Sequence[tuple[str, int | None]]]
"""Name of the module's weight -> (path of ours that holds it, its row where layers are stacked)."""


def other_weights(
    ours: Values, theirs: Values, ours_near: Sequence[int], theirs_near: Sequence[int], held_by: Held
) -> str | None:
    """What is wrong where both sides multiply activations that were made with different weights; else None.

    So a map is found out that gives one projection the weights of another: each product by itself has an equal on the
    other side, and only where two of them meet do the sides part.
    """
    here, there = _first_product(ours, ours_near), _first_product(theirs, theirs_near)
    if here is None or there is None or not held_by:
        return None
    mine = {name: path for path, row in _behind(ours, here) for name in _names(path, row, held_by)}
    their = {name for name, _ in _behind(theirs, there)}
    wrong, missing = sorted(mine.keys() - their), sorted(their - mine.keys())
    if len(mine) != len(their) or not wrong or not missing:
        return None
    return f"ours reads {', '.join(wrong)}, as {mine[wrong[0]]}, where theirs reads {', '.join(missing)}"


def is_code(ours: Values, path: str, their: str, held_by: Held) -> bool:
    """Whether it is the code that takes the wrong weight, at `path` in our parameters, and not the map.

    So it is where the map gives that parameter their weight as well, as one of its layers, or gives it to a parameter
    that ours never reads.
    """
    holders = {held for held, _ in held_by.get(their, ())}
    live = ours.live()
    read = {row.name for i, row in enumerate(ours.rows) if row.kind == "parameter" and i in live}
    return bool(holders) and (path in holders or not holders & read)


def _first_product(values: Values, near: Iterable[int]) -> int | None:
    for i in near:
        row = values.rows[i]
        data = [k for k in row.inputs if values.rows[k].data]
        if _PRODUCT.search(row.operation) and len(data) == 2 and all(values.leaf(k) is None for k in data):
            return i
    return None


def _behind(values: Values, number: int) -> set[tuple[str, int | None]]:
    """(weight, layer) of the nearest products with a weight that a value was made of."""
    found: set[tuple[str, int | None]] = set()
    for operand in values.rows[number].inputs:
        layer = [operand]
        for _ in range(_STEPS):
            weights = [
                (values.rows[leaf].name, values.rows[i].layer[-1] if values.rows[i].layer else None)
                for i in layer
                if _PRODUCT.search(values.rows[i].operation)
                for k in values.rows[i].inputs
                if (leaf := values.leaf(k)) is not None and values.rows[leaf].kind == "parameter"
            ]
            if weights:
                found |= set(weights)
                break
            layer = [k for i in layer for k in values.rows[i].inputs if values.rows[k].data and values.leaf(k) is None]
    return found


def _names(path: str, row: int | None, held_by: Held) -> list[str]:
    return [name for name, held in held_by.items() if (path, row) in held or (path, None) in held]
