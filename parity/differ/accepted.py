"""Differences that somebody accepts, or float32 explains: a side goes on with the numbers of the other from there."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import numpy as np

from parity.differ.alignment import Start, match
from parity.differ.answer import Difference
from parity.differ.element_order import distance, with_axes_as, without_copies
from parity.differ.values import Site, Values, short
from parity.gates.measure import FLOAT64_BAR

_FLOAT32 = 2.0**-24
_FLOATING = "torch.float64", "torch.float32"
_LARGEST = 1e30
"""The numbers of masks are larger."""
_TRIED = 16
"""Pairs of values, at most, at which the two sides may come together again."""
_KINDS = {"epsilon": "another constant is added"}
"""What a kind is called elsewhere."""


@dataclass
class Accepted:
    """What is passed: places and kinds, and differences up to a bar; and what was."""

    ignore: Sequence[str] = ()
    bar: float = FLOAT64_BAR
    put: dict[int, np.ndarray] = field(default_factory=dict)
    """Values of theirs -> the numbers of ours that stand for them."""
    digits: dict[float, float] = field(default_factory=dict)
    """Sizes of numbers that a side holds in float32 -> those of the other side that stand for them."""
    passed: dict[str, str] = field(default_factory=dict)
    """Line of ours -> what is said of it. The derivatives of such lines differ, too."""
    starts: tuple[Start | None, Start | None] = None, None
    """What the answer is about."""
    sides: tuple[Values, Values] | None = None
    """The runs that it was found in."""
    rounded: list[Site] = field(default_factory=list)
    """Constants whose digits `takes_digits` took from the other side."""
    error: tuple[str, float] = "", 0.0
    """The stage that is searched, and its largest error."""
    before: tuple[tuple[str, float], dict[int, np.ndarray], dict[float, float], list[Site]] | None = None
    """This error, and what was taken, before `takes_digits` took more."""
    withdrawn: bool = False
    """Whether it was given back, as with it more differed."""
    names: Mapping[str, Collection[str]] | None = None
    """Output -> what its errors are called: a gradient of ours, by the weights of theirs."""
    postpones: Callable[[], bool] = lambda: False
    """Whether both sides run in another way before a difference is explained."""

    def takes_digits(self) -> bool:
        """Whether some constants, like a table of frequencies, differ as float32 rounds, and no more: whichever side
        has fewer digits, theirs goes on with ours, or ours with a number that stands in the program of theirs."""
        assert self.sides is not None
        ours, theirs = self.sides
        if self.before and self.before[0][0] == self.error[0] and 2 * self.before[0][1] < self.error[1]:
            # They are the digits of another table.
            _, self.put, self.digits, self.rounded = self.before
            self.withdrawn = True
            self.before = None
            return True
        if self.withdrawn:
            return False
        constants = [i for i in ours.live() if not ours.rows[i].data]
        index, near = ours.index(set(constants)), dict[int, list[int]]()
        numbers = {abs(x) for i in ours.live() for x in ours.rows[i].literals}
        numbers |= {ours.rows[i].largest for i in constants if math.prod(ours.rows[i].shape) == 1}
        written = self._written(theirs, numbers)
        numbers |= {1 / x for x in numbers if x}
        found = {}
        for j in sorted(theirs.live() - self.put.keys()):
            row = theirs.rows[j]
            # A table of two numbers has an equal wherever the rarer one occurs as often.
            known = j in theirs.equal and (row.data or row.kind == "operation")
            if (row.data and row.kind != "parameter") or known or row.dtype not in _FLOATING:
                continue
            if row.features is not None or math.prod(row.shape) == 1:
                near[j] = [] if row.features is None else index.equals(row.features, 1e-4)
        theirs.want(near)
        ours.want(i for numbers in near.values() for i in numbers)
        for j in sorted(near):
            there, arrays = theirs.arrays[j], [ours.arrays[i] for i in near[j]]
            once = without_copies(there)
            moved = [x for array in arrays for x in with_axes_as(once, _as_often(without_copies(array), once))]
            if moved and _rounds_alike(x := min(moved, key=partial(distance, once)), once):
                found[j] = np.broadcast_to(x, there.shape).copy()
            elif (full := _with_digits(there, numbers)) is not None and not _is_converted(theirs, j):
                found[j] = full
        digits = self._digits(ours, theirs, constants)
        taken = self.error, {**self.put}, {**self.digits}, [*self.rounded]
        self.before = taken if found or digits or written else None
        self.put |= found
        self.digits |= {ours.rows[i].largest: x for i, x in digits.items()}
        self.digits |= {size: x for _, size, x in written}
        self.rounded += [theirs.site(j) for j in (*found, *(j for j, _, _ in written))] + [ours.made(i) for i in digits]
        return bool(self.before)

    def _written(self, theirs: Values, numbers: Collection[float]) -> list[tuple[int, float, float]]:
        """(value, size, that of ours) of the numbers in the program of theirs that are float32's for one of ours."""
        full = {y: float(np.float32(y)) for y in numbers if y < _LARGEST and not _is_rounded(y) and y != np.rint(y)}
        sizes = {abs(x): j for j in theirs.live() for x in theirs.rows[j].literals}
        found = ((j, x, [y for y in full if full[y] == x]) for x, j in sizes.items() if x not in self.digits)
        return [(j, x, ours[0]) for j, x, ours in found if len(ours) == 1]

    def _digits(self, ours: Values, theirs: Values, constants: Sequence[int]) -> dict[int, float]:
        """Numbers that ours converts from float32, and what stands for each in the program of theirs: it, its half, its
        double or its inverse."""
        written = {abs(x) for j in theirs.live() for x in theirs.rows[j].literals if x}
        written |= {y for x in written for y in (2 * x, x / 2, 1 / x)}
        found: dict[int, float] = {}
        for i in constants:
            row = ours.rows[i]
            if row.operation != "convert_element_type" or math.prod(row.shape) != 1 or row.largest in self.digits:
                continue
            if _is_rounded(row.largest):
                full = [y for y in written if _rounds_alike(np.asarray(y), np.asarray(row.largest))]
                found |= {i: full[0]} if full else {}
        return found

    def passes(self, found: Difference, theirs: Callable[[bool], Values]) -> bool:
        """Whether an answer is ignored, and numbers were found to `put`, with which the two sides come together behind
        it; `theirs` runs that side with them, and backward if it is told so."""
        told = [*(_told(site) for site in (found.ours, found.theirs) if site), found.kind or ""]
        items = [*self.ignore, *(self.passed if found.stage == "backward" else ())]
        item = next((item for item in items if any(_is(item, said) for said in told)), None)
        first, second = self.starts
        if item is None or first is None or second is None:
            return False
        line = told[0].split()[0]
        for i, j, array in _near(item, first, second)[:_TRIED]:
            if j not in self.put:
                self.put[j] = array
                ours = replace(first.values, equal={})
                match(ours, theirs(found.stage == "backward"))
                # Something that follows from the value has an equal again; or nothing follows.
                behind = [k for n in Start(ours, i, (), ()).near for k in ours.readers(n)]
                if not behind or not ours.equal.keys().isdisjoint(behind):
                    self.passed.setdefault(line, f"{line} ({item})")
                    self.before = None
                    return True
                del self.put[j]
        self.passed[line] = f"{line} ({item}), behind which the two sides do not come together: the search ends here"
        return False


