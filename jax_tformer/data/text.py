"""Makes batches of text: of windows of it, masked or not, or of documents that are packed into rows.

A document is what stands between two separators in the ids, such as <|endoftext|>: with the one before it, which is its
first token, and, if the same token ends texts, with the one behind it, which is its last label. Each document is packed
once, so that any row can be made at any time.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import MaskedTextData, Packing, TextData, TrainingConfig
from jax_tformer.data.order import Batch, Finish, Items, Part, Shape, Source, as_read, held_out_items
from jax_tformer.data.sources import (
    BLANK_LINE,
    TABLES,
    Corpus,
    Ids,
    load_text,
    open_shards,
    shard_files,
    text_files,
    training_end,
)
from jax_tformer.data.tokenizers import WORD, Framing, Tokenizer
from jax_tformer.files import batched

_BLOCK = 2**22
"""Ids that are searched together."""
_LONGEST = 2**16
"""Bytes that are looked at for the end of a word."""
_TOGETHER = 2**12
"""Pieces of documents that best fit packs together."""


def text_source(data: TextData, training: TrainingConfig, tokenizer: Tokenizer) -> Source:
    """Makes rows {"tokens": int32[B, T], "labels": int32[B, T]} of text.

    For language models the label of a token is the next one, and the text begins with the start token if the tokenizer
    has one; for `data.packing` see `packed_rows`, and for masked data `hiding`. Held-out windows do not overlap.

    Raises InputError if either part of the text is too short for one row, or if the tokenizer lacks a token.
    """
    if data.source == "modular-addition":
        return _equations(data, training, tokenizer)
    masked = isinstance(data, MaskedTextData)
    around = (masked and tokenizer.framing) or Framing()
    finish = hiding(data, tokenizer, around) if isinstance(data, MaskedTextData) else as_read
    length = data.context_length - around.size
    require(
        length > 0,
        f"context_length is {data.context_length}; expected more than the {around.size} special tokens of every window",
    )
    require(
        tokenizer.separator or data.packing is None,
        "the tokenizer has neither a start nor an end token, so that nothing says where documents begin; expected one; "
        "leave --data.packing out, or use another tokenizer",
    )
    first = () if masked else tokenizer.separator if data.packing else tokenizer.around.before
    corpus = read_corpus(data, tokenizer, first)
    parts = []
    notes = corpus.notes
    for name, ids, stride in (("training", corpus.train, data.stride), ("held-out", corpus.held_out, length)):
        items = windows(ids, length, stride, labels=not masked)
        labels = len(ids) - len(first)
        had = f"{len(ids):,} tokens; expected at least {length + (not masked):,}"
        if data.packing is not None:
            items, labels, told = packed_rows(ids, length, data.packing, tokenizer)
            notes = [*notes, f"{name} part, packed by {data.packing}: {told}"]
            had = f"{labels:,} tokens in documents; expected at least {length:,}"
        require(
            items.count > 0 and labels >= length,
            f"the {name} part of the text has {had}, for one row; give more text, a smaller --data.context-length or "
            "another --data.held-out",
        )
        parts.append(items)
    known = None if masked else corpus.held_out_bytes
    shape = Shape(training.batch_size, [Part(parts[0], parts[1])])
    return Source([shape], corpus.content, finish, known / labels if known else None, notes=notes)


def windows(ids: Ids, length: int, stride: int, labels: bool) -> Items:
    """Returns all windows of `ids`, each `stride` ids after the one before; labels are the next tokens."""

    def read(numbers: np.ndarray) -> Batch:
        rows = np.stack([ids[first : first + length + labels] for first in numbers * stride]).astype(np.int32)
        # Copies, because labels may be changed.
        return {"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()} if labels else {"tokens": rows}

    return Items((len(ids) - length - labels) // stride + 1, read)


def hiding(data: MaskedTextData, tokenizer: Tokenizer, around: Framing) -> Finish:
    """Makes what hides a fraction of each row of tokens, at least one; labels are those tokens, elsewhere IGNORED.

    Of those tokens, 80% become the mask token, 10% become a random one that is not special, and 10% stay (BERT, section
    3.1). Then the tokens `around` a text of a checkpoint are put around each row. Others are hidden in every
    epoch; those of held-out rows are always the same.
    """
    mask_id = tokenizer.require("mask", "to mask text with")
    ordinary_ids = tokenizer.ordinary_ids

    def hide(batch: Batch, generator: np.random.Generator, rows: np.ndarray, of: int) -> Batch:
        original = batch["tokens"]
        length = original.shape[1]
        order = generator.random((of, length))[rows]
        fate = generator.random((of, length))[rows]
        random_ids = generator.choice(ordinary_ids, (of, length))[rows]
        chosen = order.argsort(axis=1) < max(1, round(data.masked * length))
        # The first condition that holds counts.
        tokens = np.select([~chosen, fate < 0.8, fate < 0.9], [original, np.int32(mask_id), random_ids], original)
        labels = np.where(chosen, original, np.int32(IGNORED))
        before, after = (np.tile(np.array(ids, np.int32), (len(rows), 1)) for ids in (around.before, around.after))
        return {
            "tokens": np.concatenate([before, tokens, after], axis=1),
            "labels": np.concatenate([before * 0 + IGNORED, labels, after * 0 + IGNORED], axis=1),
        }

    return hide


def packed_rows(ids: Ids, length: int, packing: Packing, tokenizer: Tokenizer) -> tuple[Items, int, str]:
    """Makes rows {"tokens", "labels", "segments": int32[R, T]} of documents; says their tokens, and what is lost.

    Segments number the documents of a row from 1. Rows that may have padding have "mask": bool[R, T] too, which is
    False at padding; there the segment is 0, and the label is IGNORED.
    """
    separator = tokenizer.separator[0]
    blocks = range(0, len(ids), _BLOCK)
    found = [first + np.flatnonzero(ids[first : first + _BLOCK] == separator) for first in blocks]
    # Where documents begin. What stands before the first separator is the rest of one.
    documents = np.unique(np.concatenate([[0], *found]))
    # A separator that ends texts, too, is the last label of the document before it.
    sizes = np.append(documents[1:] + (separator == tokenizer.end_id), len(ids)) - documents - 1
    documents, sizes = documents[sizes > 0], sizes[sizes > 0]
    packs = pack(documents, sizes, length, packing)

    def read(numbers: np.ndarray) -> Batch:
        pad_id = tokenizer.pad_id or 0
        tokens, labels, segments = (np.full((len(numbers), length), x, np.int32) for x in (pad_id, IGNORED, 0))
        for row, number in enumerate(numbers):
            at = 0
            for segment, piece in enumerate(range(packs.rows[number], packs.rows[number + 1]), 1):
                begin = packs.begins[piece]
                size = packs.sizes[piece]
                found, there = ids[begin : begin + size + 1], slice(at, at := at + size)
                tokens[row, there], labels[row, there], segments[row, there] = found[:-1], found[1:], segment
        batch = {"tokens": tokens, "labels": labels, "segments": segments}
        return batch | {"mask": segments > 0} if packing == "best_fit" else batch

    count = len(packs.rows) - 1
    held = packs.sizes.sum()
    inside = np.isin(packs.begins, documents, invert=True).sum()
    told = (
        f"{len(sizes):,} documents in {count:,} rows of {length}; {1 - held / max(1, count * length):.1%} of the "
        f"places are padding, {1 - held / max(1, sizes.sum()):.1%} of the tokens are cut off, {inside:,} pieces begin "
        "inside a document"
    )
    return Items(count, read), int(sizes.sum()), told


class Packs(NamedTuple):
    """Rows of pieces of documents; row i has the pieces rows[i] to rows[i + 1].

    A piece of n tokens has n + 1 ids, of which all but the last are its tokens, and all but the first its labels.
    """

    begins: np.ndarray
    """Where each piece begins in the ids, int64[N]."""
    sizes: np.ndarray
    """The tokens of each piece, int64[N]."""
    rows: np.ndarray
    """int64[R + 1]."""


Piece = tuple[int, int]
"""Where a document or a part of it begins in the ids, and how many tokens it has."""


def pack(begins: np.ndarray, sizes: np.ndarray, length: int, packing: Packing) -> Packs:
    """Packs documents, int64[N], into rows of `length` tokens."""
    documents = zip(begins.data, sizes.data, strict=True)
    rows = _best_fit(documents, length) if packing == "best_fit" else _in_turn(documents, length, packing == "crop")
    pieces = ((number, *piece) for number, row in enumerate(rows) for piece in row)
    numbers, placed, taken = np.fromiter(pieces, np.dtype((np.int64, 3))).T.copy()
    return Packs(placed, taken, np.append(0, np.cumsum(np.bincount(numbers))))


def _in_turn(documents: Iterable[Piece], length: int, crops: bool) -> Iterator[list[Piece]]:
    """Fills one row after the other. What of the last document does not fit is left out, or begins the next row."""
    row = list[Piece]()
    left = length
    for begin, size in documents:
        while size:
            taken = min(size, left)
            row.append((begin, taken))
            begin += taken
            size = 0 if crops else size - taken
            left -= taken
            if not left:
                yield row
                row = []
                left = length


def _best_fit(documents: Iterable[Piece], length: int) -> Iterator[list[Piece]]:
    """Puts each document, the longest first, where it leaves the least room (Ding et al., 2024), a few at a time.

    Only documents that are longer than a row are divided.
    """
    pieces = ((begin + at, min(size - at, length)) for begin, size in documents for at in range(0, size, length))
    for together in batched(pieces, _TOGETHER):
        rows = list[list[Piece]]()
        # The room that is left in each of the rows, the least first.
        room = list[tuple[int, int]]()
        for piece in sorted(together, key=lambda piece: -piece[1]):
            at = bisect_left(room, (piece[1], 0))
            left, row = room.pop(at) if at < len(room) else (length, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(piece)
            insort(room, (left - piece[1], row))
        yield from map(sorted, rows)


def _equations(data: TextData, training: TrainingConfig, tokenizer: Tokenizer) -> Source:
    """Makes rows of equations without their last word, which is the only label."""
    text = load_text(data).content
    length = data.context_length
    equations = str(text, "utf-8").splitlines()
    encoded = tokenizer.encode_batch(equations)
    require(
        {*map(len, encoded)} == {length + 1},
        f"context_length is {length} and the tokenizer {data.tokenizer.kind!r}; expected 4 and 'words', because "
        "of an equation's five words the last one is predicted",
    )
    held_out = held_out_items(equations, data.held_out)
    sides = (np.stack(encoded)[chosen].ravel() for chosen in (~held_out, held_out))
    train, other = (windows(ids, length, length + 1, labels=True) for ids in sides)

    def finish(batch: Batch, *_: object) -> Batch:
        batch["labels"][:, :-1] = IGNORED
        return batch

    return Source([Shape(training.batch_size, [Part(train, other)])], [text], finish)


def _word_end(text: memoryview, place: int, tokenizer: Tokenizer) -> int:
    """Returns the end of the word that a cut at `place` would halve into what the vocabulary lacks, or its beginning
    where the text ends with it; else `place`."""
    before, after = _decoded(text[max(0, place - _LONGEST) : place]), _decoded(text[place : place + _LONGEST])
    first, second = WORD.match(before[::-1]), WORD.match(after)
    if first is None or second is None:
        return place
    try:
        tokenizer.encode(f"{first[0][::-1]} {second[0]}")
    except InputError:
        end = place + len(second[0].encode())
        return end if _decoded(text[end : end + _LONGEST]).strip() else place - len(first[0].encode())
    return place


def _decoded(text: memoryview) -> str:
    return str(text, "utf-8", "ignore")


def read_corpus(data: TextData, tokenizer: Tokenizer, first: Sequence[int]) -> Corpus:
    """Opens shards, or encodes text, of which each part, or each document that is to be packed, begins with `first`."""
    if shard_files(data):
        return open_shards(data, tokenizer)
    text, ends = load_text(data)
    spans = [(0, len(text))]
    closing = list[memoryview]()
    if data.packing is not None:
        spans = [*zip([0, *(end + len(BLANK_LINE) for end in ends[:-1])], ends, strict=True)]
        # The last document ends too.
        closing = [memoryview(b"")]
    cut = training_end(text, data.held_out)
    if data.tokenizer.kind == "words":
        cut = _word_end(text, cut, tokenizer)
    parts = [
        [text[max(start, begin) : min(end, close)] for start, end in spans if start < close and end > begin]
        for begin, close in ((0, cut), (cut, len(text)))
    ]
    ids, held_out_ids = (tokenizer.encode_texts([*part, *closing], first) for part in parts)
    files = text_files(data) if data.source == "files" else []
    counts = Counter(path.suffix.lower() for path in files)
    notes = [f"{counts[kind]:,} {kind} files are read as plain text" for kind in TABLES if counts[kind]]
    return Corpus(ids, held_out_ids, [text], sum(map(len, parts[1])), notes)
