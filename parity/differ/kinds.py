"""Names what kind of difference it is, from the numbers of the values around the place where two sides part.

Each finder looks for one kind and says a sentence only where the numbers prove it; else it says nothing.
"""

import math
import re
from collections.abc import Collection, Sequence

import numpy as np

from parity.differ.activations import activation, meet_the_same
from parity.differ.divergence import REACH, Divergence, among
from parity.differ.element_order import in_our_layout
from parity.differ.fingerprints import BAR, fingerprint, finite
from parity.differ.values import Values


def kind(at: Divergence) -> str | None:
    """One sentence about the difference; None where nothing is proven."""
    for finder in (
        _lowered,
        _constants_added,
        activation,
        _missing_term,
        _factor,
        _mask,
        _offset,
        _zero_rows,
        _literals,
    ):
        if (said := finder(at)) is not None:
            return said
    return None


def _lowered(at: Divergence) -> str | None:
    """A type with fewer digits on one side."""
    for values, near, side in ((at.ours, at.ours_near, "ours"), (at.theirs, at.theirs_near, "theirs")):
        start = values.rows[near[0]]
        before = [values.rows[i].dtype for i in start.inputs if values.rows[i].data]
        narrow = re.search(r"(float32|bfloat16|float16)", start.dtype)
        if narrow and before and all("64" in dtype for dtype in before):
            return f"{side} lowers the type here: {_dtype(before[0])} to {narrow[0]}"
    return None


def _dtype(name: str) -> str:
    return name.removeprefix("torch.")


def _constants_added(at: Divergence) -> str | None:
    """The same sum with another constant: an eps."""
    for i in at.ours_near:
        for j in at.theirs_near:
            ours, theirs = at.ours.rows[i], at.theirs.rows[j]
            if not (_is(ours.operation, "add") and _is(theirs.operation, "add")):
                continue
            here, there = _added(at.ours, i), _added(at.theirs, j)
            same = [k for k in ours.inputs if set(at.equal.ours.get(k, ())) & set(theirs.inputs)]
            if len(here) == len(there) == 1 and here != there and same:
                return f"another constant is added: {here[0]:.6g} in ours, {there[0]:.6g} in theirs"
    return None


def _added(values: Values, number: int) -> list[float]:
    """The constants that an addition adds: literals, or values of one number."""
    row = values.rows[number]
    found = [x for x in row.literals if x]
    for k in row.inputs:
        before = values.rows[k]
        if not before.data and before.largest and math.prod(before.shape) == 1:
            found.append(before.largest)
    return found


def _is(operation: str, name: str) -> bool:
    return bool(re.fullmatch(rf"(aten\.|prims\.)?{name}_?(_any)?", operation))


def _mask(at: Divergence) -> str | None:
    """Who sees whom: places that one side masks and the other does not."""
    here = _first_masked(at, at.ours, at.ours_near[:4])
    there = _first_masked(at, at.theirs, at.theirs_near[:4])
    here = _first_masked(at, at.ours, at.ours_near) if here is None and there is not None else here
    there = _first_masked(at, at.theirs, at.theirs_near) if there is None and here is not None else there
    if here is None and there is None:
        return None
    if here is None or there is None:
        # Where what both read is masked already, the largest of a masked row is no mask of its own.
        if any(_first_masked(at, at.ours, [i]) is not None for i in at.here.agreed):
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


def _first_masked(at: Divergence, values: Values, near: Sequence[int]) -> np.ndarray | None:
    """Which places the first value with a mask's "minus infinity" masks; the value is the start, or soon after it."""
    for i in near:
        array = at.array(values, i) if len(values.rows[i].shape) >= 2 else None
        if array is None:
            continue
        with np.errstate(invalid="ignore"):
            closed: np.ndarray = ~(array > -1e30)
        if closed.any():
            return closed
    return None


def _factor(at: Divergence) -> str | None:
    """Ours is theirs times one number."""
    index = among(at.theirs, at.theirs_near)
    backward = at.ours.rows[at.here.number].backward
    found: list[float] = []
    starts = False
    for i in at.ours_near:
        row = at.ours.rows[i]
        if row.features is not None and math.prod(row.shape) >= 16:
            # The last of theirs: either side may scale in several steps.
            for j, factor in index.multiples(row.features, at.theirs_near)[-1:]:
                found.append(factor)
                starts |= i == at.here.number or j == at.there.number
    if found and starts and abs(found[-1] - 1) > BAR:
        # On the way back one such pair may be chance, as where one side writes a square and the other a product.
        # So may a sign be, as where one side writes x - y and the other y - x.
        alike = sum(math.isclose(factor, found[-1], rel_tol=1e-9) for factor in found)
        chance = backward or abs(found[-1] + 1) <= BAR
        if alike >= 3 or not chance:
            return f"ours is {_called(found[-1], _sizes(at))} times theirs"
    if backward:
        return None
    for values, start, name, without in (
        (at.ours, at.here, "ours", "theirs"),
        (at.theirs, at.there, "theirs", "ours"),
    ):
        row = values.rows[start.number]
        data = [i for i in row.inputs if values.rows[i].data]
        # A difference from zero has the same numbers as a product with -1, and is none.
        multiplies = any(_is(row.operation, name) for name in ("mul", "div", "neg"))
        if not multiplies or len(data) != 1 or row.features is None or math.prod(row.shape) < 4:
            continue
        # The other side goes on with the value itself: what it is added to or multiplied with next is the same.
        pairs = [(i, j) for i, j in at.shared if data[0] == (i if values is at.ours else j)]
        on = [(start.number, j) if values is at.ours else (i, start.number) for i, j in pairs]
        once = among(values, data).multiples(row.features, data)
        if once and abs(once[0][1] - 1) > BAR and any(meet_the_same(at, k, m) for k, m in on):
            return f"{name} multiplies by {_called(once[0][1], _sizes(at))} here, {without} does not"
    return None


