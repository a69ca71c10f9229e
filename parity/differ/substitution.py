"""Experiments: whether one side, given other numbers in the place of a value, goes on as the other side does.

What agrees says where two sides part; an experiment says what would make them go on alike. One side is run on from the
place as if it had left a step out, had read another value, another table or the same one with its axes exchanged, or
had the other sign. Where it then computes what the other side computes, and did not before, that is said.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cached_property, partial
from itertools import combinations, islice, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from parity.differ.alignment import REACH, Start, made_of, sizes_around, splits
from parity.differ.answer import called
from parity.differ.confirmation import Change, Mended, mended, parted_after
from parity.differ.element_order import NEARLY, distance, in_shape, layouts, with_axes_as, without_copies
from parity.differ.fingerprints import BAR, Index, fingerprint, finite
from parity.differ.row_sets import is_whole
from parity.differ.values import Site, Value, Values, short

_STEPS = 50
_ENOUGH, _APART = 4, 6
"""Values that agree in an experiment are enough to show something; or they are nearly the last that were computed."""
_TABLES = 24
"""Tables of one side, at most."""
_LEFT_OUT = 16
"""Values behind a start, at most, that are tried as the last one of what is left out."""
_BACK = 3
"""Steps, at most, back from a table to what it was made of."""
_PATH = 8
"""Steps, at most, from a value back to one that stands for it wherever the program comes to these lines again."""
_CONFIRMED = 8
"""Experiments, at most, that are carried on to the end."""
_SIMPLE = 32
"""The largest denominator of a simple fraction."""
_SCALE = 1.37
"""What a value is multiplied by, to give it another size."""
_ORDERS = 24
"""Orders of axes, at most."""
_LARGEST, _LARGEST_WEIGHT = 1 << 22, 1 << 25
"""Elements of an array that is computed with, and of a weight."""
GOES_ON = ", ours goes on as theirs does"
"""What was seen; of what the other side does, an experiment says nothing."""
_VERBS = {
    "add": "adds",
    "sub": "subtracts",
    "mul": "multiplies by",
    "div": "divides by",
    "dot_general": "multiplies by",
    "mm": "multiplies by",
    "bmm": "multiplies by",
    "select_n": "masks by",
    "where": "masks by",
    "masked_fill": "masks by",
}


class Experiments:
    """One side, to be run on from values that were replaced, and what the other side computes that it does not."""

    def __init__(self, values: Values, other: Values, steps: int = _STEPS) -> None:
        """At most so many values are computed anew in one experiment."""
        self.values, self.other, self._steps = values, other, steps
        self._parts: dict[int, bool] = {}

    @cached_property
    def _returned(self) -> dict[int, int]:
        """Output of the other side -> ours of the same name, where the two differ."""
        pairs = [(number, self.values.outputs.get(name)) for name, number in self.other.outputs.items()]
        return {j: i for j, i in pairs if i is not None and i not in self.other.equal.get(j, ())}

    @cached_property
    def _live(self) -> set[int]:
        return self.values.live()

    @cached_property
    def _missing(self) -> Index:
        # Tables that each side makes in its own way agree with themselves alone.
        lacking = {j for j in self.other.live() - self.other.equal.keys() if self.other.rows[j].data}
        return self.other.index(lacking | self._returned.keys())

    def reached(self, number: int, array: np.ndarray) -> int | None:
        """The first value of the other side without an equal that this side computes with `array` in the place of a
        value; None where it computes none."""
        return next((j for _, j in self._run_on(number, array, alone=False, twins={}) if j is not None), None)

    def goes_on(
        self, number: int, array: np.ndarray, *, alone: bool = False, twins: Mapping[int, int] | None = None
    ) -> "Agreement | None":
        """How far this side computes what the other does, with `array` in the place of a value; None where it does not
        or parts again at once. If `alone`, what agrees stays as it is, whatever it is made of. In the place of each of
        the `twins` comes the value that is given with it."""
        run = list(self._run_on(number, array, alone, twins or {}))
        met = [(n, j) for n, (_, j) in enumerate(run) if j is not None]
        if not met:
            return None
        lines = {(self.other.rows[j].place[:2], self.other.rows[j].operation) for _, j in met}
        returned = not self._returned.keys().isdisjoint(j for _, j in met)
        agreement = Agreement(returned, len(lines), met[0][1], Change(number, array, twins or {}, alone))
        near = len(run) - 1 - met[-1][0] <= _APART
        return agreement if returned or agreement.agreeing >= _ENOUGH or near else None

    def is_of_any_size(self, number: int, read: int, first: int) -> bool:
        """Whether what agrees first is a single number that does not change with the size of `read`, which stands for a
        value: whatever is divided by itself is the same."""
        array = self.values.array(read)
        if math.prod(self.other.rows[first].shape) > 1 or array is None or array.dtype.kind != "f":
            return False
        return any(j == first for _, j in self._run_on(read, _SCALE * array, alone=False, twins={number: read}))

    def _run_on(
        self, number: int, array: np.ndarray, alone: bool, twins: Mapping[int, int]
    ) -> Iterator[tuple[int, int | None]]:
        """What is computed anew, but for copies, each with its equal among what the other side computes alone."""
        changed = {number: array}
        # What is rounded to whole numbers, and what is made of that alone, may agree by chance; not so where what is
        # rounded agrees already.
        chosen = array.dtype == bool and self.values.rows[number].data
        fine, rounded, met = chosen or not _has_whole_numbers(array), set[int](), set[int]()
        if number in self._returned.values():
            # The value itself counts where it is what is returned.
            yield number, self._met(number, array)
        after = self._after({number, *twins}, alone)
        self._want_read(after, twins.values())
        for k in after:
            row = self.values.rows[k]
            reads = [twins[k]] if k in twins else row.inputs
            again = partial(_given_in_shape, row.shape) if k in twins else row.again
            follows = k in twins or not changed.keys().isdisjoint(reads)
            if again is None or not follows or not all(map(self._is_read, reads)):
                continue
            given: list[Any] = [changed[i] if i in changed else self.values.array(i) for i in reads]
            # Numbers of another shape may not fit what follows.
            with suppress(Exception), np.errstate(all="ignore"):
                changed[k] = np.asarray(again(given))
                before = changed.keys() & {*reads}
                whole = _has_whole_numbers(changed[k]) and not (chosen and changed[k].dtype == bool)
                by_chance = whole and not before <= met
                if fine and ((before and rounded >= before) or by_chance):
                    rounded.add(k)
            if k in changed and k not in twins and (k in self._returned.values() or not self.values.copies(k)):
                equal = None if k in rounded else self._met(k, changed[k])
                met |= set() if equal is None else {k}
                yield k, equal
            elif k in changed and changed.keys() & {*reads} <= met:
                met.add(k)

    def want_after(self, tried: Mapping[tuple[int, int], Mapping[int, int]]) -> None:
        """Sees to it, in one run, that the numbers are there that these experiments need: (a value, what comes in its
        place) -> its twins."""
        begun = [{k} for k, _ in tried] + [{k, *twins} for (k, _), twins in tried.items() if twins]
        given = {i for (_, i), twins in tried.items() for i in (i, *twins.values())}
        self._want_read({k for each in begun for k in self._after(each, alone=False)}, given)

    def _want_read(self, numbers: Iterable[int], also: Iterable[int]) -> None:
        read = (i for k in numbers for i in self.values.rows[k].inputs)
        self.values.want(i for i in (*also, *read) if self._is_read(i))

    def is_small(self, number: int) -> bool:
        return math.prod(self.values.rows[number].shape) <= _LARGEST

    def _is_read(self, number: int) -> bool:
        size = math.prod(self.values.rows[number].shape)
        return size <= _LARGEST or (size <= _LARGEST_WEIGHT and self.values.parameter(number) is not None)

    def twins(self, number: int, read: int) -> dict[int, int]:
        """The values without an equal that the same lines make when the program comes to them again -> what they make
        them of there, as they make this one of what it has `read`."""
        rows, path, found = self.values.rows, self._path(number, read), {}

        def walked(k: int) -> tuple[list[Any], int]:
            """What is done on the way back, and where it ends."""
            steps: list[Any] = []
            for operand in path or ():
                row = rows[k]
                others = [rows[i].operation for n, i in enumerate(row.inputs) if n != operand]
                steps.append((row.place[:2], row.operation, others, len(row.inputs)))
                if operand >= len(row.inputs):
                    break
                k = row.inputs[operand]
            return steps, k

        reach = range(number + 1, min(number + REACH, len(rows)))
        lacking = (k for k in reach if k in self._live and k not in self.values.equal and not rows[k].backward)
        for k in lacking if path else ():
            steps, end = walked(k)
            if steps == walked(number)[0]:
                found[k] = end
        return found

    def _path(self, number: int, read: int) -> tuple[int, ...] | None:
        """Which operand to take at each step back from one value to another; None where that is not near."""
        paths: dict[int, tuple[int, ...]] = {number: ()}
        for k in (todo := [number]):
            for operand, i in enumerate(self.values.rows[k].inputs if len(paths[k]) < _PATH else ()):
                if i not in paths:
                    paths[i] = (*paths[k], operand)
                    todo.append(i)
        return paths.get(read)

    def _after(self, given: set[int], alone: bool) -> list[int]:
        """The values to be computed anew, in the order of execution, twins included."""
        number, seen, rows = min(given), set(given), self.values.rows
        for k in range(number + 1, min(number + REACH, len(rows))):
            follows = k in self._live and not rows[k].backward and not seen.isdisjoint(rows[k].inputs)
            if follows and not (alone and k in self.values.equal):
                seen.add(k)
            if len(seen) > self._steps:
                break
        return sorted(seen - {number})

    def _met(self, number: int, array: np.ndarray) -> int | None:
        # Whole numbers agree by chance, as those of the experts that are chosen, and how many tokens each of them has.
        chance = array.dtype.kind != "f" or (_has_whole_numbers(array) and number not in self._returned.values())
        features = None if chance else fingerprint(array, depends_on_data=True)[0]
        equal = [] if features is None else self._missing.equals(features)
        if number in self._returned.values():
            return next((j for j in equal if self._returned.get(j) == number), None)
        if number in self.values.equal:
            return None
        return next((j for j in equal if j not in self._returned and not self._in_parts(j)), None)

    def _in_parts(self, number: int) -> bool:
        """Whether this side computes a value of the other one after all, part by part."""
        if number not in self._parts:
            array = self.other.arrays.get(number)
            self._parts[number] = array is not None and bool(made_of(array, self._all))
        return self._parts[number]

    @cached_property
    def _all(self) -> Index:
        return self.values.index()


def _has_whole_numbers(array: np.ndarray) -> bool:
    return array.dtype.kind in "biu" or bool((np.rint(array) == array).all())


class Agreement(NamedTuple):
    """What one side computes as the other does in an experiment, and did not before; more is better."""

    returned: bool
    """Whether something that is returned agrees."""
    agreeing: int
    """Operations, not values: what one line makes of every weight, or in every layer, proves no more than once."""
    first: int
    """The first such value of the other side."""
    change: Change
    """What was put in the place of what."""


class Finding(NamedTuple):
    """What an experiment showed."""

    said: str
    ours: Site
    theirs: Site
    sure: bool
    confirmed: bool = False
    """Whether it mends all that differs."""


def experiment(
    sides: tuple[Values, Values],
    first: Start | None,
    second: Start | None,
    starts: tuple[Sequence[Start], ...],
    ways: "Sequence[Way] | None" = None,
) -> Finding | None:
    """With what change one side goes on as the other does where they part, as an experiment of one of the `ways` shows;
    else None.

    `first` and `second` are the starts of ours and theirs that belong together, `starts` all of both sides.
    """
    found, proved = [], set[tuple[Any, int, int]]()
    for agreement, side, finding in _findings(sides, (first, second), starts, ways or WAYS):
        lines = tuple((site.file, site.line, site.operation) for site in (finding.ours, finding.theirs))
        if finding.sure:
            proved.add((lines, side, agreement.change.number))
        found.append((agreement, side, finding, lines))
        if agreement.returned:
            break
    found.sort(key=lambda each: each[0][:2], reverse=True)
    best = None
    for agreement, side, finding, lines in found[:_CONFIRMED]:
        mends = mended(sides, side, agreement.change, (first, second))
        # Behind so much that agrees there may be another difference.
        much = agreement.agreeing > _ENOUGH and not agreement.returned
        if (much or mends > Mended.NOT_ALL) and (best is None or mends > best[0]):
            # What another experiment, or one of the other side, is sure of at the same two lines is sure; but one line
            # may take several steps.
            # Theirs may agree with axes exchanged because it then does one thing twice.
            confirmed = mends is Mended.ALL and not (side and agreement.change.alone)
            confirmed = confirmed and not is_by_chance(
                sides[side].array(agreement.change.number), agreement.change.array
            )
            step, number = finding.said.endswith("without that"), agreement.change.number
            sure = any(at == lines and not (step and its == side and n != number) for at, its, n in proved)
            sure = sure and not sides[side].reads_complex(number)
            confirmed = confirmed and not sides[side].reads_complex(number)
            one, other = (values.side for values in (sides[side], sides[1 - side]))
            said = f"{finding.said}, {one} goes on as {other} does{' at first' * (mends is not Mended.ALL)}"
            best = mends, finding._replace(said=said, sure=sure, confirmed=confirmed)
        if mends is Mended.ALL:
            break
    return best and best[1]


def is_by_chance(before: np.ndarray | None, after: np.ndarray) -> bool:
    """Whether it is a single number, as a loss is, that becomes a simple fraction of itself: many things do that."""
    if before is None or not before.size == after.size == 1 or not before.item():
        return False
    ratio = complex(after.item() / before.item())
    if ratio.imag or not math.isfinite(ratio.real):
        return False
    return abs(ratio.real - float(Fraction(ratio.real).limit_denominator(_SIMPLE))) < 1e-9 * abs(ratio)


def _findings(
    sides: tuple[Values, Values],
    pair: tuple[Start | None, Start | None],
    starts: tuple[Sequence[Start], ...],
    ways: "Sequence[Way]",
) -> Iterator[tuple[Agreement, int, Finding]]:
    for tried in ways:
        for side, (start, partner) in enumerate((pair, pair[::-1])):
            experiments = Experiments(sides[side], sides[1 - side])
            for shown in tried(experiments, start, partner, starts[1 - side]) if start else ():
                other = shown.other or _site_of_other(experiments, shown, partner, starts[1 - side])
                places = sides[side].made(shown.place), other
                finding = Finding(shown.said, *(places if side == 0 else places[::-1]), shown.sure)
                yield shown.agreement, side, finding


def repaired(ours: Start, theirs: Start) -> tuple[int, int, Mended] | None:
    """(ours, theirs, what it mends): the first value that other lines read, and that makes ours go on as theirs does if
    it is theirs; None where there is none. So nothing behind it is wrong. What is returned proves nothing about other
    lines."""
    values, other = ours.values, theirs.values
    best: tuple[int, int, Mended] | None = None
    for i, j, moved in islice(_repairs(ours, theirs), _CONFIRMED):
        mends = mended((values, other), 0, Change(i, moved, {}), (ours, theirs))
        if best is None or mends > best[2]:
            best = i, j, mends
        if mends is Mended.ALL:
            break
    if best is None or (best[0] in values.outputs.values() and _another_line(values, best[0], ours.number)):
        return None
    return best


def _repairs(ours: Start, theirs: Start) -> Iterator[tuple[int, int, np.ndarray]]:
    values, other = ours.values, theirs.values
    experiments = Experiments(values, other)
    for i in ours.near:
        used = values.used(i)
        here = values.array(i)
        if here is None or values.copies(i) or (used and not any(_another_line(values, i, k) for k in used)):
            continue
        for j in theirs.near:
            there = other.array(j)
            orders = [] if there is None or other.copies(j) else layouts(here, there)[:_ORDERS]
            if orders and distance(here, there) < NEARLY:
                # In another order, numbers that are nearly the same may mend an order that is wrong elsewhere.
                near = NEARLY * np.abs(finite(here)).max()
                orders = [array for array in orders if np.abs(finite(here) - finite(array)).max() <= near]
            tried = [(agreement, moved) for moved in orders if (agreement := experiments.goes_on(i, moved))]
            if tried:
                yield i, j, max(tried, key=lambda each: each[0][:2])[1]


def exchanged(ours: Start, theirs: Start) -> tuple[Site, str] | None:
    """A value that ours reads in the place of another, or two that it takes for each other: what mends all."""
    values, other = ours.values, theirs.values
    pairs = ((i, j) for i, j in product(ours.agreed, theirs.agreed) if j not in values.equal.get(i, ()))
    shapes = [row.shape for row in values.rows]
    tried = {(i, k): j for i, j in pairs for k in other.equal.get(j, ()) if shapes[k] == shapes[i]}
    for (i, k), j in islice(tried.items(), _CONFIRMED):
        here, there = values.array(i), values.array(k)
        if here is None or there is None or values.leaf(i) is not None:
            continue
        alone = not (values.is_made_of(i, k) or values.is_made_of(k, i))
        if values.used(k) and alone and _mends_wherever(ours, theirs, Change(i, there, {k: here})):
            copies, its = copied_from(values, i), copied_from(values, k)
            apart = next((n for n, before in pairwise(copies) if before in its), None)
            if apart is not None:
                whole = told_of(values, values.rows[apart].inputs[-1])
                return values.site(apart), f"with two parts of {whole} exchanged, here or behind{GOES_ON}"
            one, two = told_of(values, i), told_of(values, k)
            told = f"two results of {one}" if one == two else f"{one} and {two}"
            return values.made(ours.number), f"with {told} exchanged{GOES_ON}"
        if parted_after((values, other), 0, Change(i, there, {})) is Mended.ALL:
            return values.made(ours.number), _reads(values, i, other, j) + GOES_ON
    return None


def copied_from(values: Values, number: int) -> list[int]:
    """A value and those that it is a copy or a part of, the last one first."""
    found = [number]
    while values.copies(number):
        number = values.rows[number].inputs[-1]
        found.append(number)
    return found


def _mends_wherever(ours: Start, theirs: Start, change: Change) -> bool:
    """Whether it mends all, together with an exchange wherever the two come to the same lines again."""
    after = parted_after((ours.values, theirs.values), 0, change)
    if isinstance(after, Mended):
        return after is Mended.ALL
    here, there = after
    if here is None or there is None or here.number <= ours.number:
        return False
    again = [one.row.place[:2] == other.row.place[:2] for one, other in ((ours, here), (theirs, there))]
    return all(again) and exchanged(here, there) is not None


def _another_line(values: Values, i: int, k: int) -> bool:
    return values.rows[i].place[:2] != values.rows[k].place[:2]


class _Shown(NamedTuple):
    said: str
    place: int
    """Where this side does it."""
    read: int
    """What it was done to."""
    agreement: Agreement
    other: Site | None = None
    """Where the other side does something else, where that is known."""
    sure: bool = True
    """Whether what this side does there is made of what agrees."""


_Starts = Sequence[Start]


def _left_out(experiments: Experiments, start: Start, partner: Start | None, others: _Starts) -> Iterator[_Shown]:
    """This side does something, and the other goes on with what it is done to."""
    values, branches = experiments.values, dict(start.branches)
    # A product with zeros hides what it was made of, and the bias that is added to it agrees.
    zeros = [k for k, row in enumerate(values.rows) if row.data and row.largest == 0 and not row.backward][:_LEFT_OUT]
    ends = (values.copied(i) for k in branches for i in values.rows[k].inputs if i not in values.equal)
    found = dict.fromkeys((*start.near[:_LEFT_OUT], *branches, *ends, *zeros))
    places = [k for k in found if not values.copies(k)]
    read = {k: (*values.rows[k].inputs, *start.agreed, *([branches[k]] if k in branches else ())) for k in places}
    pairs = [(k, i) for k in places for i in dict.fromkeys(read[k]) if _may_stand_for(experiments, i, k)]
    tried = {(k, i): experiments.twins(k, i) for k, i in pairs}
    experiments.want_after(tried)
    for (k, i), twins in tried.items():
        row, array = values.rows[k], values.array(i)
        moved = [] if array is None else in_shape(array, row.shape)
        for given, again in product(moved, ({}, twins) if twins else ({},)):
            agreement = experiments.goes_on(k, given, twins=again)
            if agreement is not None and not experiments.is_of_any_size(k, i, agreement.first):
                one = i in row.inputs
                lines = dict.fromkeys(f"`{values.site(number).source}`" for number in (start.number, k))
                done = does(start, partner, row, i) if one else f"computes {' to '.join(lines)}"
                sure = i in values.equal or not values.rows[i].data
                said = f"{values.side} {done} here; without that"
                yield _Shown(said, k if one else start.number, i, agreement, sure=sure)
    for k, holds in product((k for k in places if values.rows[k].dtype.endswith("bool")), (True, False)):
        if agreement := experiments.goes_on(k, np.full(values.rows[k].shape, holds)):
            said = f"{values.side} chooses here; if that held {'everywhere' if holds else 'nowhere'}"
            yield _Shown(said, k, k, agreement)


def _may_stand_for(experiments: Experiments, read: int, made: int) -> bool:
    """Whether a value has the size that another one needs in its place, if what is done there is left out."""
    rows = experiments.values.rows
    if rows[made].dtype.endswith("bool") and rows[read].dtype != rows[made].dtype:
        return False  # numbers are no mask
    if rows[read].data and rows[read].largest == 0:
        return False  # a state that begins at zero is zero again without a step, and so like theirs at some step later
    size, needed = (math.prod(rows[number].shape) for number in (read, made))
    if size > needed:
        return read in rows[made].inputs and experiments.is_small(read)
    # A mask or a table may be repeated to the shape of what it is added to.
    return size == needed if rows[read].data else size >= 3


def _given_in_shape(shape: tuple[int, ...], given: Sequence[np.ndarray]) -> np.ndarray:
    return in_shape(given[0], shape)[0]


def _other_operand(experiments: Experiments, start: Start, partner: Start | None, others: _Starts) -> Iterator[_Shown]:
    """This side reads one value where the other reads another."""
    if partner is not None:
        yield from _reading(experiments, start, [(j, None) for j in partner.agreed])


def of_same_weight(experiments: Experiments, start: Start, partner: Start | None, others: _Starts) -> Iterator[_Shown]:
    """This side multiplies another value by the weight that it reads."""
    values, other = experiments.values, experiments.other
    weights = [j for i in start.row.inputs if values.parameter(i) for j in values.equal.get(i, ())]
    products = dict.fromkeys(m for w in weights for m in other.used(w) if other.rows[m].data)
    operands = [(j, other.site(m)) for m in products for j in other.rows[m].inputs if other.leaf(j) is None]
    yield from _reading(experiments, start, operands)


def _reading(experiments: Experiments, start: Start, operands: Sequence[tuple[int, Site | None]]) -> Iterator[_Shown]:
    """Given one of these values of the other side, which it reads in some place, this side goes on as it does."""
    values, other, row = experiments.values, experiments.other, start.row
    known = values.equals(start.agreed)
    other.want(j for j, _ in operands)
    for j, site in operands:
        there = other.array(j)
        if other.copied(j) in known or j in known or there is None or row.again is None:
            continue
        for position, i in enumerate(row.inputs):
            # What theirs has not as a whole is no other value of theirs.
            whole = any(
                math.prod(other.rows[m].shape) == math.prod(values.rows[i].shape) for m in values.equal.get(i, ())
            )
            here = values.array(i) if values.rows[i].data and whole else None
            for moved in layouts(here, there)[:_ORDERS] if here is not None else ():
                given = [values.array(k) for k in row.inputs]
                given[position] = moved
                if any(array is None for array in given):
                    continue
                with suppress(Exception):
                    agreement = experiments.goes_on(start.number, np.asarray(row.again(given)))
                    if agreement is not None:
                        yield _Shown(_reads(values, i, other, j), start.number, i, agreement, site)


def _reads(values: Values, i: int, other: Values, j: int) -> str:
    """What one side reads, and what in its place."""
    here, there = told_of(values, i), told_of(other, j)
    same = here == there or (_is_part(values, i) and other.copied(j) in values.equal.get(values.copied(i), ()))
    return f"{values.side} reads {here}; with {'another part of it' if same else there} in its place"


def _is_part(values: Values, number: int) -> bool:
    return math.prod(values.rows[number].shape) < math.prod(values.rows[values.copied(number)].shape)


def _other_table(experiments: Experiments, start: Start, partner: Start | None, others: _Starts) -> Iterator[_Shown]:
    """This side reads one table where the other reads another."""
    values, other = experiments.values, experiments.other
    tables = _tables(other, [*([partner] if partner else []), *others])
    for i, j in product(_tables(values, [start]), tables):
        if j not in values.equal.get(i, ()) and (agreement := _with_table(experiments, i, j)) is not None:
            origin, its, sure = _origin(experiments, i, j)
            given = [_read_from(side, n) for side, n in ((values, origin), (other, its))]
            sites = values.made(origin), other.made(its)
            lines = [f"`{site.source}`" if site.source else "a table of its own" for site in sites]
            told = [
                f"input {row.name}" if row.kind == "input" else line for row, line in zip(given, lines, strict=True)
            ]
            names = told if told[0] != told[1] else lines
            said = f"{values.side} reads {names[0]}; with {names[1]} in its place"
            # The line that makes a table, or reads an input first, is not the one that reads the wrong one.
            site = None if partner is None else other.shown(partner.number)
            taken = names[0].startswith("input ")
            rightly = _is_one_of_several(values, origin) or _is_read_rightly(values, origin)
            if taken or (j in other.equal and rightly):
                yield _Shown(said, start.number, i, agreement, site, sure or not taken)
            else:
                yield _Shown(said, origin, i, agreement, site if names[1].startswith("input ") else sites[1], sure)


def _read_from(values: Values, number: int) -> Value:
    """What a table is a copy of; the input that has the same numbers, as one that is clipped or converted may."""
    number = values.copied(number)
    array, rows = values.arrays.get(number), values.rows
    inputs = [k for k, row in enumerate(rows) if row.kind == "input" and not row.data]
    same = [k for k in inputs if array is not None and np.array_equal(values.arrays.get(k, np.nan), array)]
    return rows[same[0] if same else number]


def _is_one_of_several(values: Values, number: int) -> bool:
    """Whether one line takes several parts of an array, of which another line chooses one."""
    row = values.rows[number]
    beside = (k for i in row.inputs for k in values.readers(i) if k != number and values.copies(k))
    return any((values.rows[k].place, values.rows[k].shape) == (row.place, row.shape) for k in beside)


def _is_read_rightly(values: Values, number: int) -> bool:
    """Whether what is made of a table somewhere agrees, and depends on data as the table does not."""
    todo = [number]
    for i in todo:
        found = values.used(i)
        if any(k in values.equal and values.rows[k].data for k in found):
            return True
        todo += [k for k in found if not values.rows[k].data and k not in todo]
    return False


def _with_table(experiments: Experiments, i: int, j: int) -> Agreement | None:
    """How far this side goes on as the other does, if it reads a table of the other's in the place of its own."""
    here, there = experiments.values.array(i), experiments.other.array(j)
    if here is None or there is None or (there.dtype == bool and here.dtype.kind in "iu"):
        # A mask of numbers is not the numbers: what compares them gives the same mask for it, by chance.
        return None
    moved = with_axes_as(without_copies(here), without_copies(there))
    found = (experiments.goes_on(i, np.broadcast_to(each, here.shape).astype(here.dtype)) for each in moved)
    return max(filter(None, found), key=lambda agreement: agreement[:3], default=None)


