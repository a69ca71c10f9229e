"""Runs both sides forward, then backward, and says where what differs begins."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from parity.differ.answer import Difference
from parity.differ.conditioning import as_rounded, explained_by_rounding
from parity.differ.element_order import error_of
from parity.differ.explanation import counted, explain_outputs, explain_stage
from parity.differ.handed_back import Gradients, Search
from parity.differ.stopped_gradients import where_one_stops
from parity.differ.traced_sides import Sides
from parity.differ.values import GRADIENT, STACK, Values


def located(sides: Sides, *, backward: bool, name: str) -> Difference:
    """Forward, then backward; once more with all in float64 where a side computes a part in fewer digits.

    Libraries compute softmax, norms and rotations in float32 whatever they are given, and no two frameworks round
    alike. But a cast that somebody's program asks for, and computes nothing with, is a difference.
    """
    # What is ignored has to be found first; else an answer with all in float64 is the better one.
    found = _located(sides, backward, name, as_it_is=bool(sides.accepted.ignore))
    narrow = {side: islands for side, islands in sides.islands.items() if islands}
    if not found or not narrow:
        return found
    sides.widen = {(site.file, site.line) for site, asks in narrow.get("ours", {}).items() if asks}
    wide = _located(sides, backward, name)
    if not wide and "ours" not in narrow and any(narrow["theirs"].values()):
        sides.widen = None
        return _located(sides, backward, name, as_it_is=True)
    sites = tuple(site for islands in narrow.values() for site in islands)
    return replace(wide, narrow=(*sites, *wide.narrow), rounded=() if wide else found.differing or found.rounded)


def _located(sides: Sides, backward: bool, name: str, *, as_it_is: bool = False) -> Difference:
    """The answer of one way to run; where a side has parts in fewer digits, it is explained only if `as_it_is`."""

    def postpones() -> bool:
        if sides.widen is None and any(sides.islands.values()):
            return not as_it_is
        return accepted.takes_digits()

    accepted = sides.accepted = replace(
        sides.accepted, put={}, digits={}, passed={}, rounded=[], before=None, withdrawn=False, postpones=postpones
    )
    rounded: tuple[str, ...] = ()
    for way in (_forward, _backward)[: 1 + backward]:
        while True:
            known, found = len(accepted.rounded), way(sides, name)
            rounded += found.rounded
            if len(accepted.rounded) != known:
                rounded = rounded or found.differing
            elif not (found and accepted.passes(found, sides.run_theirs)):
                break
        if found:
            break
    passed, narrow = tuple(accepted.passed.values()), tuple(accepted.rounded)
    return replace(found, ignored=passed, narrow=narrow, rounded=() if found else rounded)


def _forward(sides: Sides, name: str) -> Difference:
    return explain_outputs(sides.run_ours(False), sides.run_theirs(False), sides.held_by, name, sides.accepted)


def _backward(sides: Sides, name: str) -> Difference:
    ours = sides.run_ours(True)
    here = sides.gradients(ours)
    compared: dict[str, tuple[float, float, float]] = {}
    """The norms of the gradient of each weight in ours and in theirs, and the error."""

    def compare(key: str, gradient: np.ndarray) -> None:
        mine, size = here.pop(key, None), float(np.linalg.norm(gradient))
        compared[key] = (
            (0.0, size, 0.0) if mine is None else (float(np.linalg.norm(mine)), size, error_of(mine, gradient))
        )

    def taken(key: str, gradient: np.ndarray) -> None:
        if key in compared and key not in here:
            here.update(sides.gradients(sides.run_ours(True)))  # they had to run again
        compare(key, sides.held({key: gradient}).get(key, gradient))

    theirs = sides.run_theirs(True, taken=taken)
    unreached = here.keys() & set(sides.trained) - compared.keys()
    for key in unreached:
        compare(key, np.zeros(here[key].shape))
    # What is tiny beside all gradients together is zero in exact arithmetic.
    whole = math.hypot(*(size for _, size, _ in compared.values()))
    zero = 1e-11 * whole if math.isfinite(whole) else 0.0
    alone = tuple(key for key in here if key in sides.frozen and not np.linalg.norm(here[key]) <= zero)
    here.clear()
    errors = {}
    for key in sides.trained:
        mine, their, error = compared.get(key, (0.0, 0.0, 0.0))
        # Where theirs hands nothing back, nothing is rounded there.
        tiny = max(mine, their) <= zero * (1e-3 if key in unreached else 1)
        if not tiny and error > 10 * sides.accepted.bar:
            errors[key] = error
    names: dict[str, list[str]] = {}
    for key in errors:
        for path in {key, *(path for path, _ in sides.held_by.get(key, ()))}:
            names.setdefault(GRADIENT + path, []).append(key)  # a stack has the gradients of all layers
    sides.accepted.names = names
    rounded = explained_by_rounding((ours, theirs), errors, names, put=sides.accepted.put)
    said = {key: f"the gradient of {key}: {_read(*compared[key])}" for key in errors}
    errors = {key: error for key, error in errors.items() if key not in rounded}
    if not errors:
        notes = as_rounded(said.values())
        return Difference("none", name=name, trained_alone=alone, rounded=notes, **counted(ours, theirs))
    ends = {key: _gradient_of(ours, sides, key) for key in compared}
    their_ends = {key: [theirs.outputs[GRADIENT + key]] if GRADIENT + key in theirs.outputs else [] for key in compared}
    forced = [number for key in errors for number in ends[key]], [n for key in errors for n in their_ends[key]]
    about = tuple(map(said.__getitem__, errors)), sides.held_by, name, sides.accepted
    answer = explain_stage((ours, theirs), forced, "backward", errors, *about)
    if not answer.sure:
        reached = {key for key, (mine, their, _) in compared.items() if max(mine, their) > zero}
        largest = max((error for error in errors.values() if math.isfinite(error)), default=1.0)
        wrong = {key for key, error in errors.items() if not error < 1e-6 * largest}
        trained = {path for key in compared for path, _ in sides.held_by.get(key, ())}, compared.keys()
        gradients = Gradients((ours, theirs), (ends, their_ends), trained, wrong, zero, sides.gradients, sides.held)
        search, stops = Search.of(gradients), partial(where_one_stops, ours, theirs, held_by=sides.held_by)
        looks: list[Callable[[Difference], Difference]] = [
            partial(stops, gradients=(set(errors), reached), runs=search is not None)
        ]
        if search:
            looks[:0] = search.where_one_hands_back, search.where_one_takes_a_step
            looks.append(search.where_it_goes_elsewhere)
        answer = next((other for look in looks if (other := look(answer)) is not answer), answer)
    return replace(answer, trained_alone=alone)


def _gradient_of(ours: Values, sides: Sides, key: str) -> list[int]:
    """The values of ours that hold the gradient of a weight of theirs."""
    # A scan over layers may have a stack of experts in each.
    rows = Counter(path for path, row in {each for held in sides.held_by.values() for each in held} if row is not None)
    found = []
    for path, layer in sides.held_by.get(key, ()):
        number = ours.outputs.get(GRADIENT + path)
        if number is not None:
            value = ours.rows[number]
            stacked = value.operation == STACK and layer is not None and value.shape[:1] == (len(value.inputs),)
            row = layer * len(value.inputs) // rows[path] if stacked and layer is not None else None
            found.append(number if row is None else value.inputs[row])
    return found


def _read(mine: float, their: float, error: float) -> str:
    return f"{error:.1e}" if mine and their else f"zero in {'ours' if their else 'theirs'}"
