"""Finds where two sides part: between outputs that differ and the last values that have an equal on the other side."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from parity.differ.fingerprints import BAR, Index, fingerprint
from parity.differ.values import Values

_STEPS = 40
"""Values to go on, at most, to one that has an equal."""
_MOST = 16
"""Parts that are looked for, at most."""
_LARGEST = 1 << 20
"""Elements of a value that is taken apart."""


@dataclass
class Equal:
    """Which values of one side have an equal on the other, by their fingerprints."""

    ours: dict[int, list[int]] = field(default_factory=dict)
    """One of our values -> theirs, in the order of execution."""
    theirs: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, ours: Values, theirs: Values, bar: float = BAR) -> "Equal":
        """Compares all values of one side with all of the other."""
        found = cls()
        index = theirs.index()
        live = ours.live()
        for i, row in enumerate(ours.rows):
            if i in live and row.features is not None and (same := index.equals(row.features, bar)):
                found.ours[i] = same
                for j in same:
                    found.theirs.setdefault(j, []).append(i)
        return found


@dataclass(frozen=True)
class Start:
    """A value without an equal, all of whose inputs have one."""

    number: int
    agreed: tuple[int, ...]
    """The inputs that have an equal, through values that say nothing."""
    constants: tuple[int, ...]
    """Where inputs without an equal begin that depend on no weight and no floating input: a mask, a table."""


def starts(values: Values, equal: Collection[int], outputs: Iterable[int], *, backward: bool = False) -> list[Start]:
    """Where the region of unmatched values before `outputs` begins, in the order of execution.

    An output counts as unmatched, since it was compared by name. Weights and inputs, and values that are zero but for
    rounding, are no part of the region; nor is the forward pass, where that agrees and only the way `backward` is asked
    for.
    """
    forced = set(outputs)
    region, todo = set(), list(forced)
    while todo:
        i = todo.pop()
        row = values.rows[i]
        agrees = (
            not row.data or i in equal or row.noise or values.leaf(i) is not None or (backward and not row.backward)
        )
        if i in region or (agrees and i not in forced):
            continue
        region.add(i)
        todo += row.inputs
    dirty: dict[int, bool] = {}
    for i in sorted(region):
        row = values.rows[i]
        dirty[i] = row.features is not None or i in forced or any(dirty.get(k, False) for k in row.inputs)
    first = [
        i
        for i in sorted(region)
        if dirty[i]
        and (values.rows[i].features is not None or i in forced)
        and not any(dirty.get(k, False) for k in values.rows[i].inputs)
    ]
    return [Start(i, _agreed(values, i, region), _constants(values, i, equal, region)) for i in first]


def _agreed(values: Values, number: int, region: Collection[int]) -> tuple[int, ...]:
    found, todo = [], list(values.rows[number].inputs)
    while todo:
        i = todo.pop(0)
        if i in region:
            todo += values.rows[i].inputs
        elif values.rows[i].data:
            found.append(i)
    return tuple(dict.fromkeys(found))


def _constants(values: Values, number: int, equal: Collection[int], region: Collection[int]) -> tuple[int, ...]:
    """The first constants without an equal on the way to a value."""
    seen, todo, found = set(), [number], []
    while todo:
        i = todo.pop()
        if i in seen:
            continue
        seen.add(i)
        for k in values.rows[i].inputs:
            row = values.rows[k]
            if k in region:
                todo.append(k)
            elif not row.data and k not in equal:
                if row.features is not None and not _unequal_before(values, k, equal):
                    found.append(k)
                todo.append(k)
    return tuple(sorted(found))


def _unequal_before(values: Values, number: int, equal: Collection[int]) -> bool:
    """Whether a constant without an equal is made from another one without."""
    todo = list(values.rows[number].inputs)
    while todo:
        i = todo.pop()
        row = values.rows[i]
        if row.features is None:
            todo += row.inputs
        elif i not in equal:
            return True
    return False


def anchors(values: Values, start: Start, equal: Mapping[int, list[int]]) -> list[int]:
    """The values of the forward pass that a value on the way back belongs to: the nearest after it with an equal.

    Its own forward value, if that has an equal; else the first that are made of it. So the steps of a norm or of an
    activation, which each side may write in its own way, all belong to what comes out of it.
    """
    row = values.rows[start.number]
    begin = [row.forward] if row.forward is not None else [i for i in row.inputs if not values.rows[i].backward]
    found, seen, near = [], set(begin), list(begin)
    for _ in range(_STEPS):
        found = [i for i in near if i in equal and values.rows[i].data]
        if found or not near:
            break
        near = [k for i in near for k in values.readers(i) if not values.rows[k].backward and k not in seen]
        seen |= set(near)
    return found


def paired_backward(
    ours: Values, theirs: Values, here: list[Start], there: list[Start], equal: Equal
) -> tuple[Start | None, Start | None, bool]:
    """The start that comes first on the way back, and that of the other side which belongs to the same forward values.

    What follows from a difference may look like a start of its own, where one side hands on what the other does not.
    The order of both sides is that of the forward values, which agree.
    """
    known = {start: {j for i in anchors(ours, start, equal.ours) for j in equal.ours[i]} for start in here}
    other = {start: set(anchors(theirs, start, equal.theirs)) for start in there}
    first = max(here, key=lambda start: (min(known[start], default=-1), -start.number), default=None)
    second = max(there, key=lambda start: (min(other[start], default=-1), -start.number), default=None)
    if first is None or second is None:
        return first, second, False
    if len(here) == len(there) == 1 and {j for i in first.agreed for j in equal.ours.get(i, ())} == set(second.agreed):
        # One place on either side, and both read the same: the gradient that one table learns from, say.
        return first, second, True
    if min(known[first], default=-1) >= min(other[second], default=-1):
        shared = [start for start in there if known[first] & other[start]]
        return first, (shared[0] if shared else None), bool(shared)
    shared = [start for start in here if known[start] & other[second]]
    return (shared[0] if shared else None), second, bool(shared)


def paired(ours: list[Start], theirs: list[Start], equal: Equal) -> tuple[Start | None, Start | None, bool]:
    """The starts of both sides that belong together, and whether they read values that agree.

    Of those that share an agreed input, the earliest of ours and the earliest of theirs that shares the most with it.
    """
    for here in ours:
        reach = {j for i in here.agreed for j in equal.ours.get(i, ())}
        shared = {there: len(reach & set(there.agreed)) for there in theirs}
        if most := max(shared.values(), default=0):
            return here, next(there for there in theirs if shared[there] == most), True
    return (ours[0] if ours else None), (theirs[0] if theirs else None), False


def made_of(array: np.ndarray, other_side: Index) -> list[int]:
    """The values of the other side that, put together along one axis, have the numbers of `array`; else nothing."""
    if array.ndim == 0 or array.size > _LARGEST:
        return []
    for parts in _splits(array):
        found = []
        for part in parts:
            features, _ = fingerprint(part, depends_on_data=True)
            equals = other_side.equals(features) if features is not None else []
            if not equals:
                break
            found += equals
        if len(found) >= len(parts):
            return sorted(set(found))
    return []


def _splits(array: np.ndarray) -> Iterator[list[np.ndarray]]:
    for axis, size in enumerate(array.shape):
        for count in range(2, min(size, _MOST) + 1):
            if size % count == 0 and array.size // count >= 3:
                yield np.split(array, count, axis)
