"""Whole numbers by which both sides choose: experts, neighbours, the rows that a mask keeps."""

import math
from collections.abc import Iterable
from itertools import islice, product

import numpy as np

from parity.differ.alignment import CHOSEN, Start, starts
from parity.differ.confirmation import Change, Mended, mended
from parity.differ.element_order import distance, in_shape, without_copies
from parity.differ.row_sets import is_whole
from parity.differ.substitution import GOES_ON, told_of
from parity.differ.values import Values

_BACK = 4
"""Steps, at most, back to what was chosen: the same rows are the same as a set, however often each is there."""
_TRIED = 16
"""Pairs of choices, at most, of which one is tried in the place of the other."""


def before_choices(ours: Start, theirs: Start) -> tuple[list[Start], list[Start]] | None:
    """The starts of what whole numbers were made of, where a start reads such as the other side has not, as experts
    that are chosen by other scores; None where these are not what parts them. A start that reads none stays."""
    found, chosen = [], False
    for start, other in ((ours, theirs.values), (theirs, ours.values)):
        values, rows = start.values, start.values.rows
        choices = unmatched_choices(start, other)
        before = {k for i in choices for k in rows[i].inputs if rows[k].data and values.leaf(k) is None}
        scores = {k for k in before - {*choices} if k not in values.equal and not is_whole(rows[k].dtype)}
        found.append(starts(values, scores) or [start])
        chosen |= bool(scores)
    return (found[0], found[1]) if chosen else None


def other_choice(ours: Start, theirs: Start) -> tuple[int, int, bool] | None:
    """(ours, theirs): the first whole numbers by which both choose, or whether something holds, with which ours goes on
    to its end as theirs does if it has those of theirs; and whether what they are made of agrees."""
    sides = ours.values, theirs.values
    choices = unmatched_choices(ours, theirs.values, _BACK), unmatched_choices(theirs, ours.values, _BACK)
    for values, numbers in zip(sides, choices, strict=True):
        values.want(numbers)
    tried = ((i, j, array) for i, j in product(*map(sorted, choices)) for array in _given(*sides, i, j))
    for i, j, array in islice(tried, _TRIED):
        if mended(sides, 0, Change(i, array, {}), (ours, theirs)) is Mended.ALL:
            read = {k for k in ours.values.rows[i].inputs if ours.values.rows[k].data}
            return i, j, all(k in ours.values.equal or _is_chosen(*sides, k) for k in read)
    return None


def _is_chosen(ours: Values, theirs: Values, number: int) -> bool:
    """Whether theirs has the same whole numbers, one by one."""
    shape = ours.rows[number].shape
    same = [j for j, row in enumerate(theirs.rows) if is_whole(row.dtype) and math.prod(row.shape) == math.prod(shape)]
    ours.want([number])
    theirs.want(same)
    known = (theirs.arrays[j] for j in same if j in theirs.arrays)
    return number in ours.arrays and any(_lists(ours.arrays[number], array) for array in known)


def other_rows(ours: Start, theirs: Start) -> str | None:
    """That ours reads or writes rows by another table that is made of inputs than theirs, if it mends all to do so by
    theirs, there or in all of the same call."""
    values, rows, chain = ours.values, ours.values.rows, ours.row.place.chain
    read = {i: array for i, array in _tables(values, ours.row.inputs).items() if values.leaf(i) is None}
    pairs = [(i, read[i], there) for i in read for there in _tables(theirs.values, theirs.row.inputs).values()]
    pairs = [(i, here, there) for i, here, there in pairs if here.size == there.size and not _lists(here, there)]
    tables = _tables(values, range(len(rows)) if pairs else ())
    for i, here, there in pairs:
        alike = [[k for k, table in tables.items() if _lists(table, each)] for each in (here, there)]
        if not all(each and _is_of_input(values, each[0]) for each in alike):
            continue
        called = [k for k in alike[0] if rows[k].place.chain == chain and values.leaf(k) is None]
        for numbers in ({i}, {i, *called}):
            changed = {k: np.broadcast_to(there.reshape(tables[k].shape), rows[k].shape) for k in numbers}
            change = Change(i, changed.pop(i), changed)
            if mended((values, theirs.values), 0, change, (ours, theirs)) is Mended.ALL:
                its = next((k for k in alike[0] if values.is_made_of(i, k)), i)
                here_by, there_by = (told_of(values, k) for k in (its, alike[1][0]))
                part = "part" if here_by.startswith("input ") else "result"
                other = there_by if here_by != there_by else f"another {part} of {here_by}"
                return f"ours reads {here_by}; with {other} in its place{GOES_ON}"
    return None


def _tables(values: Values, numbers: Iterable[int]) -> dict[int, np.ndarray]:
    """Those of the values that are whole numbers of no data, each without its copies along axes."""
    tables = [i for i in numbers if not values.rows[i].data and is_whole(values.rows[i].dtype)]
    values.want(tables)
    held = {i: values.arrays[i] for i in tables if i in values.arrays}
    return {i: without_copies(array) for i, array in held.items() if 1 < array.size <= CHOSEN and array.dtype != bool}


def _is_of_input(values: Values, number: int) -> bool:
    return any(row.kind == "input" and values.is_made_of(number, k) for k, row in enumerate(values.rows))


def _lists(table: np.ndarray, numbers: np.ndarray) -> bool:
    return np.array_equal(table.ravel(), numbers.ravel())


def _given(ours: Values, theirs: Values, i: int, j: int) -> Iterable[np.ndarray]:
    """What theirs chooses, in the shape of ours; of what holds, also the contrary. A single number chooses nothing."""
    here, there = ours.arrays.get(i), theirs.arrays.get(j)
    if (
        here is None
        or there is None
        or not 1 < here.size == there.size
        or (here.dtype == bool) != (there.dtype == bool)
    ):
        return []
    moved = in_shape(there, here.shape)[:1]
    moved += [~array for array in moved if array.dtype == bool]
    return [array.astype(here.dtype) for array in moved]


def unmatched_choices(start: Start, other: Values, steps: int = 0) -> list[int]:
    """The whole numbers that the other side has not, by which a start chooses, or what it is made of in so many steps;
    and those that they are made of."""
    values, readers = start.values, [start.number]

    def before(k: int) -> list[int]:
        return [i for i in values.rows[k].inputs if values.rows[i].data and values.leaf(i) is None]

    for _ in range(steps):
        readers += [i for k in readers for i in before(k) if i not in readers]
    found = [i for k in readers for i in before(k) if _is_other_choice(values, other, i)]
    for k in found:
        found += [i for i in before(k) if _is_other_choice(values, other, i) and i not in found]
    return list(dict.fromkeys(found))


def _is_other_choice(values: Values, other: Values, number: int) -> bool:
    """Whether a value is whole numbers that depend on data, and not those of the other side in some order; zeros and
    ones, which are the same numbers whatever is chosen, in one order, as far as that is known."""
    row, array = values.rows[number], values.arrays.get(number)
    if not row.data:
        return False
    if array is None or array.size > CHOSEN or not np.isin(array, (0, 1)).all():
        return is_whole(row.dtype) and number not in values.equal and number not in values.reordered
    known = [other.arrays[j] for j in values.equal.get(number, ()) if j in other.arrays]
    return not any(distance(array, there) == 0 for there in known) if known else number not in values.equal
