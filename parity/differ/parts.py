"""Values of one side whose parts the other side computes one by one: fused projections, experts in one batch."""

from collections.abc import Iterator

import numpy as np

from parity.differ.fingerprints import Index, fingerprint

_MOST = 16
"""Parts that are looked for, at most."""
_LARGEST = 1 << 20
"""Elements of a value that is taken apart."""


def made_of(array: np.ndarray, other_side: Index) -> list[int]:
    """The values of the other side that, put together along one axis, have the numbers of `array`; else nothing."""
    if array.ndim == 0 or array.size > _LARGEST:
        return []
    for parts in _splits(array):
        found = []
        for part in parts:
            features, _ = fingerprint(part, depends_on_data=True)
            equals = other_side.equals(features) if features is not None else []
            if not equals:
                break
            found += equals
        if len(found) >= len(parts):
            return sorted(set(found))
    return []


def _splits(array: np.ndarray) -> Iterator[list[np.ndarray]]:
    for axis, size in enumerate(array.shape):
        for count in range(2, min(size, _MOST) + 1):
            if size % count == 0 and array.size // count >= 3:
                yield np.split(array, count, axis)
