"""Recognises a value whatever its layout: a few numbers that no reordering or repetition of its elements changes.

Two arrays of one fingerprint hold the same numbers: transposed, reshaped, split into heads or tiled. Equal values of
two frameworks in float64 agree to about 1e-13 here, different ones differ by far more than `BAR`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

BAR = 1e-9
"""The largest difference between the features of values that count as equal."""
_HUGE = 1e30
"""Larger numbers mean "masked", as infinity does; each framework writes it in its own way."""
_LOW = -5e3
"""Sums with a mask that is written as a finite number are below this."""
_SUMS = 256
_SLICE = 1 << 20
"""Elements that are looked at together: a fingerprint of a large matrix takes little memory."""


def finite(array: np.ndarray) -> np.ndarray:
    """The array in float64, with zero for what is infinite, not a number or a mask's "minus infinity"."""
    array = np.asarray(array).astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        masked = ~(np.abs(array) < _HUGE)
    if masked.any():
        array = np.where(masked, 0.0, array)
    least = float(array.min(initial=0.0))
    if least <= _LOW:
        # A score to which -10,000 or -1e9 was added: far below all others.
        low = array < least / 2
        if not low.all() and float(np.abs(array[~low]).max()) < -least * 1e-2:
            array = np.where(low, 0.0, array)
    return array


def fingerprint(array: np.ndarray, *, depends_on_data: bool) -> tuple[np.ndarray | None, float]:
    """(features or None where the value says nothing, its largest absolute number).

    A constant says nothing unless it was computed from weights or inputs. A value of two numbers, like a mask, is
    recognised by how often the rarer one occurs, so that a mask and its opposite are the same.
    """
    if array.size == 0 or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool or array.dtype.kind == "V"):
        return None, 0.0
    sums, least, most = np.zeros(5), np.inf, -np.inf
    distinct: set[float] = set()
    """The distinct values, as long as there are at most two."""
    # As it lies in memory: the order of the elements says nothing here, and a large matrix is not copied.
    flat = np.asarray(array).ravel(order="K")
    # Sums of powers are taken of numbers of about 1, so that none of them overflows or vanishes.
    unit = float(np.abs(finite(flat[:_SLICE])).max()) or 1.0
    for start in range(0, flat.size, _SLICE):
        part = finite(flat[start : start + _SLICE])
        low, high = float(part.min()), float(part.max())
        least, most = min(least, low), max(most, high)
        if len(distinct) < 3:
            between = part[(part != low) & (part != high)][:1]
            distinct |= {low, high, *between.tolist()}
        part = part / unit
        square = part * part
        sums += [part.sum(), np.abs(part).sum(), square.sum(), (square * part).sum(), (square**2).sum()]
    largest = max(abs(least), abs(most))
    if len(distinct) == 2 and not depends_on_data:
        return _of_mask(array), largest
    trivial = least == most and (not depends_on_data or abs(most) in (0.0, 1.0))
    return None if trivial else _features(sums / flat.size, least / unit, most / unit, unit), largest


def _features(means: np.ndarray, least: float, most: float, unit: float) -> np.ndarray:
    """Means of powers over that of the square, the extremes, and the logarithm of the scale; no layout in it."""
    mean, absolute, square, cube, fourth = means
    scale = np.sqrt(square)
    if scale == 0:
        return np.zeros(8)
    powers = mean / scale, absolute / scale, cube / scale**3, fourth / scale**4
    # A long tail makes the higher means large, and their rounding with them.
    logarithm = np.log(scale) + np.log(unit)  # their product may be too small for a number
    return np.array([*np.arcsinh(powers), *np.arcsinh([least / scale, most / scale]), logarithm, 0.0])


def _of_mask(array: np.ndarray) -> np.ndarray:
    flat = finite(array) if array.dtype != bool else array
    share = float((flat == flat.reshape(-1)[0]).mean())
    return np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, min(share, 1 - share), 1.0])


class Index:
    """Finds the values of one side by their features."""

    def __init__(self, features: Sequence[np.ndarray | None], bar: float = BAR) -> None:
        self.bar = bar
        self.numbers = np.array([i for i, f in enumerate(features) if f is not None], int)
        rows = [f for f in features if f is not None]
        self.rows = np.stack(rows) if rows else np.zeros((0, 8))
        self.order = np.argsort(self.rows[:, 6], kind="stable")
        self.scales = self.rows[self.order, 6]

    def equals(self, features: np.ndarray, bar: float | None = None) -> list[int]:
        """The numbers of the values with these features, in the order of execution."""
        bar = bar or self.bar
        low, high = np.searchsorted(self.scales, [features[6] - bar, features[6] + bar])
        near = self.order[low:high]
        return sorted(self.numbers[near[np.abs(self.rows[near] - features).max(1) < bar]].tolist()) if len(near) else []


def times(features: np.ndarray | None, others: np.ndarray | None) -> float | None:
    """The factor by which the values of the one are those of the other; None where there is none."""
    if features is None or others is None or features[7] != others[7]:
        return None
    mirrored = np.concatenate([-features[[0]], features[[1]], -features[[2]], features[[3]], -features[[5, 4]]])
    for sign, shape in ((1.0, features[:6]), (-1.0, mirrored)):
        if np.abs(others[:6] - shape).max() < BAR:
            return sign * float(np.exp(features[6] - others[6]))
    return None


def sketch(array: np.ndarray) -> np.ndarray:
    """Random sums of the elements of an array: two of one layout are apart as their sums are, to 10%."""
    signs, buckets = _chosen(array.size)
    return np.bincount(buckets, signs * finite(array).ravel(), _SUMS)


@lru_cache(maxsize=8)
def _chosen(size: int) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.random.default_rng(size).integers(0, 2 * _SUMS, size, np.int16)
    return np.where(chosen % 2, 1.0, -1.0).astype(np.float32), chosen // 2


def as_numpy(value: Any) -> np.ndarray | None:
    """The numbers of an array of JAX or PyTorch; None for what has none, like a random key."""
    if hasattr(value, "detach"):
        value = value.detach()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        if getattr(value, "is_sparse", False) or value.device.type == "meta":
            return None
        if value.is_complex():
            return np.asarray(value.cpu().resolve_conj().resolve_neg().abs())
        return np.asarray(value.cpu())
    try:
        array: np.ndarray = np.asarray(value)
    except TypeError:
        return None
    return np.asarray(np.abs(array)) if array.dtype.kind == "c" else array
