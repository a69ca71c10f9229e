"""Runs both sides forward, then backward, and says where what differs begins."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from parity.differ.answer import Difference
from parity.differ.explanation import Explainer, opaque
from parity.differ.traced_sides import Sides
from parity.differ.weights import error_of
from parity.gates.measure import FLOAT64_BAR, ParityError

_NO = frozenset[int]()


def located(sides: Sides, *, backward: bool, name: str) -> Difference:
    """Forward, then backward."""
    found = _forward(sides, name)
    if found or not backward:
        return found
    return _backward(sides, name)


def _forward(sides: Sides, name: str) -> Difference:
    ours, theirs = sides.run(backward=False, keep=(_NO, _NO))
    shared = [key for key in theirs.outputs if key in ours.outputs]
    if not shared:
        raise ParityError(
            f"no output has one name on both sides: ours {list(ours.outputs)}, theirs {list(theirs.outputs)}"
        )
    explainer = Explainer(sides, ours, theirs, backward=False)
    explainer.want([ours.outputs[key] for key in shared], [theirs.outputs[key] for key in shared])
    errors = {}
    for key in shared:
        here, there = ours.arrays[ours.outputs[key]], theirs.arrays[theirs.outputs[key]]
        if here.shape != there.shape:
            raise ParityError(f"{key}: shapes differ: ours {list(here.shape)}, theirs {list(there.shape)}")
        if not np.isfinite(here).any() and not np.isfinite(there).any():
            raise ParityError(f"output {key} has no finite number on either side; there is nothing to compare")
        errors[key] = error_of(here, there)
    bad = {key: error for key, error in errors.items() if not error <= FLOAT64_BAR}
    if not bad:
        return Difference("none", counts=(len(ours.rows), len(theirs.rows)), name=name, opaque=opaque(ours, theirs))
    said = tuple(f"{key}: {error:.1e}" for key, error in bad.items())
    return explainer.explain(
        "forward", [ours.outputs[k] for k in bad], [theirs.outputs[k] for k in bad], said, bad, name
    )


def _backward(sides: Sides, name: str) -> Difference:
    ours = sides.run_ours(True)
    here = sides.gradients(ours)
    compared: dict[str, _Compared] = {}

    def taken(key: str, gradient: np.ndarray) -> None:
        nonlocal here
        if key in compared and key not in here:
            here = sides.gradients(sides.run_ours(True))  # they had to run again
        compared[key] = _Compared.of(here.pop(key, None), sides.held({key: gradient}).get(key, gradient))

    theirs = sides.run_theirs(True, taken=taken)
    for key in here.keys() & set(sides.trained) - compared.keys():
        compared[key] = _Compared.of(here[key], np.zeros(here[key].shape))
    # What is tiny beside all gradients together is zero in exact arithmetic.
    whole = math.hypot(*(found.theirs for found in compared.values()))
    zero = 1e-11 * whole if math.isfinite(whole) else 0.0
    alone = tuple(key for key in here if key in sides.frozen and not np.linalg.norm(here[key]) <= zero)
    here.clear()
    bad = {
        key: found
        for key in sides.trained
        if (found := compared.get(key)) and not found.size <= zero and not found.error <= 10 * FLOAT64_BAR
    }
    if not bad:
        counts = len(ours.rows), len(theirs.rows)
        return Difference("none", counts=counts, name=name, opaque=opaque(ours, theirs), trained_alone=alone)
    explainer = Explainer(sides, ours, theirs, backward=True)
    forced_theirs = [theirs.outputs[Sides.gradient(key)] for key in bad if Sides.gradient(key) in theirs.outputs]
    forced_ours = []
    for key in bad:
        for path, row in sides.held_by.get(key, ()):
            number = ours.outputs.get(Sides.gradient(path))
            if number is None:
                continue
            value = ours.rows[number]
            stacked = value.operation == "stack of layers" and row is not None and len(value.inputs) == value.shape[0]
            forced_ours.append(value.inputs[row] if stacked and row is not None else number)
    said = tuple(f"the gradient of {key}: {found}" for key, found in bad.items())
    errors = {key: found.error for key, found in bad.items()}
    answer = explainer.explain("backward", forced_ours, forced_theirs, said, errors, name)
    return replace(answer, trained_alone=alone)


class _Compared(NamedTuple):
    """The gradient of one weight on both sides, in three numbers."""

    ours: float
    """Its norm; zero where ours has no such weight."""
    theirs: float
    error: float

    @classmethod
    def of(cls, ours: np.ndarray | None, theirs: np.ndarray) -> "_Compared":
        size = float(np.linalg.norm(theirs))
        return cls(0.0, size, 0.0) if ours is None else cls(float(np.linalg.norm(ours)), size, error_of(ours, theirs))

    @property
    def size(self) -> float:
        """Of the larger one."""
        return max(self.ours, self.theirs)

    def __str__(self) -> str:
        """The error, or on which side there is nothing."""
        if self.ours and self.theirs:
            return f"{self.error:.1e}"
        return f"zero in {'ours' if self.theirs else 'theirs'}"
