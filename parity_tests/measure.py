"""How two tensors are compared: normalised per tensor against a bar, never elementwise with a chosen tolerance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

FLOAT64_BAR = 1e-12
"""Gates 1 and 2: the largest relative error of anything computed in float64."""
FLOAT32_FACTOR, FLOAT32_FLOOR = 3.0, 2.0**-23
"""Gate 3: our float32 error is at most the reference's float32 error times the factor, plus the floor."""


class ParityError(AssertionError):
    """Two implementations differ by more than a gate allows; the message shows both sides."""


@dataclass(frozen=True)
class Measured:
    """The worst figure of one comparison, beside its bar."""

    gate: str
    worst: float
    bar: float
    name: str
    """Of the tensor with the worst figure."""

    @property
    def passed(self) -> bool:
        """Whether the gate is green; NaN is not."""
        return self.worst <= self.bar

    def __str__(self) -> str:
        verdict = "<=" if self.passed else "> "
        return f"{self.gate}: {self.worst:.2e} {verdict} {self.bar:.0e} ({self.name})"


def require_comparable(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Raises ParityError where shapes, dtypes or the places of NaN and infinity differ."""
    if ours.shape != theirs.shape:
        raise ParityError(f"{name}: shapes differ: ours {ours.shape}, theirs {theirs.shape}")
    if ours.dtype != theirs.dtype:
        raise ParityError(f"{name}: dtypes differ: ours {ours.dtype}, theirs {theirs.dtype}")
    for what, test in (("NaN", np.isnan), ("infinity", np.isinf)):
        here, there = test(ours), test(theirs)
        if (here != there).any():
            raise ParityError(f"{name}: {what} at {here.sum()} places in ours and {there.sum()} in theirs")


def relative_error(ours: np.ndarray, theirs: np.ndarray, scale: float | None = None) -> float:
    """The larger of ||a - b|| / ||b|| and max|a - b| / max|b|, in float64.

    `scale` replaces the norms of `theirs` where that is known to be zero (the gradient of a key bias): the error then
    counts against the scale of everything together.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if not a.size:
        return 0.0
    difference = a - b
    if scale is not None:
        return float(np.linalg.norm(difference)) / scale
    norm, largest = float(np.linalg.norm(b)), float(np.abs(b).max())
    if norm == 0:
        return 0.0 if not difference.any() else float("inf")
    return max(float(np.linalg.norm(difference)) / norm, float(np.abs(difference).max()) / largest)


def assert_parity(
    gate: str,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    *,
    bar: float = FLOAT64_BAR,
    zero: Mapping[str, float] | None = None,
) -> Measured:
    """Compares tensors by name, prints the worst figure next to the bar, and raises ParityError above it.

    `zero` names tensors that are zero in exact arithmetic, with the scale to measure them against. Raises ParityError
    for names that stand on one side only, and for what `require_comparable` raises.
    """
    if ours.keys() != theirs.keys():
        only_ours, only_theirs = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
        raise ParityError(f"{gate}: only ours has {only_ours}, only theirs has {only_theirs}")
    if not ours:
        raise ParityError(f"{gate}: there is nothing to compare")
    errors = {}
    for name in ours:
        a, b = np.asarray(ours[name]), np.asarray(theirs[name])
        require_comparable(name, a, b)
        errors[name] = relative_error(a, b, (zero or {}).get(name))
    return judged(gate, errors, bar)


class Sample(NamedTuple):
    """The same tensors from one batch: ours and theirs in float32, and the truth in float64."""

    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]
    truth: Mapping[str, Any]
    scales: Mapping[str, float]
    """What errors are relative to: the norm of the truth, or of everything where the truth is known to be zero."""


def assert_quality(gate: str, samples: Sequence[Sample]) -> Measured:
    """Gate 3: err(ours) / (FLOAT32_FACTOR * err(theirs) + FLOAT32_FLOOR) is at most 1, for every tensor.

    err is the Euclidean distance from the truth, relative to its scale, as the root of the mean square over the
    samples: six numbers may be right by luck once, which says nothing about quality. Scalars are left to gate 1; the
    loss is judged by the tensor of its terms. Raises ParityError for what `require_comparable` raises, and for results
    that are not float32.
    """
    squares: dict[str, tuple[float, float]] = {}
    for ours, theirs, truth, scales in samples:
        if not ours.keys() == theirs.keys() == truth.keys():
            raise ParityError(f"{gate}: the three sides have different tensors")
        for name in ours:
            a, b, exact = np.asarray(ours[name]), np.asarray(theirs[name]), np.asarray(truth[name], np.float64)
            require_comparable(name, a, b)
            if a.dtype != np.float32:
                raise ParityError(f"{name}: the float32 run gave {a.dtype}")
            if a.shape:
                here, there = squares.get(name, (0.0, 0.0))
                here += relative_error(a, exact, scales[name]) ** 2 / len(samples)
                there += relative_error(b, exact, scales[name]) ** 2 / len(samples)
                squares[name] = here, there
    ratios = {
        name: here**0.5 / (FLOAT32_FACTOR * there**0.5 + FLOAT32_FLOOR) for name, (here, there) in squares.items()
    }
    return judged(gate, ratios, 1.0)


def judged(gate: str, figures: Mapping[str, float], bar: float) -> Measured:
    """The worst of the figures, printed; raises ParityError if it is above the bar (or NaN)."""
    name = max(figures, key=lambda name: float("inf") if np.isnan(figures[name]) else figures[name])
    measured = Measured(gate, figures[name], bar, name)
    print(measured)
    if not measured.passed:
        raise ParityError(str(measured))
    return measured
