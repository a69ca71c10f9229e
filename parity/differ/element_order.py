"""Whether two arrays with the same numbers have them in the same order, up to a layout."""

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations, permutations
from typing import Literal

import numpy as np

from parity.differ.fingerprints import finite
from parity.gates.projection import double

Order = Literal["same", "other", "unknown"]
_CLOSE = 1e-8
NEARLY = 1e-5
"""How far apart, over the largest, elements may be that lie in one place: numbers that were moved are farther."""
_LARGEST = 1 << 22
"""Elements; larger arrays are taken as they are."""
_BLOCK = 1 << 20
"""Elements that are looked at together."""


def in_our_layout(ours: np.ndarray, theirs: np.ndarray, bar: float = _CLOSE) -> np.ndarray | None:
    """Their array with its axes as ours has them: the arrangement that differs least; None where no one fits.

    Axes may be in another order, merged or split. Arrays of different sizes have no common layout.
    """
    best, least = None, np.inf
    for candidate in layouts(ours, theirs):
        difference = float(np.abs(finite(ours) - finite(candidate)).mean()) if ours.size else 0.0
        if difference < least:
            best, least = candidate, difference
            if difference <= bar * float(np.abs(finite(ours)).mean() + 1e-300):
                break
    return best


def distance(ours: np.ndarray | None, theirs: np.ndarray | None) -> float:
    """The largest difference of two elements that lie in one place, over the largest element; infinity where no layout
    is common to both."""
    if ours is None or theirs is None or not 0 < ours.size <= _LARGEST:
        return np.inf
    there = in_our_layout(ours, theirs)
    largest = float(np.abs(finite(ours)).max()) + 1e-300
    return np.inf if there is None else float(np.abs(finite(ours) - finite(there)).max()) / largest


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


def with_axes_as(ours: np.ndarray, theirs: np.ndarray) -> list[np.ndarray]:
    """Their array with its axes in every order that gives it our shape; axes are neither merged nor split."""
    here, there = ours.squeeze(), theirs.squeeze()
    if sorted(here.shape) != sorted(there.shape) or there.ndim > 5:
        return []
    moved = (there.transpose(axes) for axes in permutations(range(there.ndim)))
    return [array.reshape(ours.shape) for array in moved if array.shape == here.shape]


def without_copies(array: np.ndarray) -> np.ndarray:
    """The array with one entry, the first, on each axis along which it only repeats itself."""
    for axis in range(array.ndim if array.size else 0):
        first = array.take([0], axis)
        array = first if (array == first).all() else array
    return array


def layouts(ours: np.ndarray, theirs: np.ndarray) -> list[np.ndarray]:
    """Their array in our shape: its axes in every order, split, or merged where they lie apart in ours."""
    if ours.size != theirs.size:
        return []
    here, there = ours.squeeze(), theirs.squeeze()
    found = []
    if there.ndim <= 5:
        found += [there.transpose(axes).reshape(ours.shape) for axes in permutations(range(there.ndim))]
    if here.ndim <= 5:
        for axes in permutations(range(here.ndim)):
            # Their array has axes merged that lie apart in ours.
            moved = there.reshape([here.shape[axis] for axis in axes])
            found.append(moved.transpose(np.argsort(axes)).reshape(ours.shape))
    return found


def order(ours: np.ndarray, theirs: np.ndarray) -> Order:
    """Whether two arrays of one fingerprint agree element by element in some layout.

    "unknown" where they are of different sizes, too large, or repeat their numbers so often that no order shows.
    """
    if ours.size != theirs.size or not 2 < ours.size <= _LARGEST:
        return "unknown"
    close = _CLOSE * float(np.abs(finite(ours)).max() + 1e-300)
    if (apart := distance(ours, theirs)) <= NEARLY:
        # Numbers that lie where they should, and differ, were not moved.
        return "same" if apart <= _CLOSE else "unknown"
    here, there = np.sort(finite(ours).reshape(-1)), np.sort(finite(theirs).reshape(-1))
    if float((np.diff(here) <= close).mean()) > 0.02:
        return "unknown"
    if float(np.abs(here - there).max()) > close:
        return "unknown"
    return "same" if _by_digits(_places(ours, theirs), ours.shape) else "other"


