"""One step done otherwise: whether all agrees where an operation, wherever the program comes to it, is one like it.

What nothing else proves is tried out: each line that may be wrong with another number, argument or operation, with
another value in the place of one that it reads, without it, in the other order with the step before it, with another
part of an array, or with what it makes reversed or moved by one. One side is run on with that to its end, and what
mends all that differs is the answer.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from parity.differ.confirmation import Change, Instead, rerun, run_on
from parity.differ.element_order import error_of, in_shape
from parity.differ.fingerprints import BAR, fingerprint
from parity.differ.substitution import told_of
from parity.differ.values import STACK, Place, Site, Value, Values

_LIKE, _PARTS, _NEAR = 12, 24, 16
"""Values that are put in the place of one, parts of an array, and values after which one must agree, at most."""
_WORK = 60_000
"""Values that are computed anew, at most."""
_LARGEST = 1 << 16
"""Elements of what is made otherwise, at most."""
_NUMBERS = (0.0, 1.0, -1.0, 2.0, 0.5)
_SIZES = 12
"""Sizes of axes, at most, that are tried as a number."""
_MASKED = 1e3
"""Larger numbers may be those of a mask."""
_EXACT = 1e-12
"""An error that is rounding and no more."""

Key = tuple[Any, ...]
Changes = Iterator[tuple[str, Sequence[Instead] | Mapping[int, Instead]]]
"""What is said of it, and what each of the values of an operation is instead, or these and others."""


class Otherwise(NamedTuple):
    """What one side does in one step, and what would mend all."""

    rank: tuple[int, int]
    """Which of the ways it is, the usual ones first, and how many values it changes."""
    said: str
    site: Site


def one_step_otherwise(values: Values, other: Values) -> list[Otherwise]:
    """What mends all in one step of this side: on each line the most usual, and these in the order of execution."""
    if not all(i in values.arrays for i in values.live()):
        return []  # the side would run anew for each step
    steps, found = _Steps(values, other), dict[tuple[str, int], Otherwise]()
    for rows in steps.lines():
        line = values.rows[rows[0]].place[:2]
        for number, way in enumerate(_WAYS):
            rank = number, len(rows)
            for said, instead in way(steps, rows) if line not in found or rank < found[line].rank else ():
                change = instead if isinstance(instead, Mapping) else dict(zip(rows, instead, strict=True))
                if steps.mends_all(change, near=way not in _SELDOM):
                    said = f"{values.side} {said}, {values.side} goes on as {other.side} does"
                    # A view reads nothing wrong: what it is of is.
                    view = way is _other_value and values.copies(rows[0])
                    site = values.made(values.rows[rows[0]].inputs[-1]) if view else values.site(rows[0])
                    found[line] = Otherwise(rank, said, site)
                    break
    usual = [each for each in found.values() if each.rank[0] < len(_WAYS) - 1]
    # What is reversed where it is made can be so until it is read.
    moved = [each for each in reversed(found.values()) if each not in usual]
    return sorted(usual, key=lambda each: each.rank[0]) + moved


class _Steps:
    """One side, whose steps are tried otherwise."""

    def __init__(self, values: Values, other: Values) -> None:
        self.values, self.live, self.work = values, values.live(), 0
        self._keys, self._groups = list[Key](), defaultdict[Key, list[int]](list)
        met, came, on = Counter[Key](), Counter[Place](), set[Place]()
        for k, row in enumerate(values.rows):
            # A line is left where another begins that it does not call; a loop comes to it again.
            came[row.place] += row.place not in on
            on = {place for place in on if _calls(place, row.place)} | {row.place}
            key = row.place, row.operation, row.layer, row.module, came[row.place]
            self._keys.append((row.place, row.operation, met[key]))
            met[key] += 1
            for each in self._groups_of(k):
                self._groups[each].append(k)
        returned = {*other.outputs.values()}
        apart = other.live() - other.equal.keys()
        missing = {j for j in apart if other.rows[j].data or j in returned}
        self._missing = other.index(missing)
        self._sizes = np.sort([other.rows[j].largest for j in missing])
        rows = [other.rows[j] for j in other.live()]
        single = (row.largest for row in rows if not row.data and math.prod(row.shape) == 1)
        # One side may divide by as many as the other takes a mean of.
        sizes = {float(size) for row in rows for size in row.shape}
        self.numbers = sorted({*_NUMBERS, *single, *(x for row in rows for x in row.literals), *sorted(sizes)[:_SIZES]})
        pairs = ((values.outputs[name], j) for name, j in other.outputs.items() if name in values.outputs)
        # (ours, its numbers there, how far apart they may be): a small difference is mended by less.
        self._wanted = [
            (i, there, min(BAR, max(error_of(here, there) / 1000, _EXACT)))
            for i, j in pairs
            if (here := values.array(i)) is not None and (there := other.array(j)) is not None
        ]

    def _groups_of(self, k: int) -> tuple[Key, Key, Key]:
        """The operation in one call, in all calls of its function, and however often the program comes to the line."""
        place, operation, nth = self._keys[k]
        return self._keys[k], (*place[:2], operation, nth), (*place[:2], operation)

    def lines(self) -> Iterator[list[int]]:
        """The operations that may be wrong, each with all the values that it makes."""
        values, seen = self.values, set[tuple[int, ...]]()
        for k in sorted(self.live):
            # A part of an array agrees, and may be the wrong one; a table agrees with another one by chance.
            apart = k not in values.equal or k in values.partly or not values.rows[k].data
            copied = values.copies(k) and any(n not in values.equal for n in values.readers(k))
            may = apart or copied or k in values.outputs.values()
            for key in self._groups_of(k) if may and self._can_be(k) else ():
                rows = tuple(n for n in self._groups[key] if n in self.live and self._can_be(n))
                alike = {(len(values.rows[n].inputs), values.rows[n].literals) for n in rows}
                if rows not in seen and len(alike) == 1:
                    seen.add(rows)
                    yield list(rows)

    def _can_be(self, k: int) -> bool:
        row = self.values.rows[k]
        small = math.prod(row.shape) <= _LARGEST
        return row.kind == "operation" and row.again is not None and not row.backward and small

    def told(self, k: int) -> str:
        """A value; one that its line goes on with, by its operation as well."""
        row, rows = self.values.rows[k], self.values.rows
        inner = row.kind == "operation" and any(rows[n].place[:2] == row.place[:2] for n in self.values.readers(k))
        return f"what {_name(row)} makes in " * inner + told_of(self.values, k)

    def nth(self, k: int) -> tuple[str, int]:
        """Which of the operations of its line it is."""
        return self._keys[k][1:]

    def beside(self, k: int) -> list[int]:
        """The other parts of an array that a line takes."""
        row, rows = self.values.rows[k], self.values.rows
        taken = (n for n in self.values.readers(row.inputs[-1]) if n != k and self._can_be(n) and self.values.copies(n))
        return [n for n in taken if (rows[n].place, rows[n].shape) == (row.place, row.shape)]

    def like(self, i: int, k: int) -> list[int]:
        """Values like one that are there before another, the nearest first; of each operation one."""
        rows, found, here = self.values.rows, dict[Key, int](), self.values.array(i)
        kind = rows[i].shape, rows[i].dtype, rows[i].data
        for m in range(k - 1, -1, -1):
            there = rows[m].kind != "operation" or m in self.live
            able = m != i and there and (rows[m].shape, rows[m].dtype, rows[m].data) == kind
            its = self.values.array(m) if able else None
            if its is not None and here is not None:
                if not np.array_equal(its, here):
                    found.setdefault(self._keys[m], m)
                if len(found) == _LIKE:
                    break
        return [*found.values()]

    def at_step(self, m: int, k: int) -> int | None:
        """What makes a value makes this one in the step of another: the last before it."""
        rows = self.values.rows
        if rows[m].kind != "operation":
            return m
        layer = rows[k].layer
        before = [n for n in self._groups[self._keys[m]] if n < k and rows[n].layer == layer[: len(rows[n].layer)]]
        return before[-1] if before else None

    def mends_all(self, instead: Mapping[int, Instead], *, near: bool) -> bool:
        """Whether all that is returned agrees, and something before, if it is to be near, with something else in the
        place of these."""
        values, first = self.values, min(instead)
        if self.work > _WORK:
            return False
        self.work += (len(values.rows) - first) // 50
        try:
            array = np.asarray(instead[first].again([values.array(i) for i in instead[first].inputs]))
            [array, *_] = in_shape(array, values.rows[first].shape)
        except Exception:  # It does not fit.
            return False
        if len(instead) == 1 and np.array_equal(array, values.arrays[first]):
            return False
        change = Change(first, array, {k: each for k, each in instead.items() if k != first})
        with suppress(Exception):
            if not near or self._meets(change):
                after = run_on(values, change)
                self.work += len(values.rows) - first
                return isinstance(after, Values) and all(
                    error_of(after.arrays[i], there) <= bar for i, there, bar in self._wanted
                )
        return False

    def _may_be_met(self, largest: float) -> bool:
        """Whether what is missing has this largest number; what is masked may have another."""
        k = np.searchsorted(self._sizes, largest)
        near = np.abs(self._sizes[max(k - 1, 0) : k + 1] - largest) <= 1e-8 * largest
        return not largest < _MASKED or bool(near.any())

    def _meets(self, change: Change) -> bool:
        """Whether something agrees near a change that did not."""
        values = self.values
        computed = rerun(values, change, self.live)
        operations = ((k, array) for k, array in computed if k == change.number or not values.copies(k))
        for k, array in islice(operations, _NEAR):
            self.work += 1
            may = array.dtype.kind == "f" and self._may_be_met(float(np.abs(array).max(initial=0.0)))
            features = fingerprint(array, depends_on_data=values.rows[k].data)[0] if may else None
            if features is not None and self._missing.equals(features):
                return True
        return False


def _calls(place: Place, other: Place) -> bool:
    return len(other.chain) > len(place.chain) and other.chain[: len(place.chain)] == place.called()


def _other_argument(steps: _Steps, rows: Sequence[int]) -> Changes:
    """Another number, argument or operation."""
    values = [steps.values.rows[k] for k in rows]
    others = [[*row.otherwise(steps.numbers)] for row in values if row.otherwise]
    if len(others) == len(rows) and len({*map(len, others)}) == 1:
        for each in zip(*others, strict=True):
            yield each[0][0], [Instead(row.inputs, again) for row, (_, again) in zip(values, each, strict=True)]


def _other_value(steps: _Steps, rows: Sequence[int]) -> Changes:
    """It reads another value; of what the steps of a loop return, another one."""
    values, first = [steps.values.rows[k] for k in rows], steps.values.rows[rows[0]]
    stacks = first.operation == STACK
    for position, i in enumerate(first.inputs[:1] if stacks else first.inputs):
        for m in steps.like(i, first.inputs[0] if stacks else rows[0]):
            instead = []
            for k, row in zip(rows, values, strict=True):
                own = row.inputs if stacks else row.inputs[position : position + 1]
                its = [steps.at_step(m, n if stacks else k) for n in own]
                if its and None not in its:
                    inputs = its if stacks else [*row.inputs[:position], *its, *row.inputs[position + 1 :]]
                    instead.append(Instead(tuple(inputs), row.again))  # type: ignore[arg-type]
            if len(instead) == len(rows):
                here, there = steps.told(i), steps.told(m)
                yield f"reads {here}; with {there if there != here else 'another part of it'} in its place", instead
    if len(first.inputs) > 1:
        yield (
            "reads two values; with the two exchanged",
            [
                Instead((*row.inputs[:-2], row.inputs[-1], row.inputs[-2]), row.again)  # type: ignore[arg-type]
                for row in values
            ],
        )


def _left_out(steps: _Steps, rows: Sequence[int]) -> Changes:
    """It goes on with what it reads."""
    first = steps.values.rows[rows[0]]
    for position, i in enumerate(first.inputs):
        if steps.values.rows[i].shape == first.shape:
            yield (
                f"applies {_name(first)} here; without that",
                [Instead(steps.values.rows[k].inputs[position : position + 1], itemgetter(0)) for k in rows],
            )


def _opposite(steps: _Steps, rows: Sequence[int]) -> Changes:
    """It chooses what it does not."""
    values = [steps.values.rows[k] for k in rows]
    if values[0].dtype.endswith("bool"):
        its = [Instead(row.inputs, partial(_then, row, np.logical_not)) for row in values]
        yield f"applies {_name(values[0])} here; with the opposite", its


def _other_order(steps: _Steps, rows: Sequence[int]) -> Changes:
    """The step before comes after it."""
    values = steps.values.rows
    first = values[rows[0]]
    for position, i in enumerate(first.inputs):
        before = values[i]
        if before.kind == "operation" and before.shape == first.shape:
            for its, x in enumerate(before.inputs):
                if values[x].shape == first.shape:
                    pairs = [(values[k], values[values[k].inputs[position]]) for k in rows]
                    yield (
                        f"applies {_name(first)} after {_name(before)}; with the two in the other order",
                        [
                            Instead((*row.inputs, *one.inputs), partial(_exchanged, row, one, position, its))
                            for row, one in pairs
                        ],
                    )


def _exchanged(row: Value, before: Value, position: int, its: int, arrays: Sequence[Any]) -> Any:
    """The step of `before` of what `row` makes, in the place of the step of `row` of what that makes."""
    assert row.again is not None
    assert before.again is not None
    own, read = [*arrays[: len(row.inputs)]], [*arrays[len(row.inputs) :]]
    own[position] = read[its]
    read[its] = np.asarray(row.again(own))
    return before.again(read)


def _other_part(steps: _Steps, rows: Sequence[int]) -> Changes:
    """Another part of an array, or its axes in another order before they are merged or split."""
    values = [steps.values.rows[k] for k in rows]
    if not steps.values.copies(rows[0]):
        return
    whole, shape = steps.values.rows[values[0].inputs[-1]].shape, values[0].shape
    parts = [_parts(steps.values.rows[row.inputs[-1]].shape, row.shape) for row in values]
    for which, part in parts[0].items():
        if all(which in each for each in parts):
            shown = ", ".join(_shown(each) for each in part)
            yield (
                f"takes a part here; with [{shown}] in its place",
                [Instead(row.inputs[-1:], partial(_taken, its[which])) for row, its in zip(values, parts, strict=True)],
            )
    if math.prod(whole) != math.prod(shape):
        return
    count = len(whole)
    ways: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = [
        (f"axes {a + count} and {b + count} exchanged", partial(np.swapaxes, axis1=a, axis2=b))
        for a, b in combinations(range(-count, 0), 2)
    ]
    ways += [
        (f"axis {a + count} as axis {b + count}", partial(np.moveaxis, source=a, destination=b))
        for a, b in ((-1, -3), (-3, -1))
        if count > 2
    ]
    for said, moved in ways:
        yield (
            f"has {list(whole)} as {list(shape)} here; with {said} before",
            [Instead(row.inputs[-1:], partial(_reshaped, moved, row.shape)) for row in values],
        )


def _exchanged_parts(steps: _Steps, rows: Sequence[int]) -> Changes:
    """What one line takes two parts of an array as, the other way round."""
    values = steps.values
    if not values.copies(rows[0]):
        return
    named = [{steps.nth(n): n for n in steps.beside(k)} for k in rows]
    for nth, other in named[0].items():
        if other > rows[0] and all(nth in each for each in named):
            pairs = [(k, each[nth]) for k, each in zip(rows, named, strict=True)]
            both = (each for pair in pairs for each in (pair, pair[::-1]))
            instead = {k: Instead(values.rows[n].inputs, values.rows[n].again) for k, n in both}  # type: ignore[arg-type]
            yield (
                f"takes two parts of {told_of(values, values.rows[rows[0]].inputs[-1])} here; with the two exchanged",
                instead,
            )


def _parts(whole: tuple[int, ...], part: tuple[int, ...]) -> dict[Key, tuple[Any, ...]]:
    """The parts of an array that have this shape, by which they are: the second half is that in every length."""
    every, found = slice(None), dict[Key, tuple[Any, ...]]()
    for axis, size in enumerate(whole):
        before = (*[every] * axis,)
        if whole[:axis] + whole[axis + 1 :] == part:
            found |= {(axis, n): (*before, n) for n in range(min(size, _PARTS))}
        elif len(whole) == len(part) and whole[:axis] + whole[axis + 1 :] == part[:axis] + part[axis + 1 :]:
            length = part[axis]
            count = size // length if length and size % length == 0 else 1
            found |= {(axis, n, count): (*before, slice(n * length, (n + 1) * length)) for n in range(count)[:_PARTS]}
            others = (n for n in range(size - length + 1)[:_PARTS] if length and (n % length or n >= count * length))
            found |= {(axis, n, "from"): (*before, slice(n, n + length)) for n in others}
            steps = range(count)[:_PARTS] if count > 1 and length > 1 else ()
            found |= {(axis, n, "every", count): (*before, slice(n, None, count)) for n in steps}
    return found


def _moved(steps: _Steps, rows: Sequence[int]) -> Changes:
    """What it makes, reversed or moved by one along an axis."""
    values, first = [steps.values.rows[k] for k in rows], steps.values.rows[rows[0]]
    if len({len(row.shape) for row in values}) > 1:
        return
    ways: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = []
    for axis, size in enumerate(first.shape):
        ways += [(f"reversed along axis {axis}", partial(np.flip, axis=axis))] * (size > 1)
        ways += [(f"moved by {by} along axis {axis}", partial(_shifted, axis, by)) for by in (1, -1) if not first.data]
    for said, after in ways:
        its = [Instead(row.inputs, partial(_then, row, after)) for row in values]
        yield f"applies {_name(first)} here; with the result {said}", its


def _name(row: Value) -> str:
    return row.operation.split(".")[-1].rstrip("_")


def _shown(part: Any) -> str:
    if not isinstance(part, slice):
        return str(part)
    ends = (part.start, part.stop, part.step)[: 3 if part.step else 2]
    return ":".join("" if n is None else str(n) for n in ends)


def _taken(part: tuple[Any, ...], arrays: Sequence[Any]) -> Any:
    return arrays[0][part]


def _reshaped(moved: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], arrays: Sequence[Any]) -> Any:
    return moved(arrays[0]).reshape(shape)


def _then(row: Value, after: Callable[[np.ndarray], np.ndarray], arrays: Sequence[Any]) -> Any:
    assert row.again is not None
    return after(np.asarray(row.again(arrays)))


def _shifted(axis: int, by: int, array: np.ndarray) -> np.ndarray:
    moved, before = np.zeros_like(array), np.moveaxis(array, axis, 0)
    into = np.moveaxis(moved, axis, 0)
    into[max(by, 0) : len(into) + min(by, 0)] = before[max(-by, 0) : len(before) - max(by, 0)]
    return moved


_SELDOM = (_opposite, _exchanged_parts)
"""Ways with few tries, which are run to the end although nothing agrees near them."""
_WAYS = (_other_argument, _opposite, _exchanged_parts, _other_value, _left_out, _other_order, _other_part, _moved)