def _called(factor: float, sizes: Collection[int] = ()) -> str:
    """A number, and what it may be: a root, a quotient, a keep rate.

    `sizes` are those of the axes around: 8 may be the root of a width of 64, where there is such a width.
    """
    size, shown, sign = abs(factor), f"{factor:.6g}", "-" if factor < 0 else ""
    for n in range(2, 1 << 14):
        for value, name in ((math.sqrt(n), f"sqrt({n})"), (1 / math.sqrt(n), f"1/sqrt({n})")):
            if not math.isclose(size, value, rel_tol=1e-9):
                continue
            if math.isqrt(n) ** 2 != n:
                return f"{shown} ({sign}{name})"
            if n in sizes:
                return f"{shown} ({sign}{name}?)"
            break
        if any(math.isclose(size, value, rel_tol=1e-9) for value in (n, 1 / n)) and n * n not in sizes:
            # A number that can be written out says as much as the quotient.
            return shown if math.isclose(float(shown), factor, rel_tol=1e-12) else f"{shown} ({sign}1/{n})"
    for hundredth in range(1, 100):
        keep = 1 - hundredth / 100
        if math.isclose(size, 1 / keep, rel_tol=1e-9):
            return f"{factor:.6g} (1/{keep:g}: a dropout of {hundredth / 100:g} that is not off?)"
        if math.isclose(size, keep, rel_tol=1e-9):
            return f"{factor:.6g} (a dropout of {hundredth / 100:g}?)"
    return f"{factor:.9g}"


def _sizes(at: Divergence) -> set[int]:
    """Of the axes around."""
    here, there = (*at.here.agreed, *at.ours_near), (*at.there.agreed, *at.theirs_near)
    return {size for side, near in ((at.ours, here), (at.theirs, there)) for i in near for size in side.rows[i].shape}


def _missing_term(at: Divergence) -> str | None:
    """One side adds something, and the other goes on without it."""
    sides = (
        (at.ours, at.here, at.theirs, at.there, at.equal.ours, "ours", "theirs"),
        (at.theirs, at.there, at.ours, at.here, at.equal.theirs, "theirs", "ours"),
    )
    for adder, start, other, there, equal, name, without in sides:
        row = adder.rows[start.number]
        if not (_is(row.operation, "add") or _is(row.operation, "sub")) or len(start.agreed) != 2:
            continue
        for term, rest in (start.agreed, start.agreed[::-1]):
            goes_on = set(equal.get(rest, ())) & set(there.agreed)
            leaf = adder.leaf(term)
            held = set(equal.get(term, ())) | (set(equal.get(leaf, ())) if leaf is not None else set())
            adds_another = _is(other.rows[there.number].operation, "add") and len(there.agreed) > 1
            used = adds_another or any(
                held & set(later.inputs)
                for later in [
                    *(other.rows[k] for k in there.agreed if k not in goes_on),
                    *other.rows[there.number : there.number + REACH],
                ]
            )
            if goes_on and not used:
                site = adder.site(term if leaf is None else leaf)
                if leaf is None and not site.file:
                    continue
                what = (
                    f"the result of {site}" if leaf is None else ("input " * (site.operation == "input") + site.source)
                )
                return f"{name} adds {what}, {without} goes on without it"
    return None


def _offset(at: Divergence) -> str | None:
    """Ours is theirs plus one number, or plus a weight."""
    i, j = at.here.number, at.there.number
    here, there = at.array(at.ours, i), at.array(at.theirs, j)
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
            for values in (at.ours, at.theirs):
                for k in values.index().equals(features) if features is not None else ():
                    if (leaf := values.leaf(k)) is not None:
                        return f"{said} {values.rows[leaf].name} here, the other side does not"
        return f"ours and theirs differ by one vector along axis {axis}, the same everywhere: a bias?"
    return None


def _zero_rows(at: Divergence) -> str | None:
    """Rows that are zero on one side only."""
    here, there = at.array(at.ours, at.here.number), at.array(at.theirs, at.there.number)
    if here is None or there is None or here.shape != there.shape or here.ndim < 2:
        return None
    axes = tuple(range(1, here.ndim))
    ours, theirs = (finite(here) == 0).all(axes), (finite(there) == 0).all(axes)
    if not (ours ^ theirs).any() or not np.allclose(here[~(ours ^ theirs)], there[~(ours ^ theirs)], rtol=1e-8, atol=0):
        return None
    row = int(np.flatnonzero(ours ^ theirs)[0])
    return f"row {row} is zero in {'ours' if ours[row] else 'theirs'} only, all else agrees"


def _literals(at: Divergence) -> str | None:
    """The same operation on the same values, with another number that stands in the program."""
    ours, theirs = at.ours.rows[at.here.number], at.theirs.rows[at.there.number]
    here, there = _plain(ours.literals), _plain(theirs.literals)
    if (
        len(here) == len(there) == 1
        and here != there
        and at.shared
        and _base(ours.operation) == _base(theirs.operation)
    ):
        return f"another number stands in the program: {here[0]:.6g} in ours, {there[0]:.6g} in theirs"
    return None


def _plain(literals: Sequence[float]) -> list[float]:
    return sorted(x for x in literals if math.isfinite(x) and abs(x) < 1e30)


def _base(operation: str) -> str:
    return re.sub(r"^(aten|prims)\.|_$", "", operation)
