"""Runs both sides forward, then backward, and says where what differs begins."""

import numpy as np

from parity.answer import Difference
from parity.held_weights import error_of
from parity.lens import Lens, opaque
from parity.measure import FLOAT64_BAR, ParityError
from parity.sides import Sides

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
    lens = Lens(sides, ours, theirs, backward=False)
    lens.want([ours.outputs[key] for key in shared], [theirs.outputs[key] for key in shared])
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
    return lens.explained("forward", [ours.outputs[k] for k in bad], [theirs.outputs[k] for k in bad], said, bad, name)


def _backward(sides: Sides, name: str) -> Difference:
    ours, theirs = sides.run(backward=True, keep=(_NO, _NO))
    lens = Lens(sides, ours, theirs, backward=True)
    all_ours = [number for key, number in ours.outputs.items() if key.startswith(Sides.gradient(""))]
    all_theirs = [number for key, number in theirs.outputs.items() if key.startswith(Sides.gradient(""))]
    lens.want(all_ours, all_theirs)
    here, there = sides.gradients(ours, theirs)
    scale = float(np.sqrt(sum(float(np.square(g).sum()) for g in there.values())))
    bad = {}
    for key, gradient in there.items():
        if key in sides.frozen or key not in here:
            continue
        zero = max(float(np.linalg.norm(here[key])), float(np.linalg.norm(gradient))) <= 1e-11 * scale
        error = 0.0 if zero else error_of(here[key], gradient)
        if not error <= 10 * FLOAT64_BAR:
            bad[key] = error
    if not bad:
        return Difference("none", counts=(len(ours.rows), len(theirs.rows)), name=name, opaque=opaque(ours, theirs))
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
    said = tuple(f"the gradient of {key}: {_how(here[key], there[key], error)}" for key, error in bad.items())
    return lens.explained("backward", forced_ours, forced_theirs, said, bad, name)


def _how(ours: np.ndarray, theirs: np.ndarray, error: float) -> str:
    if ours.any() and theirs.any():
        return f"{error:.1e}"
    return f"zero in {'ours' if theirs.any() else 'theirs'}"
