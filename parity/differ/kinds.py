"""Names what kind of difference it is, from the numbers of the values around the place where two sides part.

Each finder looks for one kind and says a sentence where the numbers show it. Two of them prove less, and are confirmed.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product

import numpy as np

from parity.differ.activations import activation
from parity.differ.alignment import Start, shared, sizes_around
from parity.differ.answer import called
from parity.differ.confirmation import Change, Mended, mended, most_mended
from parity.differ.element_order import in_our_layout, layouts
from parity.differ.fingerprints import BAR, finite, times
from parity.differ.values import Values

_SMALL = -9e3
"""What is smaller may stand for the "minus infinity" of a mask."""
_ORDERS = 8
"""Orders of axes, at most, in which theirs is put in the place of ours."""


def kind(ours: Start, theirs: Start) -> tuple[str | None, bool]:
    """One sentence about the difference, and whether the numbers prove it alone; None where there is none."""
    finders = (
        _lowered,
        _constants_added,
        activation,
        _other_choice,
        _factor,
        _zeros_for_mask,
        _mask_of_one,
        _mask,
        _zero_rows,
        _literals,
    )
    for finder in finders:
        if (said := finder(ours, theirs)) is not None:
            return said, finder is not _literals
    return None, False


def _lowered(ours: Start, theirs: Start) -> str | None:
    """A type with fewer digits on one side."""
    for side in (ours, theirs):
        before = [row.dtype for row in map(side.values.rows.__getitem__, side.row.inputs) if row.data]
        narrow = re.search(r"(float32|bfloat16|float16)", side.row.dtype)
        if narrow and before and all("64" in dtype for dtype in before):
            return f"{side.values.side} lowers the type here: {before[0].removeprefix('torch.')} to {narrow[0]}"
    return None


def _constants_added(ours: Start, theirs: Start) -> str | None:
    """The same sum with another constant: an eps, which may be too small on one side to change a number there."""
    for start, partner in ((ours, theirs), (theirs, ours)):
        values, other = start.values, partner.values
        for i in start.near:
            same = values.equals(values.rows[i].inputs)
            for j in (j for k in same for j in other.used(k) if j in partner.near or j in same):
                constants = {values.side: _added(values, i), other.side: _added(other, j)}
                here, there = constants["ours"], constants["theirs"]
                done_too = any(_added(values, k) for k in other.equal.get(j, ()))
                if len(here) == len(there) == 1 and here != there and not done_too:
                    return f"another constant is added: {_apart(here[0], there[0])}"
    return None


def _apart(here: float, there: float) -> str:
    """Two numbers, in as many digits as tell one from the other."""
    digits = next((n for n in (6, 9, 12) if f"{here:.{n}g}" != f"{there:.{n}g}"), 17)
    return f"{here:.{digits}g} in ours, {there:.{digits}g} in theirs"


def _added(values: Values, number: int) -> list[float]:
    """The constants that an addition adds: literals, or values of one number; of another operation none."""
    row = values.rows[number]
    if not re.fullmatch(r"(aten\.|prims\.)?add_?(_any)?", row.operation):
        return []
    before = map(values.rows.__getitem__, row.inputs)
    numbers = [value.largest for value in before if not value.data and math.prod(value.shape) == 1]
    return [x for x in (*row.literals, *numbers) if x]


def _other_choice(ours: Start, theirs: Start) -> str | None:
    """Both take each number from one of the same two arrays, and so by other masks."""
    if not all(re.search("where|select_n", side.row.operation) for side in (ours, theirs)):
        return None
    rows = ours.values.rows
    pairs = [(i, j) for i, j in shared(ours, theirs) if rows[i].data and not rows[i].dtype.endswith("bool")]
    # Two of each side, and each of them is one of the other's.
    alone = len(pairs) == len(dict(pairs)) == len({j for _, j in pairs}) == 2
    return "both choose between the same two arrays here, by other masks" if alone else None


def _zeros_for_mask(ours: Start, theirs: Start) -> str | None:
    """Zeros where the other side masks, which have one fingerprint."""
    for i, j in shared(ours, theirs):
        # What is computed of masked numbers is no mask.
        masked = all(map(_may_be_masked, (ours.values, theirs.values), (i, j)))
        mine, their = (ours.values.array(i), theirs.values.array(j)) if masked else (None, None)
        moved = None if mine is None or their is None else in_our_layout(mine, their)
        if mine is None or moved is None:
            continue
        for side, other, array, its in ((ours, theirs, mine, moved), (theirs, ours, moved, mine)):
            hidden = (finite(array) == 0) & (array < 0)
            if hidden.any() and not its[hidden].any():
                return f"{side.values.side} reads a mask here where {other.values.side} reads zeros"
    return None


def _may_be_masked(values: Values, number: int) -> bool:
    row = values.rows[values.copied(number)]
    return not row.data or bool(re.search("where|mask|select_n|add|fill", row.operation))


def _mask_of_one(ours: Start, theirs: Start) -> str | None:
    """One side masks, and the other does not."""
    here, there = _masks_around(ours, theirs)
    # Where what both read is masked already, the largest of a masked row is no mask of its own.
    if bool(here) == bool(there) or _masks(ours, ours.agreed):
        return None
    # Of a side that was recorded, the larger arrays are not there.
    if any(side.values.again is None and not side.values.arrays.keys() >= {*side.near} for side in (ours, theirs)):
        return None
    one, other = (ours, theirs) if here else (theirs, ours)
    # What is one operation, as a loss of alignments is, may mask inside; and zeros are a mask of another kind.
    around = {re.sub(r"^aten\._?", "", other.values.rows[i].operation) for i in (*other.behind, *other.near)}
    if _MASKED_FOR.isdisjoint(around) or any(re.search("where|mask|select_n", name) for name in around):
        return None
    # What of one side is not filled yet is masked there alone.
    read = {*one.agreed, *(i for k in one.near for i in one.values.rows[k].inputs)}
    if _masks(other, other.near, _SMALL) or not one.values.partly.isdisjoint(read):
        return None
    perhaps = "" if _is_mended_by_mask(ours, theirs, here, there) else "perhaps "
    return f"{perhaps}only {one.values.side} masks here, {other.values.side} does not"


def _is_mended_by_mask(ours: Start, theirs: Start, here: Sequence[np.ndarray], there: Sequence[np.ndarray]) -> bool:
    """Whether the side that does not mask goes on as the other one does, if it masks too."""
    side, other, masks = (1, theirs, here) if here else (0, ours, there)
    read = [i for i in (*other.agreed, *other.near) if math.prod(other.values.rows[i].shape) == masks[0].size]
    arrays = [(i, array) for i in read[:4] if (array := other.values.array(i)) is not None]
    for (i, array), mask in product(arrays, masks):
        for moved in layouts(array, mask)[:_ORDERS]:
            change = Change(i, np.where(_masked(moved), moved, array), {})
            if mended((ours.values, theirs.values), side, change, (ours, theirs)) > Mended.ONE_SIDE:
                return True
    return False


def _mask(ours: Start, theirs: Start) -> str | None:
    """Who sees whom: places that one side masks and the other does not."""
    # Where some mask of ours is one of theirs, they may have been put together in other steps.
    pairs = ((mine, masked_apart(mine, their)) for mine, their in product(*_masks_around(ours, theirs)))
    found = [(mine, apart) for mine, apart in pairs if apart is not None]
    if not found or not all(apart.any() for _, apart in found):
        return None
    mine, differing = found[0]
    place = tuple(int(k) for k in np.argwhere(differing)[0])
    only = "ours" if _masked(mine)[place] else "theirs"
    perhaps = "" if _masks_there(ours) or _masks_there(theirs) else "perhaps "
    return (
        f"{perhaps}the mask differs at {int(differing.sum())} of {differing.size} places: "
        f"only {only} masks key {place[-1]} from query {place[-2]}, for example"
    )


def _masks_there(side: Start) -> bool:
    """Whether the line masks, or what it reads is masked; else there may be more between it and the mask."""
    rows = side.values.rows
    return bool(_masks(side, [*side.behind, *(i for i in side.near if rows[i].place[:2] == side.row.place[:2])]))


def _masks_around(*sides: Start) -> tuple[list[np.ndarray], ...]:
    """What each side masks; nothing where no side does so at once."""
    if not any(_masks(side, [*side.behind, *side.near[:4]]) for side in sides):
        return [], []
    # A side that masks everything goes on as if it masked nothing: what it was made of tells.
    return tuple(_masks(side, [*side.behind, *side.near]) for side in sides)


_MASKED_FOR = {
    "exp",
    "softmax",
    "safe_softmax",
    "log_softmax",
    "logsumexp",
    "amax",
    "reduce_max",
    "sort",
    "topk",
    "top_k",
}
"""What a mask is there for."""


def masked_apart(mine: np.ndarray, their: np.ndarray) -> np.ndarray | None:
    """Which places only one of two arrays masks, in the layout in which the rest agrees. Else in an order of the axes
    before the last two in which the masks are the same, or as they are, with these axes merged; or, where the last two
    differ, in the layout in which the masks agree most. None for other sizes.
    """
    moved = in_our_layout(mine, their)
    if moved is None:
        return None
    seen = ~(_masked(mine) | _masked(moved))
    if not np.allclose(mine[seen], moved[seen], rtol=1e-6, atol=0):
        if mine.ndim > 1 and mine.shape[-2:] == their.shape[-2:]:
            orders = _with_axes_before(their, mine.shape)
            alike = (array for array in orders if np.array_equal(_masked(array), _masked(mine)))
            moved = next(alike, their.reshape(mine.shape))
        else:
            moved = min(layouts(mine, their), key=lambda array: (_masked(array) ^ _masked(mine)).sum())
    return _masked(moved) ^ _masked(mine)


def _with_axes_before(array: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """An array in a shape with the same last two axes, with those before them in each order."""
    last = max(array.ndim, len(shape)) - 2
    for axes in permutations(range(last)) if last <= 3 else [tuple(range(last))]:
        there = (*axes, last, last + 1)
        if array.ndim < len(shape):
            moved = array.reshape([shape[k] for k in there])
            yield moved.transpose(np.argsort(there))
        else:
            yield array.transpose(there).reshape(shape)


def _masked(array: np.ndarray, below: float = -1e30) -> np.ndarray:
    """Where a mask's "minus infinity" is."""
    with np.errstate(invalid="ignore"):
        return np.asarray(array <= below)