def exchanged_axes(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, ...]:
    """Two axes of one size that have to be exchanged, where both arrays are of one shape; none where none have to."""
    close = _CLOSE * float(np.abs(finite(ours)).max(initial=0.0) + 1e-300)

    def same(array: np.ndarray) -> bool:
        return float(np.abs(finite(ours) - finite(array)).max(initial=0.0)) <= close

    axes = [*range(ours.ndim)]
    if ours.shape != theirs.shape:
        axes = [axis for axis in axes if ours.shape[axis] > 1]
        ours, theirs = ours.squeeze(), theirs.squeeze()
    if ours.shape != theirs.shape or ours.size > _LARGEST or same(theirs):
        return ()
    for i, j in combinations(range(ours.ndim), 2):
        if ours.shape[i] == ours.shape[j] > 1 and same(np.swapaxes(theirs, i, j)):
            return axes[i], axes[j]
    return ()


def _places(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """For each of our elements, in our shape: where it lies in theirs."""
    there = np.empty(ours.size, int)
    there[np.argsort(finite(ours).reshape(-1), kind="stable")] = np.argsort(finite(theirs).reshape(-1), kind="stable")
    return there.reshape(ours.shape)


def _by_digits(places: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether the places follow from the digits of the indices, as where axes are split, swapped and merged again."""
    origin = int(places.reshape(-1)[0])
    total = np.full(shape, origin)
    for axis, size in enumerate(shape):
        index: list[int | slice] = [0] * len(shape)
        index[axis] = slice(None)
        offsets = places[tuple(index)] - origin
        if not _is_split(offsets):
            return False
        total = total + offsets.reshape([size if k == axis else 1 for k in range(len(shape))])
    return bool((total == places).all())


def _is_split(offsets: np.ndarray) -> bool:
    """Whether offsets along an axis are those of one axis or of several merged into it, in any order."""
    size = len(offsets)
    if size < 2 or (offsets[1] > 0 and (np.diff(offsets) == offsets[1] - offsets[0]).all()):
        return True
    for inner in range(2, size):
        if size % inner:
            continue
        rows = offsets.reshape(-1, inner)
        if (rows - rows[:, :1] == rows[0] - rows[0, 0]).all() and _is_split(rows[0]) and _is_split(rows[:, 0]):
            return True
    return False


def swapped_blocks(ours: np.ndarray, theirs: np.ndarray) -> str | None:
    """Says along which of our axes whole parts of `theirs` are in another order, as where two heads are swapped."""
    best = in_our_layout(ours, theirs, bar=0.0)
    candidates = [best] if best is not None else []
    candidates += [candidate for candidate in layouts(ours, theirs) if candidate.shape == ours.shape]
    close = _CLOSE * float(np.abs(ours).max() + 1e-300)
    for candidate in candidates:
        for axis, size in enumerate(ours.shape):
            here, there = (
                np.moveaxis(ours, axis, 0).reshape(size, -1),
                np.moveaxis(candidate, axis, 0).reshape(size, -1),
            )
            if size < 2 or size > 4096:
                continue
            partner = _partners(here, there, close)
            if partner is not None and not _is_split(partner - partner[0]):
                moved = np.flatnonzero(partner != np.arange(size))
                return f"along axis {axis} places {moved[0]} to {moved[-1]} are in another order"
    return None


def _partners(here: np.ndarray, there: np.ndarray, close: float) -> np.ndarray | None:
    """For each row of `here` the row of `there` that equals it; None where there is none."""
    by_sum = np.argsort(there.sum(1), kind="stable")
    mine = np.argsort(here.sum(1), kind="stable")
    with np.errstate(invalid="ignore"):
        apart = float(np.abs(here[mine] - there[by_sum]).max())
    if not apart <= close:
        return None
    partner = np.empty(len(here), int)
    partner[mine] = by_sum
    return partner


def in_shape(array: np.ndarray, shape: tuple[int, ...]) -> list[np.ndarray]:
    """An array in the shape of a value: as it is, repeated along axes, or with its axes in another order; or all of it
    where the value is made of it along axes that stay, as a mean is."""
    if array.size > math.prod(shape):
        return [array] if array.ndim == len(shape) else []
    with suppress(ValueError):
        return [np.broadcast_to(array, shape)]
    return with_axes_as(np.empty(shape), array)[:1]
