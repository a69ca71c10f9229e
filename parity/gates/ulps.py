"""How far numbers of a narrow type are from the truth, counted in units in the last place (ulps), as histograms."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

EDGES = (0, *(2**power for power in range(13)))
"""The largest distance of each bin but the last, which takes all beyond: 0, 1, 2, 3 to 4, 5 to 8, ..., in ulps."""
MOST = 2**20
"""Of more numbers every second, third ... is looked at, so that there are no more than this."""
_DIGITS = {"float32": (24, -126), "bfloat16": (8, -126), "float16": (11, -14), "float64": (53, -1022)}
"""Binary digits, the hidden one among them, and the exponent of the smallest normal number."""


def distances(numbers: np.ndarray, truth: np.ndarray, unit: str) -> np.ndarray:
    """How far `numbers` are from the nearest numbers of their own type to the truth, in ulps of the type `unit`.

    All `[*shape]`; `truth` is float64, and one ulp is the distance between neighbours of `unit` at its size. 0 is the
    best that a type can do. Infinity stands where the number is none, or the truth is beyond the type.
    """
    digits, smallest = _DIGITS[unit]
    _, exponent = np.frexp(truth)  # truth is a fraction in [0.5, 1) times 2 to this power
    exponent = np.where(truth == 0, smallest, exponent)
    with np.errstate(all="ignore"):
        nearest = truth.astype(numbers.dtype).astype(np.float64)
        missed = np.abs(numbers.astype(np.float64) - nearest)
        found: np.ndarray = np.ldexp(missed, digits - np.maximum(exponent, smallest + 1))
    return np.where(np.isfinite(found), found, np.inf)


@dataclass(frozen=True)
class Ulps:
    """Histograms of one tensor's distances from the truth, ours beside theirs."""

    unit: str
    """The type whose ulps are counted."""
    ours: tuple[int, ...]
    """How many numbers lie in each bin of EDGES; the last bin takes all beyond."""
    theirs: tuple[int, ...]

    def plus(self, other: "Ulps") -> "Ulps":
        """Both together."""
        ours = (here + there for here, there in zip(self.ours, other.ours, strict=True))
        theirs = (here + there for here, there in zip(self.theirs, other.theirs, strict=True))
        return Ulps(self.unit, tuple(ours), tuple(theirs))

    def as_json(self) -> list[list[int]]:
        """[ours, theirs], without the empty bins at the end."""
        return [_trimmed(self.ours), _trimmed(self.theirs)]

    @classmethod
    def read(cls, unit: str, value: Sequence[Sequence[int]]) -> "Ulps":
        """The inverse of `as_json`."""
        ours, theirs = (tuple(side) + (0,) * (len(EDGES) + 1 - len(side)) for side in value)
        return cls(unit, ours, theirs)


def median(counts: Sequence[int]) -> int | None:
    """How many ulps half of the numbers are within, as the edge of a bin; None if that is beyond the last edge."""
    place = int(np.searchsorted(np.cumsum(counts), sum(counts) / 2))
    return EDGES[place] if place < len(EDGES) else None


def histogram(samples: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], unit: str) -> Ulps:
    """Of one tensor in several samples: (ours, theirs, truth), `[*shape]` each. Distances are rounded to whole ulps."""
    every = -(-sum(truth.size for _, _, truth in samples) // MOST) or 1
    ours, theirs, truth = (
        np.concatenate([side.ravel()[::every] for side in sides]) for sides in zip(*samples, strict=True)
    )
    return Ulps(unit, _counts(distances(ours, truth, unit)), _counts(distances(theirs, truth, unit)))


def together(histograms: Iterable[Ulps]) -> Ulps:
    """All of these as one; at least one."""
    return reduce(Ulps.plus, histograms)


def _counts(found: np.ndarray) -> tuple[int, ...]:
    places = np.searchsorted(EDGES, np.rint(found))
    return tuple(map(int, np.bincount(places, minlength=len(EDGES) + 1)))


def _trimmed(counts: tuple[int, ...]) -> list[int]:
    kept = max((place + 1 for place, count in enumerate(counts) if count), default=0)
    return list(counts[:kept])
