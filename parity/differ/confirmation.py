"""Whether what was found is all that parts two sides: one of them is run on without it, to the end.

What is wrong by a step, or half of what differs, mends the next lines and no more. So the side that an experiment was
made with is run on from there, and where the two part then is looked for anew: nowhere, or in the same lines again, as
where a function is called in each layer, and the difference is that one.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from parity.differ.alignment import Start, match, paired, starts_of_both
from parity.differ.element_order import error_of, in_shape
from parity.differ.fingerprints import BAR, fingerprint
from parity.differ.values import Step, Values

_MOST = 1 << 26
"""Elements, at most, of what is read by the values that are computed anew."""
_DEPTH = 3
"""Operations back, at most, by which two values that one line computes are told apart."""


class Instead(NamedTuple):
    """What is computed in the place of a value, and of which values."""

    inputs: tuple[int, ...]
    again: Callable[[Sequence[Any]], Any]


class Change(NamedTuple):
    """What comes in the place of a value, and which values or numbers in the place of others, such as its twins, which
    the same lines make."""

    number: int
    array: np.ndarray
    twins: Mapping[int, int | np.ndarray | Instead]
    alone: bool = False
    """Whether what agrees stays as it is, although it is made of the value."""


class Mended(IntEnum):
    """What a change mends."""

    NOT_ALL = 0
    ONE_SIDE = 1
    """All until one side comes to the same line again, and the other one to a line beside it."""
    UNKNOWN = 2
    """It is too large to be run, has operations that cannot be run again, or is a step of a recurrence."""
    ALL = 3
    """All, or all until both come to the same lines again, but for those of a recurrence."""


def mended(sides: tuple[Values, Values], side: int, change: Change, place: tuple[Start | None, Start | None]) -> Mended:
    """What is mended if a side computes with a change, where the two sides part at a place."""
    starts = _starts_after(sides, side, change)
    if isinstance(starts, Mended):
        return starts
    after = paired(*starts)[:2]
    if any(map(_is_left, place, after, starts)):
        return Mended.NOT_ALL
    again = [_is_again(*each) for each in zip(place, after, strict=True)]
    if change.alone and not all(again):
        return Mended.UNKNOWN  # with axes exchanged, what follows may have to be exchanged as well
    moved = set(filter(None, starmap(_layers_on, zip(place, after, strict=True))))
    if all(again) and any(isinstance(n, Step) for start in after if start for n in start.row.layer):
        return Mended.UNKNOWN  # the next step of a recurrence reads what this one made, whatever is wrong
    alike = all(again) and (len(moved) < 2 or len(set(map(len, moved))) == 2)
    return Mended.ALL if alike else Mended.ONE_SIDE if any(again) else Mended.NOT_ALL


def parted_after(sides: tuple[Values, Values], side: int, change: Change) -> Mended | tuple[Start | None, Start | None]:
    """Where the two sides part if one of them computes with a change; what it mends, where they do not, or where that
    cannot be seen."""
    starts = _starts_after(sides, side, change)
    return starts if isinstance(starts, Mended) else paired(*starts)[:2]


def _starts_after(sides: tuple[Values, Values], side: int, change: Change) -> Mended | tuple[list[Start], list[Start]]:
    after = run_on(sides[side], change)
    if not isinstance(after, Values):
        return after
    kept = replace(sides[1 - side], again=None)
    ours, theirs = (after, kept) if side == 0 else (kept, after)
    bar = max(BAR, kept.bar)
    match(ours, theirs, bar)
    pairs = [(ours.outputs[name], j) for name, j in theirs.outputs.items() if name in ours.outputs]
    bad = [(i, j) for i, j in pairs if not _error(ours.arrays.get(i), theirs.arrays.get(j)) <= bar]
    if not bad:
        return Mended.ALL
    bad_of_each = [i for i, _ in bad], [j for _, j in bad]
    return starts_of_both((ours, theirs), bad_of_each, backward=False)


def most_mended(
    sides: tuple[Values, Values], changes: Iterable[Change], place: tuple[Start | None, Start | None]
) -> Mended:
    """The most that one of these changes of ours mends."""
    most = Mended.NOT_ALL
    for change in changes:
        most = max(most, mended(sides, 0, change, place))
        if most is Mended.ALL:
            break
    return most


def _is_again(before: Start | None, after: Start | None) -> bool:
    """Whether a start is a later one on the same line, called in the same way, and not a later step of one call of the
    line, as the next one of a sum is."""
    if before is None or after is None:
        return before is after
    values, line, inputs = after.values, before.row.place[:2], {*map(after.values.copied, after.row.inputs)}
    adds = re.search("add|sub", after.row.operation) and before.number in inputs
    if adds and not any(values.is_made_of(i, before.number) for i in inputs - {before.number}):
        return False
    called = before.row.place.called()
    between = (row.place for row in values.rows[before.number : after.number] if row.kind == "operation")
    at_once = all(place[:2] == line or place.chain[: len(called)] == called for place in between)
    # A line that is come to again at once, as that of a loop, begins with what it made before.
    steps = partial(_steps, values, line=line, end=before.number)
    if at_once and steps(before.number) != steps(after.number):
        return False
    # By the same functions; each may be called on several lines.
    rows = before.row, after.row
    told = [(row.place[:3], row.place.functions, row.operation, re.sub(r"\d+", "", row.module)) for row in rows]
    return told[0] == told[1] and before.number < after.number


def _steps(values: Values, number: int, line: tuple[Any, ...], end: int, depth: int = _DEPTH) -> tuple[Any, ...]:
    """The last operations of a line that a value is made by; what the value `end` is made by does not count."""
    row = values.rows[number]
    if depth == 0 or row.place[:2] != line:
        return ()
    read = ((i, 0 if values.copied(i) == end else depth - 1) for i in row.inputs)
    return row.operation, *(_steps(values, i, line, end, left) for i, left in read)


def _is_left(before: Start | None, after: Start | None, starts: Sequence[Start]) -> bool:
    """Whether a side still parts on a line, in the same layer or step, although it is said to part later."""
    if before is None or after is None or not before.row.layer:
        return False
    between = (each.row for each in starts if before.number < each.number < after.number)
    return any(row.place[:2] == before.row.place[:2] and row.layer == before.row.layer for row in between)


def _layers_on(before: Start | None, after: Start | None) -> tuple[int, ...] | None:
    """By how many layers or steps a side is further on; None where it is in the same, or does not say in which."""
    layers = [start.row.layer if start else () for start in (before, after)]
    same = len(layers[0]) != len(layers[1]) or layers[0] == layers[1]
    return None if same else tuple(map(operator.sub, layers[1], layers[0]))


def _error(ours: np.ndarray | None, theirs: np.ndarray | None) -> float:
    return math.inf if ours is None or theirs is None or ours.shape != theirs.shape else error_of(ours, theirs)


def run_on(values: Values, change: Change, *, backward: bool = False) -> Values | Mended:
    """A side with a change, and all that follows from it, on the way back too if so asked; else what that means."""
    after, able = _follow(values, change, values.live(), backward)
    if not able:
        return Mended.UNKNOWN
    rows, changed = [*values.rows], dict[int, Any]()
    try:
        for k, array in _computed(values, change, after):
            changed[k] = array
            if _has_nan(array) and not _has_nan(values.arrays.get(k)):
                return Mended.NOT_ALL  # what is no number says nothing, and would hide what differs
    except Exception:  # Numbers of another shape do not fit what follows.
        return Mended.NOT_ALL
    for k, array in changed.items() if not backward else ():
        if rows[k].features is not None:
            features, largest = fingerprint(array, depends_on_data=rows[k].data)
            rows[k] = replace(rows[k], features=features, largest=largest)
    return replace(values, rows=rows, arrays=values.arrays | changed, again=None)


def rerun(values: Values, change: Change, live: Collection[int]) -> Iterator[tuple[int, np.ndarray]]:
    """What follows from a change, in the order of execution, with its numbers; nothing where it is too large."""
    after, able = _follow(values, change, live, backward=False)
    yield from _computed(values, change, after) if able else ()


def _follow(values: Values, change: Change, live: Collection[int], backward: bool) -> tuple[list[int], bool]:
    """What is computed anew with a change, and whether it can be."""
    rows = values.rows
    given = {change.number, *change.twins}
    seen, after = set(given), list[int]()
    for k in range(min(given), len(rows)):
        stays = k not in live or (rows[k].backward and not backward) or (change.alone and k in values.equal)
        if not stays and not seen.isdisjoint(rows[k].inputs):
            seen.add(k)
            after += [] if k in given else [k]
    read = {i for k in after for i in rows[k].inputs} | {
        i for held in change.twins.values() for i in _step(held).inputs
    }
    if sum(math.prod(rows[i].shape) for i in read) > _MOST or any(rows[k].again is None for k in after):
        return [], False
    values.want(read)
    # Of a side that was recorded, the larger ones are not there.
    return after, read - given <= values.arrays.keys()


def _step(held: int | np.ndarray | Instead) -> Instead:
    """What stands for a value, as a step."""
    if isinstance(held, Instead):
        return held
    return Instead((held,), operator.itemgetter(0)) if isinstance(held, int) else Instead((), lambda _: held)


def _computed(values: Values, change: Change, after: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    rows, changed = values.rows, {change.number: change.array}
    yield change.number, change.array
    for k in sorted({*after, *change.twins}):
        inputs, again = _step(change.twins[k]) if k in change.twins else (rows[k].inputs, rows[k].again)
        # What it is made of may have been computed anew.
        arrays = [changed[i] if i in changed else values.array(i) for i in inputs]
        with np.errstate(all="ignore"):
            made = np.asarray(again(arrays))  # type: ignore[misc]
        changed[k] = in_shape(made, rows[k].shape)[0] if k in change.twins else made
        yield k, changed[k]


def _has_nan(array: np.ndarray | None) -> bool:
    return array is not None and array.dtype.kind == "f" and bool(np.isnan(array).any())