def _masks(side: Start, near: Sequence[int], below: float = -1e30) -> list[np.ndarray]:
    """Each of these values, but for tables, that masks something; a side may mask in several steps."""
    values, rows = side.values, side.values.rows
    # Neither the largest of no numbers is a mask nor what it begins with.
    filled = re.compile("scatter.(max|reduce)|full")
    made = [i for i in near if rows[i].data and not filled.search(rows[values.copied(i)].operation)]
    arrays = [values.array(i) for i in made if len(rows[i].shape) >= 2]
    return [array for array in arrays if array is not None and _masked(array, below).any()]


def _may_mend_all(ours: Start, theirs: Start, number: int, arrays: Iterable[np.ndarray]) -> bool:
    """Whether ours, with one of these in the place of a value, goes on as theirs does: each side may scale another one
    of two values that are multiplied, or in another step."""
    changes = (Change(number, array, {}) for array in arrays)
    return most_mended((ours.values, theirs.values), changes, (ours, theirs)) > Mended.ONE_SIDE


def _may_be_without(ours: Start, theirs: Start, number: int, factor: float) -> bool:
    """Whether ours goes on as theirs does if a value is divided by a factor, where that can be seen."""
    values = ours.values
    runs = not ours.row.backward and values.readers(number) and values.again is not None
    array = values.array(number) if runs else None
    with np.errstate(over="ignore"):
        return array is None or _may_mend_all(ours, theirs, number, [array / factor])


