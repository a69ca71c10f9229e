"""Names what kind of difference it is, from the numbers of the values around the place where two sides part.

Each finder looks for one kind and says a sentence only where the numbers prove it; else it says nothing.
"""

import math
import re
from collections.abc import Collection, Sequence
from itertools import product

import numpy as np

from parity.differ.activations import activation, meet_the_same
from parity.differ.alignment import REACH, Start, shared
from parity.differ.element_order import in_our_layout
from parity.differ.fingerprints import BAR, fingerprint, finite
from parity.differ.substitution import Experiments
from parity.differ.values import Value, Values

_MOST = 1 << 14
"""Numbers that a factor may be the root of are smaller."""


def kind(ours: Start, theirs: Start) -> str | None:
    """One sentence about the difference; None where nothing is proven."""
    finders = (
        _lowered,
        _constants_added,
        activation,
        _missing_term,
        _factor,
        _multiplied,
        _mask,
        _offset,
        _zero_rows,
        _literals,
    )
    return next((said for finder in finders if (said := finder(ours, theirs)) is not None), None)


def _both_ways(ours: Start, theirs: Start) -> tuple[tuple[Start, Start], tuple[Start, Start]]:
    """For what either side may do alone."""
    return (ours, theirs), (theirs, ours)


def _lowered(ours: Start, theirs: Start) -> str | None:
    """A type with fewer digits on one side."""
    for side in (ours, theirs):
        before = [row.dtype for row in map(side.values.rows.__getitem__, side.row.inputs) if row.data]
        narrow = re.search(r"(float32|bfloat16|float16)", side.row.dtype)
        if narrow and before and all("64" in dtype for dtype in before):
            return f"{side.values.side} lowers the type here: {before[0].removeprefix('torch.')} to {narrow[0]}"
    return None


def _constants_added(ours: Start, theirs: Start) -> str | None:
    """The same sum with another constant: an eps."""
    for i, j in product(ours.near, theirs.near):
        mine, their = ours.values.rows[i], theirs.values.rows[j]
        if not (_is(mine, "add") and _is(their, "add")):
            continue
        here, there = _added(ours.values, mine), _added(theirs.values, their)
        if len(here) == len(there) == 1 and here != there and ours.values.equals(mine.inputs) & set(their.inputs):
            return f"another constant is added: {here[0]:.6g} in ours, {there[0]:.6g} in theirs"
    return None


def _added(values: Values, row: Value) -> list[float]:
    """The constants that an addition adds: literals, or values of one number."""
    before = map(values.rows.__getitem__, row.inputs)
    numbers = [value.largest for value in before if not value.data and math.prod(value.shape) == 1]
    return [x for x in (*row.literals, *numbers) if x]


def _is(row: Value, *names: str) -> bool:
    return bool(re.fullmatch(rf"(aten\.|prims\.)?({'|'.join(names)})_?(_any)?", row.operation))


def _mask(ours: Start, theirs: Start) -> str | None:
    """Who sees whom: places that one side masks and the other does not."""
    here, there = (_first_masked(side, side.near[:4]) for side in (ours, theirs))
    if here is None and there is None:
        return None
    here = _first_masked(ours, ours.near) if here is None else here
    there = _first_masked(theirs, theirs.near) if there is None else there
    if here is None or there is None:
        # Where what both read is masked already, the largest of a masked row is no mask of its own.
        if any(_first_masked(ours, [i]) is not None for i in ours.agreed):
            return None
        # Of a side that was recorded, the larger arrays are not there.
        if any(side.values.again is None and not side.values.arrays.keys() >= {*side.near} for side in (ours, theirs)):
            return None
        name, other = ("theirs", "ours") if here is None else ("ours", "theirs")
        return f"only {name} masks here, {other} does not"
    moved = in_our_layout(here.astype(float), there.astype(float))
    if moved is None:
        return None
    differing = (moved > 0.5) ^ here
    if not differing.any():
        return None
    place = tuple(int(k) for k in np.argwhere(differing)[0])
    only = "ours" if here[place] else "theirs"
    return (
        f"the mask differs at {int(differing.sum())} of {differing.size} places: only {only} masks key {place[-1]} "
        f"from query {place[-2]}, for example"
    )


