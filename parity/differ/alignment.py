"""Finds where two sides part: between outputs that differ and the last values that have an equal on the other side."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np

from parity.differ.fingerprints import BAR, Index, fingerprint
from parity.differ.row_sets import RowIndex, is_routed, is_whole, packed
from parity.differ.values import Value, Values

PRODUCT = re.compile(r"(dot_general|bmm|\bmm|matmul|conv(?!ert))")
"""Products with a matrix, whatever they are called."""
_NEAR = 24
"""Values after the start, in the order of execution, among which a kind is looked for."""
REACH = 40 * _NEAR
"""Values of the program, at most, among which these are found."""
_JOINS = 4
"""Ends of branches, at most, that are looked at."""
_STEPS = 40
"""Values to go on, at most, to one that has an equal."""
_MOST = 16
"""Parts that are looked for, at most."""
CHOSEN = 1 << 16
"""Whole numbers, at most, that are compared one by one."""
_LARGEST = 1 << 20
"""Elements of a value that is taken apart."""
_ROUNDS = 1000
"""Values that are computed in parts on the other side, at most, one after the other."""


@dataclass(frozen=True, eq=False)
class Start:
    """A value of one side without an equal, all of whose inputs have one."""

    values: Values
    number: int
    agreed: tuple[int, ...]
    """The inputs that have an equal, through values that say nothing."""
    constants: tuple[int, ...]
    """What has no equal before it and depends on no weight and no floating input: a mask, a table, and what they are
    made of; the first one first."""

    @property
    def row(self) -> Value:
        """The value itself."""
        return self.values.rows[self.number]

    @cached_property
    def near(self) -> list[int]:
        """The unmatched values from the start on that follow from it, the start first."""
        values, found, seen = self.values, [self.number], {self.number}
        for i in range(self.number + 1, min(self.number + REACH, len(values.rows))):
            if i not in values.equal and any(k in seen for k in values.rows[i].inputs):
                seen.add(i)
                found.append(i)
            if len(found) >= _NEAR:
                break
        return found

    @cached_property
    def behind(self) -> list[int]:
        """The unmatched values that it was made of."""
        found = [self.number]
        for i in found:
            found += [k for k in self.values.rows[i].inputs if k not in self.values.equal and k not in found]
        return found[1:]

    @cached_property
    def branches(self) -> list[tuple[int, int]]:
        """(end, what it is added to) of branches that follow from the start, as where a residual is added: something
        agreed of the size of the sum, or what the branch before it is added to. The first few, and the last."""
        values, seen, ends = self.values, {self.number}, dict[int, int]()
        for k in range(self.number + 1, min(self.number + REACH, len(values.rows))):
            row = values.rows[k]
            if k in values.equal or row.backward or seen.isdisjoint(row.inputs):
                continue
            seen.add(k)
            for i in row.inputs:
                agreed = i in values.equal and values.rows[i].data and values.leaf(i) is None
                added = i in ends and "add" in row.operation and all(values.leaf(j) is None for j in row.inputs)
                if values.rows[i].shape == row.shape and (agreed or added):
                    ends[k] = ends.get(i, i)
        found = list(ends.items())
        return found[:_JOINS] + found[_JOINS:][-1:]


def shared(ours: Start, theirs: Start) -> list[tuple[int, int]]:
    """(ours, theirs) of the values that both starts read."""
    return [(i, j) for i in ours.agreed for j in ours.values.equal.get(i, ()) if j in theirs.agreed]


def sizes_around(*sides: Start) -> set[int]:
    """The sizes of the axes of what starts read, and of what is made of it."""
    return {size for side in sides for i in (*side.agreed, *side.near) for size in side.values.rows[i].shape}


_FAMILIES = (
    "dot_general|ragged_dot|conv_general_dilated|convolution|mm|bmm|addmm|baddbmm|mv|dot|linear",
    "add|sub|rsub|neg|reduce_sum|sum|mean|var|var_mean|cumsum|scatter.add|index_add|addcmul|add_any|sym_size",
    "mul|div|square|integer_pow|pow|reciprocal|rsqrt|sqrt|addcdiv",
    "select_n|where|masked_fill|tril|triu|max|min|maximum|minimum|clamp|relu|relu6|hardtanh|threshold",
    "exp|exp2|log|log1p|expm1|logistic|sigmoid|tanh|erf|erfc|softmax|logsumexp|reduce_max|amax|erf_inv",
    "sin|cos|tan|atan2",
    "gather|index|index_select|embedding|take|dynamic_slice|slice|select|split|unbind|chunk",
)
"""Operations of one kind, whatever they are called."""


def are_counterparts(ours: Start, theirs: Start) -> bool:
    """Whether two starts do the same: operations of one kind, or of the same values. Whole numbers never tell, because
    each side may choose, sort and mask in its own way; nor does what is done with another weight."""
    rows = ours.row, theirs.row
    if any(is_whole(row.dtype) for row in rows):
        return False
    sizes = [math.prod(row.shape) for row in rows]
    copies = [side.values.copies(side.number) for side in (ours, theirs)]
    if rows[0].backward and sizes[0] != sizes[1] and copies[0] != copies[1]:
        return False  # one side alone takes its way back in parts
    names = [re.sub(r"^(aten|prims)\.|_?$", "", row.operation) for row in rows]
    weights = [
        {i for i in side.agreed if i in side.values.equal and side.values.parameter(i)} for side in (ours, theirs)
    ]
    if all(weights) and ours.values.equals(weights[0]).isdisjoint(weights[1]):
        return False  # layers that have nothing to do with each other may read the same
    alike = names[0] == names[1] or any(all(re.fullmatch(family, name) for name in names) for family in _FAMILIES)
    return alike or ours.values.equals(ours.agreed) >= set(theirs.agreed) != set()


def match(ours: Values, theirs: Values, bar: float = BAR) -> None:
    """Compares all values of one side with all of the other, and notes in both which have an equal.

    What is chosen or sorted by, whole numbers that depend on data, has one only where they are in one order.
    """
    ours.bar = theirs.bar = bar
    ours.equal, theirs.equal, ours.reordered, theirs.reordered = {}, {}, {}, {}
    index, live = theirs.index(), ours.live()

    orders: dict[int, Orders] = {}

    def in_order(i: int, j: int) -> bool:
        here, there = ours.arrays.get(i), theirs.arrays.get(j)
        if here is None or there is None or not 1 < here.size == there.size <= CHOSEN:
            return True
        for key, array in ((i, here), (~j, there)):
            if key not in orders:
                orders[key] = _orders(array)
        return not orders[i].isdisjoint(orders[~j])

    for i, row in enumerate(ours.rows):
        same = index.equals(row.features) if i in live and row.features is not None else []
        if row.data and is_whole(row.dtype):
            moved = [j for j in same if not in_order(i, j)]
            ours.reordered |= {i: moved} if moved else {}
            for j in moved:
                theirs.reordered.setdefault(j, []).append(i)
            same = [j for j in same if j not in moved]
        if same:
            ours.equal[i] = same
            for j in same:
                theirs.equal.setdefault(j, []).append(i)


Orders = frozenset[int]


def _orders(array: np.ndarray) -> Orders:
    """What tells whole numbers from others, and from the same in another order, with their axes in each order."""
    array = array.astype(np.int64).squeeze()
    axes = permutations(range(array.ndim)) if array.ndim <= 4 else [range(array.ndim)]
    return frozenset(hash(array.transpose([*each]).tobytes()) for each in axes)


def starts(values: Values, outputs: Iterable[int], *, backward: bool = False) -> list[Start]:
    """Where the region of unmatched values before `outputs` begins, in the order of execution.

    An output counts as unmatched, since it was compared by name. Weights and inputs, and values that are zero but for
    rounding, are no part of the region; nor is what is made of weights alone that the other side never reads, nor the
    forward pass, where that agrees and only the way `backward` is asked for. It begins with no factor of a derivative.
    """
    forced, unread, factors = set(outputs), _read_by_one_side(values), values.factors()
    region, todo = set(), list(forced)
    while todo:
        i = todo.pop()
        row = values.rows[i]
        agrees = (
            not row.data
            or i in values.equal
            or is_whole(row.dtype)
            or row.noise
            or values.leaf(i) is not None
            or i in unread
            or (backward and not row.backward)
        )
        if i not in region and (i in forced or not agrees):
            region.add(i)
            todo += row.inputs
    found: list[Start] = []
    after: set[int] = set()
    """What tells something, or is made of such: no start is made of these."""
    for i in sorted(region):
        row = values.rows[i]
        tells = (row.features is not None and i not in factors) or i in forced
        follows = not after.isdisjoint(row.inputs)
        if tells or follows:
            after.add(i)
        if tells and not follows:
            found.append(Start(values, i, _agreed(values, i, region), _constants(values, i, region)))
    return found


def _read_by_one_side(values: Values) -> set[int]:
    """The weights that this side alone reads, and what is made of them and of single numbers alone."""
    found = set[int]()
    for i, row in enumerate(values.rows):
        before = [k for k in row.inputs if values.rows[k].data or math.prod(values.rows[k].shape) > 1]
        alone = found.issuperset(before) if before else row.kind == "parameter"
        if alone and row.data and i not in values.equal:
            found.add(i)
    return found


def starts_of_both(
    sides: tuple[Values, Values], bad: tuple[Sequence[int], Sequence[int]], *, backward: bool
) -> tuple[list[Start], list[Start]]:
    """Where the unmatched values of both sides begin.

    An output that differs by name may have an equal within the other side: what is added to that there is missing. But
    where each side computes what the other returns, they part in what is returned.
    """
    forced: list[Sequence[int]] = [
        [i for i in numbers if not values.equal.get(i) or set(values.equal[i]) & set(others)]
        for values, numbers, others in zip(sides, bad, bad[::-1], strict=True)
    ]
    forced = forced if any(forced) else [[*numbers] for numbers in bad]
    indices, rows = [values.index() for values in sides], [RowIndex(values) for values in sides]
    routed = tuple(map(packed, sides))
    for _ in range(_ROUNDS):
        found = [starts(values, numbers, backward=backward) for values, numbers in zip(sides, forced, strict=True)]
        in_parts = False
        for side, other in ((0, 1), (1, 0)):
            sides[side].want(start.number for start in found[side] if start.number not in forced[side])
            for start in found[side]:
                # What the other side computes part by part has an equal after all.
                array = start.values.array(start.number) if start.number not in forced[side] else None
                parts = made_of(array, indices[other]) if array is not None else []
                if array is not None and not parts and is_routed(start.values, start.number, routed[side]):
                    parts = rows[other].holders(array)
                    routed[side].update([start.number] if parts else [])
                    routed[other].update(parts)
                for number in parts:
                    sides[side].equal.setdefault(start.number, []).append(number)
                    sides[other].equal.setdefault(number, []).append(start.number)
                    in_parts = True
        if not in_parts:
            break
    # A derivative that the program takes comes after what it is the derivative of.
    first = [[start for start in each if not start.row.derived] for each in found]
    return (first if all(first) else found)[0], (first if all(first) else found)[1]


def _agreed(values: Values, number: int, region: Collection[int]) -> tuple[int, ...]:
    reached, seen = [number], set[int]()
    for i in reached:
        if i in region:
            reached += [k for k in dict.fromkeys(values.rows[i].inputs) if k not in seen]
            seen.update(values.rows[i].inputs)
    tells = (i for i in reached if i not in region and values.rows[i].data)
    return tuple(i for i in tells if i in values.equal or not is_whole(values.rows[i].dtype))


def _constants(values: Values, number: int, region: Collection[int]) -> tuple[int, ...]:
    """The constants without an equal on the way to a value, the first one first."""
    seen, todo, found = set(), [number], []
    while todo:
        i = todo.pop()
        for k in values.rows[i].inputs if i not in seen else ():
            row = values.rows[k]
            constant = k not in region and not row.data and k not in values.equal
            if constant and row.features is not None:
                found.append(k)
            if constant or k in region:
                todo.append(k)
        seen.add(i)
    return tuple(sorted(found))


def anchors(start: Start) -> list[int]:
    """The values of the forward pass that a value on the way back belongs to: the nearest after it with an equal.

    Its own forward value, if that has an equal; else the first that are made of it. So the steps of a norm or of an
    activation, which each side may write in its own way, all belong to what comes out of it.
    """
    values, row = start.values, start.row
    near = [row.forward] if row.forward is not None else [i for i in row.inputs if not values.rows[i].backward]
    seen = set(near)
    for _ in range(_STEPS):
        if found := [i for i in near if i in values.equal and values.rows[i].data]:
            return found
        near = [k for i in near for k in values.readers(i) if not values.rows[k].backward and k not in seen]
        seen |= set(near)
    return []


Paired = tuple[Start | None, Start | None, bool]
"""(ours, theirs, whether the two belong together)."""


def paired_backward(ours: list[Start], theirs: list[Start]) -> Paired:
    """The start that comes first on the way back, and that of the other side which belongs to the same forward values.

    What follows from a difference may look like a start of its own, where one side hands on what the other does not.
    The order of both sides is that of the forward values, which agree.
    """
    belongs = {start: start.values.equals(anchors(start)) for start in ours}
    belongs |= {start: set(anchors(start)) for start in theirs}

    def place(start: Start) -> int:
        return min(belongs[start], default=-1)

    first, second = (max(side, key=lambda s: (place(s), -s.number), default=None) for side in (ours, theirs))
    if first is None or second is None:
        return first, second, False
    if len(ours) == len(theirs) == 1 and first.values.equals(first.agreed) == set(second.agreed):
        # One place on either side, and both read the same: the gradient that one table learns from, say.
        return first, second, True
    if place(first) >= place(second):
        partner = next((start for start in theirs if belongs[first] & belongs[start]), None)
        return first, partner, partner is not None
    partner = next((start for start in ours if belongs[start] & belongs[second]), None)
    return partner, second, partner is not None


def paired(ours: list[Start], theirs: list[Start]) -> Paired:
    """The starts of both sides that belong together, and whether they read values that agree.

    Of those that share an agreed input, the earliest of ours and the earliest of theirs that shares the most with it.
    """
    for here in ours:
        reach = here.values.equals(here.agreed)
        there = max(theirs, key=lambda start: len(reach.intersection(start.agreed)), default=None)
        if there is not None and reach.intersection(there.agreed):
            return here, there, True
    return (ours[0] if ours else None), (theirs[0] if theirs else None), False


def made_of(array: np.ndarray, other_side: Index) -> list[int]:
    """The values of the other side that, put together along one axis, have the numbers of `array`; else nothing."""
    if array.ndim == 0 or array.size > _LARGEST:
        return []
    for parts in splits(array):
        features = [fingerprint(part, depends_on_data=True)[0] for part in parts]
        equals = [other_side.equals(each) if each is not None else [] for each in features]
        if all(equals):
            return sorted({number for each in equals for number in each})
    return []


def splits(array: np.ndarray) -> Iterator[list[np.ndarray]]:
    """An array in equal parts along one of its axes, in every way with few of them."""
    for axis, size in enumerate(array.shape):
        for count in range(2, min(size, _MOST) + 1):
            if size % count == 0 and array.size // count >= 3:
                yield np.split(array, count, axis)