def _factor(ours: Start, theirs: Start) -> str | None:
    """Ours is theirs times one number."""
    found: list[tuple[int, float]] = []
    begins = False
    for i in ours.near:
        row = ours.values.rows[i]
        # The last of theirs: either side may scale in several steps.
        for j in theirs.near[::-1] if math.prod(row.shape) >= 16 else ():
            factor = times(row.features, theirs.values.rows[j].features)
            if factor is not None:
                found.append((i, factor))
                begins |= i == ours.number or j == theirs.number
                break
    if not begins or abs(found[-1][1] - 1) <= BAR:
        return None
    rows, place = ours.values.rows, ours.row.place[:2]
    # Behind the line, a square has the square of the factor; but there may be more of it on the next one.
    line = [each for each in found if rows[each[0]].place[:2] == place and abs(each[1] - 1) > BAR]
    tried = [*([] if ours.row.backward else line[-1:]), found[-1]]
    factor = next((factor for number, factor in tried if _may_be_without(ours, theirs, number, factor)), None)
    if factor is None:
        return None
    # On the way back one such pair may be chance, as where one side writes a square and the other a product.
    # So may a sign be, as where one side writes x - y and the other y - x.
    alike = sum(math.isclose(factor, each, rel_tol=1e-9) for _, each in found)
    chance = ours.row.backward or abs(factor + 1) <= BAR
    return f"ours is {called(factor, sizes_around(ours, theirs))} times theirs" if alike >= 3 or not chance else None


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
    apart = len(here) == len(there) == 1 and abs(here[0]) != abs(there[0])  # a sign may stand in what reads it
    if apart and len(names) == 1 and shared(ours, theirs) and _is_mended_by_theirs(ours, theirs):
        return f"another number stands in the program: {_apart(here[0], there[0])}"
    return None


def _is_mended_by_theirs(ours: Start, theirs: Start) -> bool:
    """Whether ours goes on as theirs does with what theirs makes there, where that can be seen."""
    here, there = ours.values.array(ours.number), theirs.values.array(theirs.number)
    if here is None or there is None or ours.row.backward or ours.values.again is None:
        return True
    orders = layouts(here, there)[:_ORDERS]
    return not orders or _may_mend_all(ours, theirs, ours.number, orders)