def _first_masked(side: Start, near: Sequence[int]) -> np.ndarray | None:
    """Which places the first value with a mask's "minus infinity" masks; the value is the start, or soon after it."""
    for i in near:
        array = side.values.array(i) if len(side.values.rows[i].shape) >= 2 else None
        if array is None:
            continue
        with np.errstate(invalid="ignore"):
            closed: np.ndarray = ~(array > -1e30)
        if closed.any():
            return closed
    return None


def _goes_on_without(ours: Values, theirs: Values, number: int, factor: float) -> bool:
    """Whether ours computes a value of theirs that it did not, if a factor is taken out: of two values that are
    multiplied, each side may scale another one."""
    array = ours.array(number)
    with np.errstate(over="ignore"):
        return array is None or Experiments(ours, theirs).reached(number, array / factor) is not None


def _factor(ours: Start, theirs: Start) -> str | None:
    """Ours is theirs times one number."""
    index = theirs.values.index(theirs.near)
    found: list[float] = []
    begins = False
    for i in ours.near:
        row = ours.values.rows[i]
        if row.features is not None and math.prod(row.shape) >= 16:
            # The last of theirs: either side may scale in several steps.
            for j, factor in index.multiples(row.features, theirs.near)[-1:]:
                found.append(factor)
                last = i
                begins |= i == ours.number or j == theirs.number
    if not begins or abs(found[-1] - 1) <= BAR:
        return None
    values, forward = ours.values, not ours.row.backward
    if forward and values.readers(last) and not _goes_on_without(values, theirs.values, last, found[-1]):
        return None
    # On the way back one such pair may be chance, as where one side writes a square and the other a product.
    # So may a sign be, as where one side writes x - y and the other y - x.
    alike = sum(math.isclose(factor, found[-1], rel_tol=1e-9) for factor in found)
    chance = ours.row.backward or abs(found[-1] + 1) <= BAR
    return f"ours is {_called(found[-1], _sizes(ours, theirs))} times theirs" if alike >= 3 or not chance else None


def _multiplied(ours: Start, theirs: Start) -> str | None:
    """One side multiplies by a number, and the other goes on with the value itself."""
    for start, other in () if ours.row.backward else _both_ways(ours, theirs):
        values, row = start.values, start.row
        data = [i for i in row.inputs if values.rows[i].data]
        # A difference from zero has the same numbers as a product with -1, and is none.
        if not _is(row, "mul", "div", "neg") or len(data) != 1 or row.features is None or math.prod(row.shape) < 4:
            continue
        once = values.index(data).multiples(row.features, data)
        if not once or abs(once[0][1] - 1) <= BAR:
            continue
        # What it is added to or multiplied with next is the same on both sides.
        for m in values.equals(data).intersection(other.agreed):
            pair = (start.number, m) if start is ours else (m, start.number)
            if data[0] in start.agreed and meet_the_same(ours.values, pair[0], theirs.values, pair[1]):
                called = _called(once[0][1], _sizes(ours, theirs))
                return f"{values.side} multiplies by {called} here, {other.values.side} does not"
    return None


def _called(factor: float, sizes: Collection[int] = ()) -> str:
    """A number, and what it may be: a root, a quotient, a keep rate.

    `sizes` are those of the axes around: 8 may be the root of a width of 64, where there is such a width.
    """
    size, shown, sign = abs(factor), f"{factor:.6g}", "-" if factor < 0 else ""
    large, inverse = max(size, 1 / size), "" if size > 1 else "1/"
    whole, square = round(min(large, _MOST)), round(min(large, _MOST) ** 2)
    if 1 < whole < _MOST and math.isclose(large, whole, rel_tol=1e-9) and whole**2 not in sizes:
        # A number that can be written out says as much as the quotient.
        return shown if math.isclose(float(shown), factor, rel_tol=1e-12) else f"{shown} ({sign}1/{whole})"
    if 1 < square < _MOST and math.isclose(large, math.sqrt(square), rel_tol=1e-9):
        if math.isqrt(square) ** 2 != square:
            return f"{shown} ({sign}{inverse}sqrt({square}))"
        if square in sizes:
            return f"{shown} ({sign}{inverse}sqrt({square})?)"
    for hundredth in range(1, 100):
        keep = 1 - hundredth / 100
        if math.isclose(size, 1 / keep, rel_tol=1e-9):
            return f"{factor:.6g} (1/{keep:g}: a dropout of {hundredth / 100:g} that is not off?)"
        if math.isclose(size, keep, rel_tol=1e-9):
            return f"{factor:.6g} (a dropout of {hundredth / 100:g}?)"
    return f"{factor:.9g}"


