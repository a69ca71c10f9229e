"""Gate 10, and how what is drawn at random is judged: by its distance from what chance gives, in standard deviations.

Dropout masks, fresh parameters and tokens are drawn once, from fixed keys, and each statistic becomes a z: the number
of its own standard deviations, which follow from the size of the sample, that it is from what is expected. Of many,
chance makes some large: the bar is what chance alone crosses once in a million runs that look at ten million of them.
"""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from parity.gates.measure import Measured

GATE = "10 draws"
CHANCE, STATISTICS = 1e-6, 10**7
BAR = round(-NormalDist().inv_cdf(CHANCE / (2 * STATISTICS)), 2)
"""7.44: the largest of so many |z| exceeds it with this probability at most (Bonferroni's bound), if all are normal."""


class Worst(NamedTuple):
    """The largest |z| of a number of them, and which it is."""

    z: float
    name: str
    count: int


def judged(*found):
    """The largest of all |z| beside its bar; NaN is larger than any number."""
    count = sum(one.count for one in found)
    assert count <= STATISTICS, f"{count:,} statistics; expected at most {STATISTICS:,}, for which the bar is made"
    worst = max(found, key=lambda one: np.inf if np.isnan(one.z) else one.z)
    return Measured(GATE, worst.z, BAR, worst.name)


def largest(scores):
    """The largest |z| of single statistics."""
    name = max(scores, key=lambda name: np.inf if np.isnan(scores[name]) else abs(scores[name]))
    return Worst(abs(scores[name]), name, len(scores))


def worst_pair(parts):
    """The two `[repeats, ...]`, of mean 0 and variance 1, that agree most, as far as the shorter of them goes.

    For independent parts the sum of n products has the variance n.
    """
    names, flat = list(parts), [part.reshape(len(part), -1) for part in parts.values()]
    lengths = np.array([part.shape[1] for part in flat], np.float32)
    # Zeros are behind the end of a shorter one.
    numbers = np.zeros((len(flat), len(flat[0]), int(lengths.max())), np.float32)
    for row, part in zip(numbers, flat, strict=True):
        row[:, : part.shape[1]] = part
    numbers = numbers.reshape(len(flat), -1)
    z = numbers @ numbers.T
    z /= np.sqrt(np.minimum.outer(lengths, lengths) * len(flat[0]))
    z = np.triu(np.abs(z, out=z), 1)
    # NaN, if there is one, comes first.
    one, other = divmod(int(np.argmax(z)), len(z))
    return Worst(float(z[one, other]), f"{names[one]} and {names[other]}", len(z) * (len(z) - 1) // 2)


def dependences(arrays):
    """The worst pair of whole arrays, and of the slices along each of their axes.

    Arrays are `[draws, ...]`, of mean 0 and variance 1. Where axis 1 is the batch, its slices are rows; slices of one
    array are compared with each other and with those of every other array.
    """

    def slices(axis):
        return {
            f"{name}[{':, ' * axis}{index}]": part if axis else part[None]
            for name, array in arrays.items()
            if axis < array.ndim
            for index, part in enumerate(np.moveaxis(array, axis, 0))
        }

    axes = range(max(array.ndim for array in arrays.values()))
    levels = [dict(arrays), *filter(None, map(slices, axes))]
    return [worst_pair(level) for level in levels if len(level) > 1]
