"""Packs documents into rows of one length, each once, so that any row can be made at any time.

A document is what stands between two separators in the ids, such as <|endoftext|>: with the one before it, which is its
first token, and, if the same token ends texts, with the one behind it, which is its last label.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jax_tformer.config import IGNORED
from jax_tformer.config.experiment import Packing
from jax_tformer.data.order import Batch, Items
from jax_tformer.data.shards import Ids

_BLOCK = 2**22
"""Ids that are searched together."""
_TOGETHER = 2**12
"""Pieces of documents that best fit packs together."""


@dataclass(frozen=True)
class Packs:
    """Rows of pieces of documents; row i has the pieces rows[i] to rows[i + 1].

    A piece of n tokens has n + 1 ids, of which all but the last are its tokens, and all but the first its labels.
    """

    begins: np.ndarray
    """Where each piece begins in the ids, int64[N]."""
    sizes: np.ndarray
    """The tokens of each piece, int64[N]."""
    rows: np.ndarray
    """int64[R + 1]."""

    def __len__(self) -> int:
        return len(self.rows) - 1


def find_documents(ids: Ids, separator: int, closes: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns where each document begins in `ids` and how many tokens it has, int64[N]; `closes`: it ends texts too."""
    blocks = range(0, len(ids), _BLOCK)
    found = [first + np.flatnonzero(ids[first : first + _BLOCK] == separator) for first in blocks]
    # What stands before the first separator is the rest of a document.
    begins = np.union1d([0], np.concatenate([*found, []])).astype(np.int64)
    sizes = np.append(begins[1:] + closes, len(ids)) - begins - 1
    return begins[sizes > 0], sizes[sizes > 0]


def pack(begins: np.ndarray, sizes: np.ndarray, length: int, packing: Packing) -> Packs:
    """Packs documents, int64[N], into rows of `length` tokens."""
    return Packs(*_POLICIES[packing](begins, sizes, length))


Pieces = tuple[np.ndarray, np.ndarray, np.ndarray]


def _concatenate(begins: np.ndarray, sizes: np.ndarray, length: int) -> Pieces:
    """Divides documents where rows end; the rest of the last ones fills no row."""
    ends = np.cumsum(sizes)
    borders = np.arange(0, sizes.sum() + 1, length)
    cuts = np.union1d(borders, ends[ends < borders[-1]])
    starts = cuts[:-1]
    document = np.searchsorted(ends, starts, side="right")
    return begins[document] + starts - (ends - sizes)[document], np.diff(cuts), np.searchsorted(cuts, borders)


def _crop(begins: np.ndarray, sizes: np.ndarray, length: int) -> Pieces:
    """Begins each row with a document, and leaves out what of the last one does not fit."""
    ends, last, full = np.cumsum(sizes), list[int](), [length]
    while full[-1] <= ends[-1]:
        last.append(int(np.searchsorted(ends, full[-1])))
        full.append(int(ends[last[-1]]) + length)
    cropped = sizes.copy()
    cropped[last] -= ends[last] - full[:-1]
    rows = np.append(0, np.array(last, np.int64) + 1)
    return begins[: rows[-1]], cropped[: rows[-1]], rows


def _best_fit(begins: np.ndarray, sizes: np.ndarray, length: int) -> Pieces:
    """Puts each document, the longest first, where it leaves the least room (Ding et al., 2024), a few at a time.

    Only documents that are longer than a row are divided.
    """
    parts = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), parts)
    done = length * (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts))
    begins, sizes = begins[document] + done, np.minimum(sizes[document] - done, length)
    row_of, rows = np.zeros(len(sizes), np.int64), 0
    for first in range(0, len(sizes), _TOGETHER):
        room = list[tuple[int, int]]()
        together = sizes[first : first + _TOGETHER]
        for piece in np.argsort(-together, kind="stable").tolist():
            size = int(together[piece])
            at = bisect_left(room, (size, 0))
            if at < len(room):
                left, row = room.pop(at)
            else:
                left, row, rows = length, rows, rows + 1
            row_of[first + piece] = row
            insort(room, (left - size, row))
    order = np.argsort(row_of, kind="stable")
    return begins[order], sizes[order], np.append(0, np.cumsum(np.bincount(row_of)))


_POLICIES: dict[Packing, Callable[[np.ndarray, np.ndarray, int], Pieces]] = {
    "concatenate": _concatenate,
    "best_fit": _best_fit,
    "crop": _crop,
}


def packed_rows(ids: Ids, packs: Packs, length: int, pad_id: int | None) -> Items:
    """Makes rows {"tokens", "labels", "segments": int32[R, T]} of the pieces of `ids`.

    Segments number the documents of a row from 1. With a `pad_id` rows have "mask": bool[R, T] too, which is False at
    padding; there the segment is 0, and the label is IGNORED.
    """

    def read(numbers: np.ndarray) -> Batch:
        tokens, labels, segments = (np.full((len(numbers), length), x, np.int32) for x in (pad_id or 0, IGNORED, 0))
        for row, number in enumerate(numbers):
            pieces, at = range(packs.rows[number], packs.rows[number + 1]), 0
            for segment, piece in enumerate(pieces, 1):
                begin, size = packs.begins[piece], packs.sizes[piece]
                found, there = ids[begin : begin + size + 1], slice(at, at := at + size)
                tokens[row, there], labels[row, there], segments[row, there] = found[:-1], found[1:], segment
        batch = {"tokens": tokens, "labels": labels, "segments": segments}
        return batch if pad_id is None else batch | {"mask": segments > 0}

    return Items(len(packs), read)
