"""Experiments: whether one side, given other numbers in the place of a value, goes on as the other side does.

What agrees says where two sides part; an experiment says what they do differently there. One side is run on from the
place as if it had left a step out, had read another value or the same one with its axes exchanged, or had the other
sign. Where it then computes what the other side computes, and did not before, that was the difference.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

import numpy as np

from parity.differ.alignment import REACH, Start, sizes_around
from parity.differ.answer import called
from parity.differ.element_order import with_axes_as
from parity.differ.fingerprints import Index, fingerprint
from parity.differ.values import Site, Value, Values, short

_STEPS = 50
"""Values that are computed anew, at most, in one experiment."""
_ENOUGH, _APART = 4, 6
"""Values that agree in an experiment are enough to show something; or they are nearly the last that were computed."""
_LEFT_OUT = 16
"""Values behind a start, at most, that are tried as the last one of what is left out."""
_ORDERS = 24
"""Orders of axes, at most."""
_LARGEST = 1 << 22
"""Elements of an array that is computed with."""
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

    def __init__(self, values: Values, other: Values) -> None:
        self.values, self.other = values, other

    @cached_property
    def _returned(self) -> dict[int, int]:
        """Output of the other side -> ours of the same name, where the two differ."""
        pairs = [(number, self.values.outputs.get(name)) for name, number in self.other.outputs.items()]
        return {j: i for j, i in pairs if i is not None and i not in self.other.equal.get(j, ())}

    @cached_property
    def _missing(self) -> Index:
        lacking = self.other.live() - self.other.equal.keys()
        return self.other.index(lacking | self._returned.keys())

    def reached(self, number: int, array: np.ndarray) -> int | None:
        """The first value of the other side without an equal that this side computes with `array` in the place of a
        value; None where it computes none."""
        return next((j for _, j in self._run_on(number, array, alone=False) if j is not None), None)

    def goes_on(self, number: int, array: np.ndarray, *, alone: bool = False) -> "Agreement | None":
        """How far this side computes what the other does, with `array` in the place of a value; None where it does not
        or parts again at once. If `alone`, what agrees stays as it is, whatever it is made of."""
        met = [j for _, j in self._run_on(number, array, alone)]
        known = [j for j in met if j is not None]
        if not known:
            return None
        apart = met[::-1].index(known[-1])
        returned = not self._returned.keys().isdisjoint(known)
        agreement = Agreement(returned, len(set(known)), known[0])
        return agreement if returned or agreement.agreeing >= _ENOUGH or apart <= _APART else None

    def _run_on(self, number: int, array: np.ndarray, alone: bool) -> Iterator[tuple[int, int | None]]:
        """What is computed anew, but for copies, each with its equal among what the other side computes alone."""
        changed = {number: array}
        if number in self._returned.values():
            # The value itself counts where it is what is returned.
            yield number, self._met(number, array)
        after = self._after(number, alone)
        self.values.want(i for k in after for i in self.values.rows[k].inputs if self.is_small(i))
        for k in after:
            row = self.values.rows[k]
            if row.again is None or changed.keys().isdisjoint(row.inputs) or not all(map(self.is_small, row.inputs)):
                continue
            given = [changed[i] if i in changed else self.values.array(i) for i in row.inputs]
            # Numbers of another shape may not fit what follows.
            with suppress(Exception), np.errstate(all="ignore"):
                changed[k] = np.asarray(row.again(given))
            if k in changed and not self.values.copies(k):
                yield k, self._met(k, changed[k])

    def is_small(self, number: int) -> bool:
        return math.prod(self.values.rows[number].shape) <= _LARGEST

    def _after(self, number: int, alone: bool) -> list[int]:
        """The values to be computed anew, in the order of execution."""
        seen, rows = {number}, self.values.rows
        for k in range(number + 1, min(number + REACH, len(rows))):
            follows = not rows[k].backward and not seen.isdisjoint(rows[k].inputs)
            if follows and not (alone and k in self.values.equal):
                seen.add(k)
            if len(seen) > _STEPS:
                break
        return sorted(seen - {number})

    def _met(self, number: int, array: np.ndarray) -> int | None:
        features, _ = fingerprint(array, depends_on_data=True)
        for j in self._missing.equals(features) if features is not None else ():
            if self._returned[j] == number if j in self._returned else number not in self.values.equal:
                return j
        return None


class Agreement(NamedTuple):
    """What one side computes as the other does in an experiment, and did not before; more is better."""

    returned: bool
    """Whether something that is returned agrees."""
    agreeing: int
    first: int
    """The first such value of the other side."""


class Finding(NamedTuple):
    """What an experiment showed."""

    said: str
    ours: Site
    theirs: Site


def experiment(
    sides: tuple[Values, Values],
    first: Start | None,
    second: Start | None,
    starts: tuple[Sequence[Start], ...],
    *,
    exchanged: bool = False,
) -> Finding | None:
    """What the two sides do differently where they part, as far as an experiment shows it; else None.

    `first` and `second` are the starts of ours and theirs that belong together, `starts` all of both sides.
    Where two axes of what both read are `exchanged`, this may be so because two weights are.
    """
    best: tuple[tuple[bool, int], Finding] | None = None
    for tried in (_left_out, _other_operand, *([] if exchanged else [_other_axes]), _other_sign):
        for side, (start, partner) in enumerate(((first, second), (second, first))):
            experiments = Experiments(sides[side], sides[1 - side])
            for shown in tried(experiments, start, partner) if start else ():
                if best is None or shown.agreement[:2] > best[0]:
                    other = _site_of_other(experiments, shown, partner, starts[1 - side])
                    places = sides[side].site(shown.place), other
                    best = shown.agreement[:2], Finding(shown.said, *(places if side == 0 else places[::-1]))
                if shown.agreement.returned:
                    return best[1]
    return best[1] if best else None


class _Shown(NamedTuple):
    said: str
    place: int
    """Where this side does it."""
    read: int
    """What it was done to."""
    agreement: Agreement


def _left_out(experiments: Experiments, start: Start, partner: Start | None) -> Iterator[_Shown]:
    """This side does something, and the other goes on with what it is done to."""
    values = experiments.values
    near = start.near[:_LEFT_OUT]
    for k in (*near, *(k for k in start.joins if k not in near)):
        row = values.rows[k]
        if values.copies(k):
            continue
        for i in dict.fromkeys((*row.inputs, *start.agreed)):
            array = (
                values.array(i)
                if values.rows[i].data and np.prod(values.rows[i].shape) == math.prod(row.shape)
                else None
            )
            if array is None or array.size < 3:
                continue
            for moved in with_axes_as(np.empty(row.shape), array)[:1] if array.shape != row.shape else [array]:
                if (agreement := experiments.goes_on(k, moved)) is not None:
                    one = i in row.inputs
                    does = _does(start, partner, row, i) if one else f"computes `{values.site(start.number).source}`"
                    said = f"{values.side} {does} here, {experiments.other.side} goes on as without it"
                    yield _Shown(said, k if one else start.number, i, agreement)


def _other_operand(experiments: Experiments, start: Start, partner: Start | None) -> Iterator[_Shown]:
    """This side reads one value where the other reads another."""
    values, other, row = experiments.values, experiments.other, start.row
    if partner is None or row.again is None:
        return
    known = values.equals(start.agreed)
    for j in partner.agreed:
        there = other.array(j)
        if j in known or there is None:
            continue
        for position, i in enumerate(row.inputs):
            here = values.array(i) if values.rows[i].data else None
            for moved in with_axes_as(here, there)[:_ORDERS] if here is not None else ():
                given = [values.array(k) for k in row.inputs]
                given[position] = moved
                if any(array is None for array in given):
                    continue
                with suppress(Exception):
                    agreement = experiments.goes_on(start.number, np.asarray(row.again(given)))
                    if agreement is not None:
                        said = f"{values.side} reads {_told(values, i)} where {other.side} reads {_told(other, j)}"
                        yield _Shown(said, start.number, i, agreement)


def _other_axes(experiments: Experiments, start: Start, partner: Start | None) -> Iterator[_Shown]:
    """This side does to one axis what the other does to another."""
    values = experiments.values
    for i in sorted(start.agreed, key=lambda i: values.leaf(i) is None):
        array = values.array(i) if experiments.is_small(i) else None
        if array is None or not 2 <= array.ndim <= 5:
            continue
        orders = [axes for axes in permutations(range(array.ndim)) if axes != tuple(range(array.ndim))]
        for axes in sorted(orders, key=lambda axes: sum(a != n for n, a in enumerate(axes)))[:_ORDERS]:
            agreement = experiments.goes_on(i, array.transpose(axes), alone=True)
            if agreement is not None:
                moved = " and ".join(str(n) for n, axis in enumerate(axes) if axis != n)
                yield _Shown(f"axes {moved} of {_told(values, i)} are exchanged", start.number, i, agreement)


def _other_sign(experiments: Experiments, start: Start, partner: Start | None) -> Iterator[_Shown]:
    """This side has the other sign."""
    array = start.values.array(start.number)
    floating = array is not None and array.dtype.kind == "f"
    agreement = experiments.goes_on(start.number, -array) if array is not None and floating else None
    if agreement is not None:
        yield _Shown("ours has the other sign", start.number, start.number, agreement)


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
    if other.copies(number) and computed:
        return other.site(computed[0])
    while other.copies(number) and (after := other.readers(number)):
        number = after[0]
    return other.site(number)


def _does(start: Start, partner: Start | None, row: Value, read: int) -> str:
    """What an operation does to one of the values that it reads: `adds 1e-05`."""
    name = row.operation.split(".")[-1].rstrip("_")
    sizes = sizes_around(start, *([partner] if partner else []))
    with_what = [_told(start.values, k, row, sizes) for k in row.inputs if k != read]
    with_what += [called(x, sizes) for x in row.literals]
    if name in _VERBS and len(with_what) == 1:
        return f"{_VERBS[name]} {with_what[0]}"
    return f"applies {name}{' with ' * bool(with_what)}{', '.join(with_what[:2])}"


def _told(values: Values, number: int, by: Value | None = None, sizes: Collection[int] = ()) -> str:
    """A value as an operand is called: a weight by its name, a number by itself, else by the line that computes it; on
    the line of what it is read `by`, by its operation and the weights in it."""
    row, leaf = values.rows[number], values.leaf(number)
    if leaf is not None:
        return "input " * (values.rows[leaf].kind == "input") + values.rows[leaf].name
    if not row.data and math.prod(row.shape) == 1:
        array = values.array(number)
        return f"{row.largest:g}" if array is None else called(float(array.reshape(())), sizes)
    site = values.site(number)
    if site.file and not (by and by.place[:2] == row.place[:2]):
        return f"`{site.source}` ({short(site.file)}:{site.line})"
    names = [name for k in row.inputs if (name := values.parameter(k))]
    return f"the result of {site.operation}{' with ' * bool(names)}{', '.join(names)}"
