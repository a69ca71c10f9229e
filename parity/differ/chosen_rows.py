"""Rows that one side chooses and the other masks: what is computed of them alone has an equal among all rows."""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np

from parity.differ.fingerprints import fingerprint
from parity.differ.row_sets import is_whole
from parity.differ.values import Values

_CHOOSES = re.compile(r"aten\.(index|index_select|masked_select)")
_MOST, _CHOICES, _PARTS = 1 << 16, 8, 16
"""Rows, choices of rows, and parts of which an array of ours may consist, at most."""
_FEWEST = 3
"""Numbers, at least, by which rows are told from others."""


def match_chosen_rows(ours: Values, theirs: Values) -> None:
    """Notes in both sides which values of ours have, in the rows that theirs chooses, the numbers of values of theirs;
    and which hold numbers that theirs has one by one, as the loss of each layer."""
    choices: dict[int, list[np.ndarray]] = {}
    for count, picked in islice(dict.fromkeys(_choices(theirs)), _CHOICES):
        choices.setdefault(count, []).append(np.frombuffer(picked, np.int64))
    index = theirs.index(theirs.live() - theirs.equal.keys())

    def equals(part: np.ndarray, rows: Sequence[np.ndarray]) -> list[int]:
        chosen = (part[each] for each in rows)
        features = (fingerprint(x, depends_on_data=True)[0] for x in chosen if x.size >= _FEWEST)
        return next((found for each in features if each is not None and (found := index.equals(each))), [])

    for i in sorted(ours.live() - ours.equal.keys()):
        row, array = ours.rows[i], ours.arrays.get(i)
        if array is None or not row.data or row.features is None or is_whole(row.dtype):
            continue
        tried = ([equals(part, rows) for part in parts] for n, rows in choices.items() for parts in _in_parts(array, n))
        single = [fingerprint(x, depends_on_data=True)[0] for x in array.reshape(-1, 1) if 1 < array.size <= _PARTS]
        one_by_one = [index.equals(each) if each is not None else [] for each in single]
        for j in dict.fromkeys(j for each in next(filter(all, chain(tried, [one_by_one])), []) for j in each):
            ours.equal.setdefault(i, []).append(j)
            theirs.equal.setdefault(j, []).append(i)


def _choices(values: Values) -> Iterator[tuple[int, bytes]]:
    """(of how many rows, which are chosen), as where an array is indexed by truth values or by lists of places."""
    for k in sorted(values.live()):
        row = values.rows[k]
        if not _CHOOSES.match(row.operation) or not row.shape:
            continue
        source, *index = row.inputs
        arrays = [array for i in index if (array := values.arrays.get(i)) is not None]
        lead = arrays[0].shape if arrays and arrays[0].dtype == bool else values.rows[source].shape[: len(arrays)]
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
            yield count, rows.astype(np.int64).tobytes()


def _in_parts(array: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """An array as parts of so many rows each, where its first axes are such."""
    size = 1
    for axis, length in enumerate(array.shape):
        size *= length
        if size % count == 0 and size // count <= _PARTS:
            yield array.reshape(size // count, count, *array.shape[axis + 1 :])
