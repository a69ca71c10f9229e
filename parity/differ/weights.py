"""Whether weights are at fault: numbers that are not what the weight map says, or a place that reads another weight."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from parity.differ.answer import Difference
from parity.differ.fingerprints import BAR
from parity.differ.values import Values
from parity.gates.pair import Tensors
from parity.gates.projection import double

_PRODUCT = re.compile(r"(dot_general|bmm|\bmm|matmul|conv)")
_STEPS = 12
_BLOCK = 1 << 20
"""Elements that are looked at together."""

Held = Mapping[str, Sequence[tuple[str, int | None]]]
"""Name of the module's weight -> (path of ours that holds it, its row where layers are stacked)."""


def wrong_weights(held: Tensors, tensors: Tensors, name: str) -> Difference | None:
    """Weights that are not what the map says, by name; None where all are."""
    wrong, errors = [], []
    scales = {key: array for key, array in tensors.items() if array.size > 1}
    for key, array in held.items():
        array, truth = double(array), double(tensors[key])
        error = error_of(array, truth)
        if error <= BAR:
            continue
        errors.append(f"{key}: {error:.1e}")
        wrong.append(f"{key} is not what our parameters hold: {_misheld(array, key, truth, scales)}")
    if not wrong:
        return None
    kind = wrong[0].split(": ", 1)[1]
    return Difference("parameters", None, None, (), kind, True, True, tuple(wrong), tuple(errors), name=name)


def _misheld(array: np.ndarray, key: str, truth: np.ndarray, tensors: Tensors) -> str:
    """In which way a weight is another one."""
    if array.ndim == 2 and array.shape[0] == array.shape[1] and error_of(array.T, truth) <= BAR:
        return "it is transposed"
    for other, tensor in tensors.items():
        if other != key and tensor.shape == array.shape and error_of(array, tensor) <= BAR:
            return f"it is {other}"
    if not array.any():
        return "it is zero"
    if float(np.abs(np.sort(array, axis=None) - np.sort(truth, axis=None)).max()) <= BAR * float(np.abs(truth).max()):
        return "it has the same numbers in another order"
    ratio = array / np.where(truth == 0, np.nan, truth)
    if np.nanmax(ratio) - np.nanmin(ratio) < BAR:
        return f"it is {float(np.nanmean(ratio)):.6g} times as large"
    return "its numbers are others"


def error_of(ours: np.ndarray, theirs: np.ndarray) -> float:
    """`relative_error` of what is finite; infinite where the two are not finite at the same places.

    It looks at a few rows at a time, so that of a large gradient no copies are made.
    """
    squares, largest = np.zeros(2), np.zeros(2)
    for a, b in _blocks(np.atleast_1d(ours), np.atleast_1d(theirs)):
        known = np.isfinite(b)
        if (np.isfinite(a) != known).any():
            return float("inf")
        difference, b = np.where(known, a, 0) - np.where(known, b, 0), np.where(known, b, 0)
        squares += [np.square(each).sum() for each in (difference, b)]
        largest = np.maximum(largest, [np.abs(each).max() for each in (difference, b)])
    distance, norm = np.sqrt(squares)
    if norm == 0:
        return 0.0 if largest[0] == 0 else float("inf")
    return float(max(distance / norm, largest[0] / largest[1]))


def _blocks(ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The two in float64, some rows at a time."""
    rows = max(1, _BLOCK * len(theirs) // max(theirs.size, 1))
    for start in range(0, len(theirs) if theirs.size else 0, rows):
        yield double(ours[start : start + rows]), double(theirs[start : start + rows])


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