def _tables(values: Values, starts: Sequence[Start]) -> list[int]:
    """The tables that starts and what follows them read, and those that these were made of, back to what has an
    equal."""
    found = [i for start in starts for i in (*start.row.inputs, *start.constants) if not values.rows[i].data]
    behind = (i for start in starts for k in start.near for i in values.rows[k].inputs if not values.rows[i].data)
    found += [i for i in behind if not is_whole(values.rows[i].dtype)]
    found = list(dict.fromkeys(found))
    for i in found:
        if values.copies(i) or i not in values.equal:
            found += [k for k in values.rows[i].inputs if k not in found]
    values.want(found)
    # Of a side that was recorded, the larger ones are not there.
    return [i for i in found if values.rows[i].features is not None and i in values.arrays][:_TABLES]


def _origin(experiments: Experiments, i: int, j: int) -> tuple[int, int, bool]:
    """Where two tables begin to differ: back from both, as long as what the one was made of, in the place of what the
    other was made of, mends all behind it, and behind a part of a table that has the right one nowhere; and whether
    that line is made of what agrees. A step that one side takes alone may be the difference; formulas that each side
    arranges in its own way have none in common."""
    values, other = experiments.values, experiments.other
    told_of, together = (i, j), True
    while True:
        here, there = _behind(values, i), _behind(other, j)
        pairs = (pair for pair in product((*here, i), (*there, j)) if pair != (i, j))
        mended = next((pair for pair in pairs if _with_table(experiments, *pair) is not None), None)
        if mended is not None:
            k, m = mended
            alone = (k == i and not other.copies(j)) or (m == j and not values.copies(i))
            together = (k != i and m != j) or (together and not alone)
            i, j = mended
        elif values.copies(i) and here and not _has_part(values.array(here[0]), other.rows[j].features):
            i = here[0]
        else:
            same = together or j in values.equals(here)
            return *told_of, same and _is_made_of_what_agrees(experiments, i)
        # A function that is called where the other side has one line is told of by the call.
        calls = len(values.rows[i].place.chain) > len(values.rows[told_of[0]].place.chain)
        if not calls or other.rows[j].place[:2] != other.rows[told_of[1]].place[:2]:
            told_of = i, j


