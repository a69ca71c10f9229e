"""Whether our parameters hold what the weight map says, by name, and in which way they do not."""

from collections.abc import Iterator

import numpy as np

from parity.differ.answer import Difference
from parity.differ.fingerprints import BAR
from parity.gates.pair import Tensors
from parity.gates.projection import double

_BLOCK = 1 << 20
"""Elements that are looked at together."""


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
