"""What one side computes in parts: views or losses that the other stacks, rows that it chooses and the other masks, and
what it has of a cache that the other fills step by step."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np

from parity.differ.fingerprints import Index, fingerprint
from parity.differ.row_sets import is_whole
from parity.differ.values import ROW, Values

_CHOOSES = re.compile(r"aten\.(index|index_select|masked_select)")
_WRITES = re.compile(r"dynamic_update_slice|scatter|aten\.(index_put|index_copy|slice_scatter|copy)")
_MOST, _CHOICES, _PARTS, _LARGEST = 1 << 16, 8, 16, 1 << 18
"""Rows, choices of rows, parts of an array, and its elements, at most."""
_AXES = 4
"""Axes, at most, along which the other side may go step by step."""
_FEWEST = 3
"""Numbers, at least, by which rows are told from others."""


def match_in_parts(ours: Values, theirs: Values) -> None:
    """Notes in both sides which values of one have all their parts among the values of the other: what is stacked along
    the first axis, single numbers, as the loss of each layer, in ours the rows that theirs chooses of what agrees, in
    theirs those that it has before it pads, and of an array that is filled from its beginning, as a cache of one length
    is, and of what is made of it, the part that is filled."""
    for values, other in ((ours, theirs), (theirs, ours)):
        _note(values, other, partial(_stacked, other.index()))
        values.partly = _note(values, other, partial(_filled, other.index(), _written(values)))
        # What goes step by step over an array that agrees reads what agrees.
        for k in sorted(values.live() - values.equal.keys()):
            row = values.rows[k]
            if row.operation == ROW and row.data:
                _pair(values, other, [(k, j) for j in values.equal.get(row.inputs[0], ())])
    lines: dict[tuple[str, int, int], list[tuple[int, np.ndarray]]] = {}
    for k, source, count, rows in _choices(theirs):
        row = theirs.rows[k]
        lines.setdefault((row.place.file, row.place.line, row.inputs[0]), []).append((count, rows))
        if k not in theirs.equal:
            _pair(ours, theirs, [(i, k) for i in theirs.equal[source]])
    # Experts take turns: what each chooses says nothing of all rows.
    choices = [each[0] for each in lines.values() if len({rows.tobytes() for _, rows in each}) == 1]
    for values, other, found in ((ours, theirs, choices), (theirs, ours, _padded(theirs))):
        chosen: dict[int, list[np.ndarray]] = {}
        for count, picked in islice({(count, rows.tobytes()): None for count, rows in found}, _CHOICES):
            chosen.setdefault(count, []).append(np.frombuffer(picked, np.int64))
        alone = other.index(other.live() - other.equal.keys() - _chosen_of_others(other))
        values.partly |= _note(values, other, partial(_chosen, alone, chosen))


def _pair(values: Values, other: Values, pairs: Iterable[tuple[int, int]]) -> None:
    for i, j in pairs:
        values.equal.setdefault(i, []).append(j)
        other.equal.setdefault(j, []).append(i)


def _note(values: Values, other: Values, ways: Callable[[int, np.ndarray], Iterable[list[list[int]]]]) -> set[int]:
    """Values without an equal get those of all their parts, in the first way in which each part has some; returns
    them."""
    noted = set[int]()
    for i in sorted(values.live() - values.equal.keys()):
        row, array = values.rows[i], values.arrays.get(i)
        if array is None or not row.data or row.features is None or is_whole(row.dtype) or array.size > _LARGEST:
            continue
        parts = next(filter(all, ways(i, array)), [])
        _pair(values, other, [(i, j) for j in dict.fromkeys(j for part in parts for j in part)])
        noted |= {i} if parts else set()
    return noted


def _stacked(index: Index, _: int, array: np.ndarray) -> Iterator[list[list[int]]]:
    return ([_equals(index, [x]) for x in parts] for parts in _parts(array))


def _filled(
    index: Index, filled: Mapping[int, Mapping[int, int]], number: int, array: np.ndarray
) -> Iterator[list[list[int]]]:
    """The part of an array up to where what it was made of is filled, along an axis of that length."""
    for axis, length in enumerate(array.shape):
        if length in filled.get(number, {}):
            yield [_equals(index, [array.take(range(filled[number][length]), axis)])]


def _written(values: Values) -> dict[int, dict[int, int]]:
    """Value -> the length of an axis -> how much is filled, and followed by zeros, of the last array with such an axis
    that is written into, which it was made of."""
    found: dict[int, dict[int, int]] = {}
    for k, row in enumerate(values.rows):
        inherited = [found[i] for i in sorted(row.inputs) if i in found]
        array = values.arrays.get(k) if _WRITES.match(row.operation) else None
        if array is not None and array.ndim and array.dtype.kind == "f":
            ends = [1 + int(at.max(initial=-1)) for at in np.nonzero(array)]
            inherited.append({n: end for n, end in zip(array.shape, ends, strict=True) if 0 < end < n})
        if any(inherited):
            found[k] = {n: end for each in inherited for n, end in each.items()}
    return found


def _chosen(
    index: Index, chosen: Mapping[int, Sequence[np.ndarray]], _: int, array: np.ndarray
) -> Iterator[list[list[int]]]:
    for count, picked in chosen.items():
        for whole in _in_rows(array, count):
            for parts in (whole.swapaxes(0, 1)[None], whole)[: 2 if len(whole) > 1 else 1]:
                yield [_equals(index, (part[rows] for rows in picked)) for part in parts]


def _equals(index: Index, arrays: Iterable[np.ndarray]) -> list[int]:
    """The values that have the numbers of the first of these arrays that have an equal."""
    features = (fingerprint(x, depends_on_data=True)[0] for x in arrays)
    return next((found for each in features if each is not None and (found := index.equals(each))), [])


def _parts(array: np.ndarray) -> Iterator[list[np.ndarray]]:
    """An array in equal parts along its first axis, in rows along another one, or in single numbers."""
    if 1 < array.size <= _PARTS:
        yield list(array.reshape(-1, 1))
    length = len(array) if array.ndim > 1 else 0
    for count in range(2, min(length, _PARTS) + 1):
        if length % count == 0 and array.size // count >= _FEWEST:
            yield np.split(array, count)
    for axis, length in enumerate(array.shape[1:_AXES], 1):
        if 1 < length <= _PARTS and array.size // length >= _FEWEST:
            yield [array.take(k, axis) for k in range(length)]


def _choices(values: Values) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """(what is chosen, of what, of how many rows, which) where an array that agrees is indexed by truth values or lists
    of places. What is wrong with other rows would not be seen where it does not agree."""
    for k in sorted(values.live()):
        row = values.rows[k]
        if not _CHOOSES.match(row.operation) or not row.shape:
            continue
        of, *index = row.inputs
        if (source := _agreed(values, of)) is None:
            continue
        arrays = [array for i in index if (array := values.arrays.get(i)) is not None]
        lead = arrays[0].shape if arrays and arrays[0].dtype == bool else values.rows[of].shape[: len(arrays)]
        count = math.prod(lead)
        if len(arrays) != len(index) or not arrays or not row.shape[0] < count <= _MOST:
            continue
        if arrays[0].dtype == bool:
            rows = np.flatnonzero(arrays[0])
        elif all(array.shape == (row.shape[0],) and array.dtype.kind in "iu" for array in arrays):
            rows = np.ravel_multi_index(tuple(arrays), lead, mode="wrap")
        else:
            continue
        if len(rows) == row.shape[0]:
            yield k, source, count, rows.astype(np.int64)


def _agreed(values: Values, number: int) -> int | None:
    """The value itself, or that of which it is a copy or a part, which has an equal."""
    while number not in values.equal and values.copies(number):
        number = values.rows[number].inputs[-1]
    return number if number in values.equal else None


def _chosen_of_others(values: Values) -> set[int]:
    """Rows that are chosen of what has no equal: they would agree, although the others do not."""
    found = set[int]()
    for k, row in enumerate(values.rows):
        chosen = _CHOOSES.match(row.operation) and _agreed(values, row.inputs[0]) is None
        found |= {k} if chosen or (values.copies(k) and not found.isdisjoint(row.inputs)) else set()
    return found


def _padded(values: Values) -> Iterator[tuple[int, np.ndarray]]:
    """(how many rows there are after something is padded at its end, those before)."""
    for k in sorted(values.live()):
        row = values.rows[k]
        if row.operation == "aten.constant_pad_nd":
            before = values.rows[row.inputs[0]].shape
            for was, is_now in zip(before, row.shape, strict=True):
                if was < is_now <= _MOST:
                    yield is_now, np.arange(was)


def _in_rows(array: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """An array as parts of so many rows each, where its first axes are such."""
    size = 1
    for axis, length in enumerate(array.shape):
        size *= length
        if size % count == 0 and size // count <= _PARTS:
            yield array.reshape(size // count, count, *array.shape[axis + 1 :])