def _behind(values: Values, number: int) -> list[int]:
    """The tables that a table was made of, the near ones first: two parts of one may be made of what is before both."""
    found = [number]
    for _ in range(_BACK):
        found += [k for i in found for k in values.rows[i].inputs if k not in found]
    return [k for k in dict.fromkeys(found[1:]) if values.rows[k].features is not None]


def _is_made_of_what_agrees(experiments: Experiments, number: int) -> bool:
    """Whether the line of a table reads nothing but what it was given and tables that agree, number by number: those of
    two numbers have equals by chance."""
    rows, equal = experiments.values.rows, experiments.values.equal

    def agrees(k: int) -> bool:
        arrays = [(experiments.values.array(k), experiments.other.array(m)) for m in equal.get(k, ())]
        known = [(without_copies(x), without_copies(y)) for x, y in arrays if x is not None and y is not None]
        return any(distance(x, y) < BAR for x, y in known)

    todo = [number]
    for i in todo:
        differing = [k for k in rows[i].inputs if rows[k].features is not None and not agrees(k)]
        if any(rows[k].place.file and rows[k].place[:2] != rows[number].place[:2] for k in differing):
            return False
        todo += [k for k in differing if k not in todo]
    return True


def _has_part(table: np.ndarray | None, features: Any) -> bool:
    """Whether a table has such a part, as far as that is known."""
    parts = splits(table) if table is not None else ()
    found = [fingerprint(part, depends_on_data=False)[0] for each in parts for part in each]
    return table is None or bool(Index(found).equals(features))