def _as_often(array: np.ndarray, other: np.ndarray) -> np.ndarray:
    """An array as often along its last axis as another one holds it, as the angles of both halves of a head."""
    times, rest = divmod(other.size, max(array.size, 1))
    return array if rest or times < 2 or not array.ndim else np.tile(array, times)


def _with_digits(array: np.ndarray, numbers: Collection[float]) -> np.ndarray | None:
    """An array that holds one to four numbers, with the digits of those that they are, but for float32's rounding."""
    full = np.array(array, np.float64)
    sizes = np.unique(np.abs(full))
    for size in sizes if sizes.size <= 4 else ():
        equal = [x for x in numbers if _rounds_alike(np.asarray(x), size)]
        if equal and size not in numbers:
            there = np.abs(full) == size
            full[there] = np.copysign(equal[0], full[there])
    return None if np.array_equal(full, array, equal_nan=True) else full


def _is_converted(values: Values, number: int) -> bool:
    """Whether a program converts what it makes of a constant; given more digits it would not, and all is renumbered."""
    made = [k for k in values.readers(number) if not values.rows[k].data]
    return any(values.rows[k].operation == "aten._to_copy" or _is_converted(values, k) for k in made)


def _is_rounded(number: float) -> bool:
    """Whether it is no whole number, and one that float32 has."""
    return abs(number) < _LARGEST and float(np.float32(number)) == number != np.rint(number)


def _rounds_alike(here: np.ndarray, there: np.ndarray) -> bool:
    """Whether numbers are as far apart as float32 rounds a few times, and not only as float64 does; in a table, what is
    rounded is a frequency that counts as often as there are places; what is held in float32 may be small beside what
    was rounded, as at the ends of a window. The "minus infinity" of a mask is never rounded."""
    largest = float(np.abs(there).max())
    if not largest < _LARGEST:
        return False
    apart = np.abs(here - there)
    table = max(there.shape) * largest if there.squeeze().ndim > 1 else 0.0
    # In such a table rounding shows in most numbers, and by about as much.
    if there.size > 1 and np.array_equal(there.astype(np.float32), there) and apart.max() < 16 * np.median(apart):
        table = np.maximum(table, 4 * largest * (np.abs(there) > 1e-6 * largest))
    return bool(apart.max() > 1e-12 * largest and (apart <= _FLOAT32 * np.maximum(4 * np.abs(there), table)).all())


def _told(site: Site) -> str:
    return f"{short(site.file)}:{site.line} {site.way}"


def _is(item: str, told: str) -> bool:
    """Whether an item is the line of a place (`file.py:12`), a function around it, its layer, its module, or a kind."""
    return bool(re.search(rf"(?<![\w.]){re.escape(_KINDS.get(item, item))}(?!\w)", told))


def _near(item: str, first: Start, second: Start) -> list[tuple[int, int, np.ndarray]]:
    """(value of ours, value of theirs, the numbers of ours in the axes of theirs) that may be the result of what is
    ignored: first those within it, or on its line, and of these those that are near each other."""
    sides = []
    for start in (first, second):
        values, place = start.values, start.row.place
        values.want(start.near)
        sides.append({n: values.rows[n].place == place or _is(item, _told(values.site(n))) for n in start.near})
    found = []
    for i, j in product(*sides):
        here, there = first.values.array(i), second.values.array(j)
        within = sides[0][i] + sides[1][j]
        if within and here is not None and there is not None and not second.values.copies(j):
            for x in with_axes_as(there, here):
                found.append((-within, bool(np.linalg.norm(x - there) > np.linalg.norm(there) / 2), i, j, x))
    return [each[2:] for each in sorted(found, key=lambda each: each[:4])]
