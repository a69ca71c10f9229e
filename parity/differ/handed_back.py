"""Whether one side hands a gradient back that the other does not: its way back is run on without it, to the end."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import islice, product
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from parity.differ.alignment import Start
from parity.differ.answer import Difference
from parity.differ.confirmation import Change, Mended, run_on
from parity.differ.element_order import error_of
from parity.differ.substitution import does
from parity.differ.values import GRADIENT, Site, Value, Values
from parity.gates.bridge import Tensors

_TRIED = 8
"""Gradients of one sort and side, at most, without which it is run on."""
_PAIRED = 12
"""Gradients of a side, at most, that may be handed to something else than on the other side."""
_ALIKE = 24
"""Places of the same lines, at most."""
_STEPS = 8
"""Values on, at most, to the first that has an equal."""
_MOST = 1 << 24
"""Elements, at most, of all gradients of a side."""
_BAR = 1e-8
"""How far apart gradients may be that agree: what is small beside others has lost digits."""

Ends = Mapping[str, Sequence[int]]
"""Weight of theirs -> the values of a side that are its gradient."""


class Gradients(NamedTuple):
    """The gradients of all weights on both sides."""

    sides: tuple[Values, Values]
    ends: tuple[Ends, Ends]
    trained: tuple[Collection[str], Collection[str]]
    """The weights of each side that have these gradients, as it calls them."""
    wrong: Collection[str]
    """The weights of theirs whose gradients differ."""
    zero: float
    """The norm of a gradient that is zero but for rounding."""
    by_name: Callable[[Values], Tensors]
    """The gradients of ours by the names of theirs."""
    compared: Callable[[Tensors], Tensors]
    """Those of theirs, with zero for numbers that are not compared."""


class _Handed(NamedTuple):
    """What one side hands back, at one or more places of the same lines, and could leave out."""

    places: Sequence[tuple[int, int | None]]
    """(what is computed with it, what is left of that without it: the other one of two that are added, or nothing)."""
    row: int
    """The first such gradient."""
    of: Sequence[int]
    """What it may be the gradient of."""
    reach: int
    """The weights whose gradients are made of it, a bit each."""


class _Stop(NamedTuple):
    """Where the other side hands nothing back."""

    of: int
    """The value of this side whose gradient it would be."""
    at: int
    """The value of the other side that stops it."""
    detached: bool
    """Whether a program asks for that there."""
    shown: int
    """The value of the other side whose line is shown: what stops it, or what reads that though it should not."""


class Search:
    """Looks for what one side hands back and could leave out."""

    def __init__(self, gradients: Gradients) -> None:
        self._sides, self._ends, self._given = gradients.sides, gradients.ends, gradients
        self._bits = {name: 1 << n for n, name in enumerate(sorted({*self._ends[0], *self._ends[1]}))}
        self._wrong = sum(self._bits[name] for name in gradients.wrong)
        self._free = [_without_gradient(*each) for each in zip(self._sides, gradients.trained, strict=True)]
        self._handed = [[*self._all_handed(*each)] for each in zip(self._sides, self._ends, strict=True)]
        self._alike = [self._by_lines(*each) for each in zip(self._sides, self._handed, strict=True)]
        self._runs = dict[Any, Values | Mended]()
        for values, ends, handed in zip(self._sides, self._ends, self._handed, strict=True):
            kept = {i for each in handed for _, i in each.places if i is not None}
            values.want({i for numbers in ends.values() for i in numbers} | {*values.outputs.values()} | kept)

    @classmethod
    def of(cls, gradients: Gradients) -> "Search | None":
        """None where the way back is too large to be run on again and again."""
        sizes = (sum(math.prod(row.shape) for row in values.rows if row.backward) for values in gradients.sides)
        return cls(gradients) if max(sizes) <= _MOST else None

    def where_one_hands_back(self, answer: Difference) -> Difference:
        """The place where one side hands a gradient back and the other stops it, or is not made of what it would go to,
        if without it all gradients are the same; else the answer as it is."""
        for side in (0, 1):
            for handed, stop in self.alone(side):
                if self.mends({side: handed}):
                    return self.told(answer, side, handed, stop)
        return answer

    def where_one_takes_a_step(self, answer: Difference) -> Difference:
        """Where one side takes a step, from a gradient that both have, without which all gradients are the same; else
        the answer as it is. It is never sure: another step may undo what is wrong as well."""
        for side in (0, 1):
            for step in self._steps(side):
                if self.mends({side: step}):
                    values, other, [(k, i), *_] = self._sides[side], self._sides[1 - side], step.places
                    assert i is not None
                    # The other side's line is the one that computes the same forward, where it has one.
                    of = values.rows[k].forward
                    same = [] if of is None else [j for j in values.equal.get(of, ()) if other.leaf(j) is None]
                    places = values.site(k), other.site((same or values.equal[i])[0])
                    here, there = places if side == 0 else places[::-1]
                    done = does(Start(values, k, (), ()), None, values.rows[k], i)
                    said = f"{values.side} {done} here; without that, {values.side} goes on as {other.side} does"
                    trust: dict[str, Any] = {"sure": False, "confirmed": False, "tried": True}
                    before = answer.ours
                    others = (before,) if before and (before.file, before.line) != (here.file, here.line) else ()
                    return replace(answer, ours=here, theirs=there, agreed=(), kind=said, others=others, **trust)
        return answer

    def _steps(self, side: int) -> list[_Handed]:
        """What a side computes of a gradient that both have, but for sums, and could leave as it is."""
        values, found = self._sides[side], list[_Handed]()
        for each in self._handed[side]:
            [(k, stays)] = each.places
            row, computes = values.rows[k], stays is None and not _hands_on(values, k)
            read = (i for i in row.inputs if values.rows[i].backward and i in values.equal)
            alike = [i for i in read if values.rows[i].shape == row.shape]
            found += [each._replace(places=[(k, alike[0])])] if computes and alike else []
        return found[:_TRIED] + self._by_lines(values, found)[:_TRIED]

    def where_it_goes_elsewhere(self, answer: Difference) -> Difference:
        """Where one side alone trains the weights that differ, their first, if no kind is known; else where each hands
        a gradient that both have to something else, if without that all gradients are the same. No more than places
        to look at."""
        for side in (0, 1) if answer.kind is None else ():
            if sites := self.of_one_side(side):
                others = (answer.ours,) if answer.ours else ()
                said = f"{self._sides[side].side} alone trains this weight"
                return replace(answer, ours=sites[0], theirs=sites[1], agreed=(), kind=said, sure=False, others=others)
        for here, there in self.elsewhere():
            if self.mends({0: here, 1: there}):
                places = self.place(0, here), self.place(1, there)
                said = "each hands a gradient back to something else here"
                return replace(answer, ours=places[0], theirs=places[1], agreed=(), kind=said, sure=False)
        return answer

    def alone(self, side: int) -> Iterator[tuple[_Handed, _Stop]]:
        """What a side may hand back alone, at one place or wherever it comes to the same lines, the first on the way
        back first; before all else what the other side detaches."""
        mending = self._handed[side], self._alike[side]
        found = [[(each, self._stop(side, each)) for each in handed if each.reach == self._wrong] for handed in mending]
        for detached, handed in product((True, False), found):
            yield from islice(((each, stop) for each, stop in handed if stop and stop.detached is detached), _TRIED)

    def elsewhere(self) -> Iterator[tuple[_Handed, _Handed]]:
        """What each side may hand to something else, first what goes to other weights."""
        all_of_both = ((*one, *several) for one, several in zip(self._handed, self._alike, strict=True))
        ours, theirs = (sorted(each, key=lambda each: each.reach == self._wrong)[:_PAIRED] for each in all_of_both)
        for here, there in product(ours, theirs):
            # The same gradient, and not to the same.
            same = not self._sides[0].equals(self._handed_on(0, here)).isdisjoint(self._handed_on(1, there))
            apart = here.of and there.of and self._sides[0].equals(here.of).isdisjoint(there.of)
            if same and apart and here.reach != there.reach and here.reach | there.reach == self._wrong:
                yield here, there

    def _handed_on(self, side: int, handed: _Handed) -> set[int]:
        """The gradient that is handed on, or what it is computed of."""
        values = self._sides[side]
        return {i for i in (handed.row, *values.rows[handed.row].inputs) if values.rows[i].backward}

    def _all_handed(self, values: Values, ends: Ends) -> Iterator[_Handed]:
        """The gradients without an equal that weights with another gradient have theirs from, and no others."""
        reach = [0] * len(values.rows)
        for name, numbers in ends.items():
            for i in numbers:
                told = not values.rows[i].noise and values.rows[i].largest > self._given.zero
                reach[i] |= self._bits[name] if told else 0
        for k in range(len(reach) - 1, -1, -1):
            for i in values.rows[k].inputs if values.rows[k].backward else ():
                reach[i] |= reach[k] if values.rows[i].backward else 0
        for k, row in enumerate(values.rows):
            alone = row.backward and row.features is not None and k not in values.equal
            if alone and reach[k] and not reach[k] & ~self._wrong:
                yield _Handed([(k, None)], k, _of(values, k), reach[k])
                added = [i for i in row.inputs if values.rows[i].backward and values.rows[i].shape == row.shape]
                if "add" in row.operation and len(added) == 2 == len(row.inputs):
                    for i, stays in (added, added[::-1]):
                        yield _Handed([(k, stays)], i, _of(values, i), reach[k])

    def _by_lines(self, values: Values, handed: Sequence[_Handed]) -> list[_Handed]:
        """What is handed back wherever a side comes to the same lines: by the same operations, or those that come as
        late in the derivative of one."""
        rows, turns, turn = values.rows, Counter[Any](), []
        for row in rows:
            turns[row.forward, row.operation] += row.backward
            turn.append(turns[row.forward, row.operation])
        found = dict[Any, list[_Handed]]()
        for each in handed:
            [(k, _)] = each.places
            lines = [(rows[i].place[:2], rows[i].operation) for i in (k, each.row)]
            for key in ((*lines, turn[k], turn[each.row]), tuple(lines)):
                found.setdefault(key, []).append(each)
        alike = [each for each in found.values() if 1 < len(each) <= _ALIKE]
        return [
            each[0]._replace(
                places=[place for one in each for place in one.places], reach=reduce(or_, (one.reach for one in each))
            )
            for each in alike
        ]

    def _stop(self, side: int, handed: _Handed) -> _Stop | None:
        """Where the other side hands nothing back to what stands for a value: both go on to something that agrees, to
        which a gradient is handed."""
        values, other, free = self._sides[side], self._sides[1 - side], self._free[1 - side]
        near = _belongs_to(values, handed.row)
        returned = {i: other.outputs[name] for name, i in values.outputs.items() if name in other.outputs}
        for _ in range(_STEPS):
            # What is returned has a gradient to hand back on both sides.
            if makes := values.equals(near) - free | {returned[i] for i in near if i in returned}:
                break
            near = [k for i in near for k in values.readers(i) if not values.rows[k].backward]
        read = [i for i in handed.of if any(not _stops(values.rows[k]) for k in values.readers(i))]
        for i in read:
            for j in values.equal.get(i, ()) if i not in self._free[side] else ():
                if j in free and other.leaf(j) is None and any(other.is_made_of(m, j) for m in makes):
                    at = _stopping(other, free, j)
                    detached = at in other.stopped or _stops(other.rows[at])
                    both = detached and not self._free[side].isdisjoint(other.equal.get(at, ()))
                    return _Stop(i, at, detached, _last_read(other, at, j) if both else at)
        return None

    def mends(self, handed: Mapping[int, _Handed]) -> bool:
        """Whether all gradients agree, if each of these sides is run on without what it hands back."""
        sides = [*self._sides]
        for side, each in handed.items():
            key = side, *each.places
            if key not in self._runs:
                self._runs[key] = self._without(side, each)
            after = self._runs[key]
            if isinstance(after, Mended):
                return False
            sides[side] = after
        mine = self._given.by_name(replace(sides[0], arrays={**sides[0].arrays}))
        for name, numbers in self._ends[1].items():
            held = self._given.compared({name: sides[1].arrays[numbers[0]]}) if numbers else {}
            their = held.get(name, np.zeros_like(mine.get(name, 0.0)))
            here = mine.get(name, np.zeros_like(their))
            tiny = max(map(np.linalg.norm, (here, their))) <= 1e3 * self._given.zero
            if not tiny and not error_of(here, their) <= _BAR:
                return False
        return True

    def _without(self, side: int, handed: _Handed) -> Values | Mended:
        """The gradients of a side without what it hands back."""
        values = self._sides[side]
        (first, stays), *others = handed.places
        nothing = {k: np.zeros(values.rows[k].shape) for k, i in handed.places if i is None}
        array = nothing[first] if stays is None else values.array(stays)
        read = {*values.outputs.values()} | {i for numbers in self._ends[side].values() for i in numbers}
        if array is None or not read <= values.arrays.keys():
            return Mended.UNKNOWN
        twins = {k: nothing[k] if i is None else i for k, i in others}
        after = run_on(values, Change(first, array, twins), backward=True)
        return after if isinstance(after, Mended) else replace(after, arrays={i: after.arrays[i] for i in read})

    def told(self, answer: Difference, side: int, handed: _Handed, stop: _Stop) -> Difference:
        """The answer: what the other side detaches, or, not for sure, where it is made of what nothing is handed to."""
        values, other = self._sides[side], self._sides[1 - side]
        if stop.detached:
            read = self._first_read(side, stop)
            own, its = self.place(side, handed) if read is None else values.site(read), other.site(stop.shown)
        else:
            at = self._begins(side, stop.of)
            own, its = values.site(at), other.site(values.equal[at][0])
        here, there = (own, its) if side == 0 else (its, own)
        said = f"{values.side} hands a gradient back here, {other.side} does not" + ": it is detached" * stop.detached
        return replace(
            answer, ours=here, theirs=there, agreed=(), kind=said, sure=stop.detached, confirmed=stop.detached
        )

    def _first_read(self, side: int, stop: _Stop) -> int | None:
        """What first reads the value that the other side stops, and that is not stopped here too, on the way to the one
        whose gradient is handed back."""
        values, other = self._sides[side], self._sides[1 - side]
        here, there, same = values.array(stop.of), other.array(stop.at), other.equal.get(stop.at, ())
        if here is None or there is None or (here.shape == there.shape and error_of(here, there) <= _BAR):
            return None  # it is that value
        reads = {k for i in same if i not in self._free[side] for k in values.readers(i) if k not in same}
        return min((k for k in reads if values.is_made_of(stop.of, k)), default=None)

    def place(self, side: int, handed: _Handed) -> Site:
        """The line that hands it back. A sum computes nothing for what it hands on: of several, the first that reads
        what it is handed to."""
        values, [(k, stays), *_] = self._sides[side], handed.places
        to = {i for n in (k, stays) if n is not None for i in _of(values, n)}
        todo = [] if stays is None else [*handed.of]
        for i in todo:
            if not to.isdisjoint(values.rows[i].inputs):
                return values.site(i)
            todo += [n for n in values.rows[i].inputs if _hands_on(values, i) and values.rows[n].data and n not in todo]
        return values.site(handed.row)

    def of_one_side(self, side: int) -> tuple[Site, Site] | None:
        """Where each side reads the first of the weights that differ, if this side alone trains them."""
        ends = (i for name in self._given.wrong for i in self._ends[1 - side].get(name, ()))
        if any(self._sides[1 - side].rows[i].largest > self._given.zero for i in ends):
            return None
        ours, theirs = self._weights(0), self._weights(1)
        both = [(ours[name], theirs[name]) for name in ours.keys() & theirs]
        return (self._sides[0].made(min(both)[0]), self._sides[1].made(min(both)[1])) if both else None

    def _weights(self, side: int) -> dict[str, int]:
        """The weights of a side whose gradients are wrong, by the names of theirs."""
        values, ends = self._sides[side], self._ends[side]
        found = {row.name: k for k, row in enumerate(values.rows) if row.kind == "parameter"}
        if side == 1:
            return {name: found[name] for name in self._given.wrong if name in found}
        of = {values.outputs.get(GRADIENT + name): k for name, k in found.items()}
        return {name: of[i] for name in self._given.wrong for i in ends.get(name, ()) if i in of}

    def _begins(self, side: int, number: int) -> int:
        """Back through sums, from a value that the other side hands nothing through, to the first one that is made of
        what both hand a gradient to."""
        values, free = self._sides[side], self._free[1 - side]
        todo = [number]
        for i in todo:
            read = [k for k in values.rows[i].inputs if values.rows[k].data and k not in self._free[side]]
            if any(k in values.equal and free.isdisjoint(values.equal[k]) for k in read):
                return i
            stands = [k for k in read if k not in todo and not free.isdisjoint(values.equal.get(k, ()))]
            todo += stands if _hands_on(values, i) else []
        return number


def _of(values: Values, number: int) -> tuple[int, ...]:
    """The values of the way forward whose gradient this may be: what the line reads whose derivative it is."""
    row, rows, found = values.rows[number], values.rows, dict[int, None]()
    todo = _belongs_to(values, number)
    lines = {rows[i].place[:2] for i in todo}
    for i in todo:
        for k in (k for k in rows[i].inputs if rows[k].data and k not in found):
            found |= {k: None} if math.prod(rows[k].shape) == math.prod(row.shape) else {}
            todo += [k] if rows[k].place[:2] in lines and k not in todo else []
    return tuple(found)


def _belongs_to(values: Values, number: int) -> list[int]:
    """The values of the way forward whose derivative it is of; of a sum, those of what is added."""
    row = values.rows[number]
    added = row.inputs if "add" in row.operation else ()
    belongs = (values.rows[i].forward for i in (number, *added) if values.rows[i].backward)
    return [i for i in dict.fromkeys(belongs) if i is not None]


def _hands_on(values: Values, number: int) -> bool:
    return bool(re.search("add|sub", values.rows[number].operation)) or values.copies(number)


def _stops(row: Value) -> bool:
    return bool(re.search("stop_grad|detach", row.operation))


def _without_gradient(values: Values, trained: Collection[str]) -> set[int]:
    """What no gradient is handed through to a weight that is trained."""
    found = {*values.stopped}
    for k, row in enumerate(values.rows):
        weight = row.kind == "parameter" and row.name in trained
        if not row.backward and not weight and (not row.inputs or _stops(row) or found.issuperset(row.inputs)):
            found.add(k)
    return found


def _stopping(values: Values, free: set[int], number: int) -> int:
    """What stops the gradient of a value: itself, where gradients are off or several operations do; else the one that
    does, which it was made of."""
    todo, stops = [number] * (number not in values.stopped), []
    for i in todo:
        row = values.rows[i]
        if i not in values.stopped and _stops(row) and not free.issuperset(row.inputs):
            stops.append(i)
        else:
            todo += [k for k in row.inputs if k in free and k not in todo and values.rows[k].data]
    return stops[0] if len(stops) == 1 else number


def _last_read(values: Values, number: int, made: int) -> int:
    """What last reads a value, or a copy of it, on the way to another one; the value itself, where nothing does."""
    same, reads = [number], [number]
    for i in same:
        same += [k for k in values.readers(i) if values.copies(k)]
        reads += [k for k in values.readers(i) if not values.copies(k) and values.is_made_of(made, k)]
    return max(reads)