def _other_axes(experiments: Experiments, start: Start, partner: Start | None, others: _Starts) -> Iterator[_Shown]:
    """This side does to one axis what the other does to another."""
    values = experiments.values
    tables = [i for i in start.row.inputs if not values.rows[i].data]
    # A weight is what the map says; an input may be turned.
    for i in (*tables, *sorted(start.agreed, key=lambda i: (values.parameter(i) is not None, values.leaf(i) is None))):
        array = values.array(i) if experiments.is_small(i) else None
        if array is None or not 2 <= array.ndim <= 5:
            continue
        # Exchanged with an axis of one, the other numbers would be repeated along what it is exchanged with.
        for a, b in combinations((axis for axis, size in enumerate(array.shape) if size > 1), 2):
            agreement = experiments.goes_on(i, array.swapaxes(a, b), alone=True)
            if agreement is not None:
                read = f"{told_of(values, i)}, as it is read here ({list(array.shape)})"
                yield _Shown(f"with axes {a} and {b} of {read}, exchanged", start.number, i, agreement)


def _other_sign(experiments: Experiments, start: Start, partner: Start | None, others: _Starts) -> Iterator[_Shown]:
    """This side has the other sign: the other computes the same with it."""
    array = start.values.array(start.number)
    if array is None or array.dtype.kind != "f":
        return
    features, _ = fingerprint(-array, depends_on_data=True)
    if features is not None and experiments.other.index().equals(features):
        agreement = experiments.goes_on(start.number, -array)
        if agreement is not None:
            yield _Shown("with the other sign", start.number, start.number, agreement)