def _sizes(*sides: Start) -> set[int]:
    """Of the axes around."""
    return {size for side in sides for i in (*side.agreed, *side.near) for size in side.values.rows[i].shape}


def _missing_term(ours: Start, theirs: Start) -> str | None:
    """One side adds something, and the other goes on without it."""
    for start, other in _both_ways(ours, theirs):
        adder, rows = start.values, other.values.rows
        if not _is(start.row, "add", "sub") or len(start.agreed) != 2:
            continue
        for term, rest in (start.agreed, start.agreed[::-1]):
            goes_on = adder.equals([rest]).intersection(other.agreed)
            leaf = adder.leaf(term)
            held = adder.equals([term] if leaf is None else [term, leaf])
            later = [rows[k] for k in other.agreed if k not in goes_on] + rows[other.number : other.number + REACH]
            adds_another = _is(other.row, "add") and len(other.agreed) > 1
            if not goes_on or adds_another or any(held & set(row.inputs) for row in later):
                continue
            site = adder.site(term if leaf is None else leaf)
            if leaf is not None or site.file:
                kind = "the result of " if leaf is None else "input " if site.operation == "input" else ""
                what = kind + (str(site) if leaf is None else site.source)
                return f"{adder.side} adds {what}, {other.values.side} goes on without it"
    return None


def _offset(ours: Start, theirs: Start) -> str | None:
    """Ours is theirs plus one number, or plus a weight."""
    here, there = ours.values.array(ours.number), theirs.values.array(theirs.number)
    if here is None or there is None or here.size != there.size or here.size < 8:
        return None
    moved = in_our_layout(here, there)
    if moved is None:
        return None
    difference = finite(here) - finite(moved)
    scale = float(np.abs(finite(here)).max()) + 1e-300
    if float(np.ptp(difference)) < BAR * scale and abs(float(difference.mean())) > BAR * scale:
        return f"ours is theirs plus {float(difference.mean()):.9g} everywhere"
    for axis in range(here.ndim):
        rows = np.moveaxis(difference, axis, -1).reshape(-1, here.shape[axis])
        if here.shape[axis] < 4 or len(rows) < 2 or float(np.ptp(rows, axis=0).max()) > BAR * scale:
            continue
        for sign, said in ((1, "ours adds"), (-1, "theirs adds")):
            features, _ = fingerprint(sign * rows[0], depends_on_data=True)
            for values in (ours.values, theirs.values):
                for k in values.index().equals(features) if features is not None else ():
                    if (leaf := values.leaf(k)) is not None:
                        return f"{said} {values.rows[leaf].name} here, the other side does not"
        return f"ours and theirs differ by one vector along axis {axis}, the same everywhere: a bias?"
    return None


def _zero_rows(ours: Start, theirs: Start) -> str | None:
    """Rows that are zero on one side only."""
    here, there = ours.values.array(ours.number), theirs.values.array(theirs.number)
    if here is None or there is None or here.shape != there.shape or here.ndim < 2:
        return None
    axes = tuple(range(1, here.ndim))
    empty = (finite(here) == 0).all(axes)
    alone = empty ^ (finite(there) == 0).all(axes)
    if not alone.any() or not np.allclose(here[~alone], there[~alone], rtol=1e-8, atol=0):
        return None
    row = int(np.flatnonzero(alone)[0])
    return f"row {row} is zero in {'ours' if empty[row] else 'theirs'} only, all else agrees"


def _literals(ours: Start, theirs: Start) -> str | None:
    """The same operation on the same values, with another number that stands in the program."""
    here, there = ([x for x in side.row.literals if abs(x) < 1e30] for side in (ours, theirs))
    names = {re.sub(r"^(aten|prims)\.|_$", "", side.row.operation) for side in (ours, theirs)}
    if len(here) == len(there) == 1 and here != there and len(names) == 1 and shared(ours, theirs):
        return f"another number stands in the program: {here[0]:.6g} in ours, {there[0]:.6g} in theirs"
    return None
