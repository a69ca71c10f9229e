"""Rows as sets: what experts compute token by token is the same in any order of the tokens, and in pieces."""

from collections.abc import Collection

import numpy as np

from parity.differ.fingerprints import BAR
from parity.differ.values import Values

_MOST = 1 << 12
"""Rows of an array that is looked at, at most."""
_MASKED = 1e30
_NARROWEST = 3
"""Numbers that a row must have to be told from others."""


class RowIndex:
    """The rows of the values of one side: two projections of each row tell it from others."""

    def __init__(self, values: Values) -> None:
        self._widths: dict[int, list[tuple[int, np.ndarray]]] = {}
        for number in sorted(values.live()):
            row = values.rows[number]
            if row.kind != "parameter" and row.features is not None and number in values.arrays:
                rows = projected(values.arrays[number])
                if len(rows):
                    self._widths.setdefault(row.shape[-1], []).append((number, rows))

    def holders(self, array: np.ndarray) -> list[int]:
        """The values that have all rows of `array`; else those that have nothing but rows of it and together have them
        all; else none."""
        rows = projected(array)
        if not len(rows):
            return []
        whole, pieces, covered = list[int](), list[int](), np.zeros(len(rows), bool)
        for number, others in self._widths.get(array.shape[-1], []):
            here, there = _found(rows, others), _found(others, rows)
            if here.all():
                whole.append(number)
            if there.all():
                pieces.append(number)
                covered |= here
        return whole or (pieces if covered.all() else [])


def projected(array: np.ndarray) -> np.ndarray:
    """Two numbers for each distinct row that is not zero, `[rows, 2]`, in rising order of the first; none for arrays
    without rows."""
    width = array.shape[-1] if array.ndim > 1 else 0
    if width < _NARROWEST or not 0 < array.size // width <= _MOST or array.dtype.kind != "f":
        return np.zeros((0, 2))
    rows = array.reshape(-1, width)
    # Not those of masks, whose "minus infinity" hides all else.
    rows = rows[(np.abs(rows) < _MASKED).all(1) & (rows != 0).any(1)]
    made: np.ndarray = rows @ np.random.default_rng(width).standard_normal((width, 2))
    made = made[np.argsort(made[:, 0], kind="stable")]
    return made[np.r_[True, ~_near(made[1:], made[:-1])]] if len(made) else made


def _near(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    close: np.ndarray = (np.abs(rows - others) <= BAR * (np.abs(rows) + np.abs(others) + 1e-300)).all(-1)
    return close


def _found(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of the rows are among the others."""
    place = np.searchsorted(others[:, 0], rows[:, 0])
    found = np.zeros(len(rows), bool)
    for step in (-1, 0):
        at = np.clip(place + step, 0, len(others) - 1)
        found |= _near(rows, others[at])
    return found


def is_routed(values: Values, number: int, known: Collection[int] = ()) -> bool:
    """Whether a value is made by choosing rows, in an order that the other side need not have: it reads whole numbers
    that depend on data and have no equal, or is a copy of such, or reads what is `known` to be in such an order."""
    rows, inputs = values.rows, values.rows[number].inputs
    if any(i in known or (rows[i].data and is_whole(rows[i].dtype) and i not in values.equal) for i in inputs):
        return True
    return values.copies(number) and any(is_routed(values, i, known) for i in inputs)


def packed(values: Values) -> set[int]:
    """What sequences are that PyTorch packs, the longest first and each step without those that have ended, and what is
    made of them, until they are put back into their order."""
    found = set[int]()
    for number, row in enumerate(values.rows):
        if row.operation == "aten._pack_padded_sequence":
            found.update(row.inputs)
        if row.operation != "aten.index_select" and not found.isdisjoint(row.inputs):
            found.add(number)
    return found


def is_whole(dtype: str) -> bool:
    """Whether these are integers or truth values, with which each side may choose, sort and mask in its own way."""
    return "int" in dtype or "bool" in dtype