Way = Callable[[Experiments, Start, Start | None, _Starts], Iterator[_Shown]]
WAYS: Sequence[Way] = (_left_out, of_same_weight, _other_operand, _other_table, _other_sign, _other_axes)
"""What may be done differently. The last is not asked where axes of what both read are exchanged: perhaps because
weights are."""


def _site_of_other(experiments: Experiments, shown: _Shown, partner: Start | None, starts: Sequence[Start]) -> Site:
    """Where the other side goes on: at its start that reads the value, or another one; else with what was computed
    in the experiment."""
    equal = experiments.values.equals([shown.read])
    reading = [start for start in starts if not equal.isdisjoint(start.agreed)]
    if partner and (partner in reading or not reading):
        reading = [partner]
    other = experiments.other
    number = reading[0].number if reading else shown.agreement.first
    # A slice or a view shows nothing: what it is of does, or what is made of it.
    computed = (
        [j for j in equal.intersection(reading[0].agreed) if other.rows[j].kind == "operation"] if reading else []
    )
    return other.site(computed[0]) if other.copies(number) and computed else other.shown(number)


def does(start: Start, partner: Start | None, row: Value, read: int) -> str:
    """What an operation does to one of the values that it reads: `adds 1e-05`."""
    name = row.operation.split(".")[-1].rstrip("_")
    sizes = sizes_around(start, *([partner] if partner else []))
    with_what = [told_of(start.values, k, row, sizes) for k in row.inputs if k != read]
    with_what += [called(x, sizes) for x in row.literals]
    if name in _VERBS and len(with_what) == 1:
        return f"{_VERBS[name]} {with_what[0]}"
    return f"applies {name}{' with ' * bool(with_what)}{', '.join(with_what[:2])}"


def told_of(values: Values, number: int, by: Value | None = None, sizes: Collection[int] = ()) -> str:
    """A value as an operand is called: a weight by its name, a number by itself, else by the line that computes it; on
    the line of what it is read `by`, by its operation and the weights in it."""
    row, leaf = values.rows[number], values.leaf(number)
    given = values.rows[values.copied(number) if leaf is None else leaf]
    if given.name:
        return "input " * (given.kind == "input") + given.name
    if not row.data and math.prod(row.shape) == 1:
        array = values.array(number)
        return f"{row.largest:g}" if array is None else called(float(array.reshape(())), sizes)
    site = values.made(values.copied(number))
    if site.file and not (by and by.place[:2] == row.place[:2]):
        return f"{'a part of ' * _is_part(values, number)}`{site.source}` ({short(site.file)}:{site.line})"
    names = [name for k in row.inputs if (name := values.parameter(k))]
    return f"the result of {site.operation}{' with ' * bool(names)}{', '.join(names)}"
