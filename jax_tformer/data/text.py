"""Makes batches of text: of windows of it, masked or not, or of documents that are packed into rows.

A document is what stands between two separators in the ids, such as <|endoftext|>: with the one before it, which is its
first token, and, if the same token ends texts, with the one behind it, which is its last label. Each document is packed
once, so that any row can be made at any time.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import tokenizers

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import require
from jax_tformer.config.experiment import MaskedTextData, Packing, TextData, TrainingConfig
from jax_tformer.data.order import Batch, Items, Part, Shape, Source, as_read, held_out_items
from jax_tformer.data.sources import TABLES, Corpus, Ids, load_text, open_shards, shard_files, split_text, text_files
from jax_tformer.data.tokenizers import Framing, Tokenizer
from jax_tformer.files import kept

_BLOCK = 2**22
"""Ids that are searched together."""
_TOGETHER = 2**12
"""Pieces of documents that best fit packs together."""


def text_source(data: TextData, training: TrainingConfig, tokenizer: Tokenizer) -> Source:
    """Makes rows {"tokens": int32[B, T], "labels": int32[B, T]} of text.

    For language models the label of a token is the next one, and the text begins with the start token if the tokenizer
    has one; for `data.packing` see `packed_rows`, and for masked data `Masking`. Held-out windows do not overlap.

    Raises InputError if either part of the text is too short for one row, or if the tokenizer lacks a token.
    """
    if data.packing is not None:
        return _packed(data, training, tokenizer)
    if data.source == "modular-addition":
        return _equations(data, training, tokenizer)
    masks = isinstance(data, MaskedTextData)
    framing = tokenizer.framing
    # Every window of a checkpoint's tokenizer is framed, like the texts that the checkpoint has read.
    around = framing if masks and framing else Framing((), ())
    start = () if tokenizer.start_id is None else (tokenizer.start_id,)
    first = () if masks else framing.before if framing else start
    finish = Masking(data, tokenizer, around) if isinstance(data, MaskedTextData) else as_read
    inside = data.context_length - around.size
    require(
        inside > 0,
        f"context_length is {data.context_length}; expected more than the {around.size} special tokens of every window",
    )
    corpus = read_corpus(data, tokenizer, first)
    parts = []
    for name, ids, stride in (("training", corpus.train, data.stride), ("held-out", corpus.held_out, inside)):
        require(
            len(ids) >= inside + (not masks),
            f"the {name} part of the text has {len(ids):,} tokens; expected at least {inside + (not masks):,}, for one "
            "window; give more text, a smaller --data.context-length or another --data.held-out",
        )
        parts.append(windows(ids, inside, stride, labels=not masks))
    bytes_per_token = None if masks else corpus.bytes_for(len(corpus.held_out) - len(first))
    shape = Shape(training.batch_size, [Part(parts[0], parts[1])])
    return Source([shape], corpus.content, finish, bytes_per_token, notes=corpus.notes)


def windows(ids: Ids, length: int, stride: int, labels: bool) -> Items:
    """Returns all windows of `ids`, each `stride` ids after the one before; labels are the next tokens."""

    def read(numbers: np.ndarray) -> Batch:
        rows = np.stack([ids[first : first + length + labels] for first in numbers * stride]).astype(np.int32)
        # Copies, because labels may be changed.
        return {"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()} if labels else {"tokens": rows}

    return Items((len(ids) - length - labels) // stride + 1, read)


class Masking:
    """Masks a fraction of each row of tokens, at least one; the labels are the original tokens, elsewhere IGNORED.

    Of those tokens, 80% become the mask token, 10% become a random one that is not special, and 10% stay (BERT, section
    3.1). Then `around` is put around each row. Masks differ in every epoch; those of held-out rows are always the same.
    """

    def __init__(self, data: MaskedTextData, tokenizer: Tokenizer, around: Framing) -> None:
        self._fraction = data.masked
        self._mask_id = tokenizer.require("mask", "to mask text with")
        self._ordinary_ids = tokenizer.ordinary_ids
        self._before = around.before
        self._after = around.after

    def __call__(self, batch: Batch, generator: np.random.Generator, rows: np.ndarray, of: int) -> Batch:
        """Masks the `rows`, int[R], of a batch `of` B: see `Finish`."""
        original = batch["tokens"]
        length = batch["tokens"].shape[1]
        order = generator.random((of, length))[rows]
        fate = generator.random((of, length))[rows]
        chosen = order.argsort(axis=1) < max(1, round(self._fraction * length))
        tokens = np.where(chosen & (fate < 0.8), np.int32(self._mask_id), original)
        random_ids = generator.choice(self._ordinary_ids, (of, length))[rows]
        tokens = np.where(chosen & (fate >= 0.8) & (fate < 0.9), random_ids, tokens)
        labels = np.where(chosen, original, np.int32(IGNORED))
        before, after = (np.tile(np.array(ids, np.int32), (len(rows), 1)) for ids in (self._before, self._after))
        return {
            "tokens": np.concatenate([before, tokens, after], axis=1),
            "labels": np.concatenate([before * 0 + IGNORED, labels, after * 0 + IGNORED], axis=1),
        }


def _packed(data: TextData, training: TrainingConfig, tokenizer: Tokenizer) -> Source:
    """Makes rows of documents; raises InputError if nothing says where they begin, or if they fill no row."""
    assert data.packing is not None
    length = data.context_length
    separator = tokenizer.separator
    require(
        separator,
        "the tokenizer has neither a start nor an end token, so that nothing says where documents begin; expected one; "
        "leave --data.packing out, or use another tokenizer",
    )
    corpus = read_corpus(data, tokenizer, separator)
    made = []
    notes = []
    for name, ids in (("training", corpus.train), ("held-out", corpus.held_out)):
        begins, sizes = find_documents(ids, separator[0], closes=separator[0] == tokenizer.end_id)
        tokens = int(sizes.sum())
        documents = f"{len(sizes):,} documents"
        require(
            tokens >= length,
            f"the {documents} of the {name} part have {tokens:,} tokens; expected at least {length:,}, for one row; "
            "give more text, a smaller --data.context-length or another --data.held-out",
        )
        packs = pack(begins, sizes, length, data.packing)
        made.append(packed_rows(ids, packs, length, (tokenizer.pad_id or 0) if data.packing == "best_fit" else None))
        held = int(packs.sizes.sum())
        inside = int((~np.isin(packs.begins, begins)).sum())
        notes.append(
            f"{name} part, packed by {data.packing}: {documents} in {len(packs):,} rows of {length}; "
            f"{1 - held / len(packs) / length:.1%} of the places are padding, {1 - held / tokens:.1%} of the tokens "
            f"are cut off, {inside:,} pieces begin inside a document"
        )
    shape = Shape(training.batch_size, [Part(made[0], made[1])])
    return Source([shape], corpus.content, bytes_per_token=corpus.bytes_for(tokens), notes=[*corpus.notes, *notes])


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


Packed = tuple[np.ndarray, np.ndarray, np.ndarray]


def _concatenate(begins: np.ndarray, sizes: np.ndarray, length: int) -> Packed:
    """Divides documents where rows end; the rest of the last ones fills no row."""
    ends = np.cumsum(sizes)
    borders = np.arange(0, sizes.sum() + 1, length)
    cuts = np.union1d(borders, ends[ends < borders[-1]])
    starts = cuts[:-1]
    document = np.searchsorted(ends, starts, side="right")
    return begins[document] + starts - (ends - sizes)[document], np.diff(cuts), np.searchsorted(cuts, borders)


def _crop(begins: np.ndarray, sizes: np.ndarray, length: int) -> Packed:
    """Begins each row with a document, and leaves out what of the last one does not fit."""
    ends = np.cumsum(sizes)
    last = []
    full = [length]
    while full[-1] <= ends[-1]:
        last.append(int(np.searchsorted(ends, full[-1])))
        full.append(int(ends[last[-1]]) + length)
    cropped = sizes.copy()
    cropped[last] -= ends[last] - full[:-1]
    rows = np.append(0, np.array(last, np.int64) + 1)
    return begins[: rows[-1]], cropped[: rows[-1]], rows


def _best_fit(begins: np.ndarray, sizes: np.ndarray, length: int) -> Packed:
    """Puts each document, the longest first, where it leaves the least room (Ding et al., 2024), a few at a time.

    Only documents that are longer than a row are divided.
    """
    parts = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), parts)
    done = length * (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts))
    begins = begins[document] + done
    sizes = np.minimum(sizes[document] - done, length)
    row_of = np.zeros(len(sizes), np.int64)
    rows = 0
    for first in range(0, len(sizes), _TOGETHER):
        room = list[tuple[int, int]]()
        together = sizes[first : first + _TOGETHER]
        for piece in np.argsort(-together, kind="stable").tolist():
            size = int(together[piece])
            at = bisect_left(room, (size, 0))
            if at < len(room):
                left, row = room.pop(at)
            else:
                left = length
                row = rows
                rows += 1
            row_of[first + piece] = row
            insort(room, (left - size, row))
    order = np.argsort(row_of, kind="stable")
    return begins[order], sizes[order], np.append(0, np.cumsum(np.bincount(row_of)))


_POLICIES: dict[Packing, Callable[[np.ndarray, np.ndarray, int], Packed]] = {
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
            pieces = range(packs.rows[number], packs.rows[number + 1])
            at = 0
            for segment, piece in enumerate(pieces, 1):
                begin = packs.begins[piece]
                size = packs.sizes[piece]
                found, there = ids[begin : begin + size + 1], slice(at, at := at + size)
                tokens[row, there], labels[row, there], segments[row, there] = found[:-1], found[1:], segment
        batch = {"tokens": tokens, "labels": labels, "segments": segments}
        return batch if pad_id is None else batch | {"mask": segments > 0}

    return Items(len(packs), read)


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
    ids = np.stack(encoded)
    held_out = held_out_items(equations, data.held_out)

    def items(chosen: np.ndarray) -> Items:
        def read(numbers: np.ndarray) -> Batch:
            labels = np.full((len(numbers), length), IGNORED, np.int32)
            labels[:, -1] = chosen[numbers, -1]
            return {"tokens": chosen[numbers, :-1], "labels": labels}

        return Items(len(chosen), read)

    shape = Shape(training.batch_size, [Part(items(ids[~held_out]), items(ids[held_out]))])
    return Source([shape], [text])


def read_corpus(data: TextData, tokenizer: Tokenizer, first: Sequence[int]) -> Corpus:
    """Opens shards, or encodes text, of which each part, or each document that is to be packed, begins with `first`."""
    if shard_files(data):
        return open_shards(data, tokenizer)
    text, ends = load_text(data)
    parts = [[part] for part in split_text(text, data.held_out)]
    if data.packing is not None:
        cut = len(parts[0][0])
        starts = [0, *(end + 2 for end in ends[:-1])]
        spans = [*zip(starts, ends, strict=True)]
        parts[0] = [text[start : min(end, cut)] for start, end in spans if start < cut]
        parts[1] = [text[max(start, cut) : end] for start, end in spans if end > cut]
        # The last document ends too.
        parts = [[*part, memoryview(b"")] for part in parts]
    ids, held_out_ids = (token_stream(tokenizer, part, first) for part in parts)
    counts = Counter(path.suffix.lower() for path in text_files(data)) if data.source == "files" else Counter[str]()
    notes = [f"{counts[kind]:,} {kind} files are read as plain text" for kind in TABLES if counts[kind]]
    return Corpus(ids, held_out_ids, [text], sum(map(len, parts[1])), notes)


def token_stream(tokenizer: Tokenizer, texts: Sequence[memoryview], first: Sequence[int] = ()) -> np.ndarray:
    """Returns the ids of all `texts`, as `Tokenizer.encode_texts` does; caches those that are slow to make."""
    if tokenizer.has_table:
        return tokenizer.encode_texts(texts, first)
    said = ["ids of pieces", tokenizers.__version__, tokenizer.to_json(), str(list(first))]
    key: Iterable[str | memoryview] = chain(said, texts)
    return np.frombuffer(kept(key, lambda: tokenizer.encode_texts(texts, first).data), tokenizer.id_type)
