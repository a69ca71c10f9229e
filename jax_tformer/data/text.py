"""Makes batches of text: of windows of it, masked or not, or of documents that are packed into rows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import tokenizers

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import require
from jax_tformer.config.experiment import MaskedTextData, TextData
from jax_tformer.data.order import Batch, Finish, Items, as_read
from jax_tformer.data.packing import find_documents, pack, packed_rows
from jax_tformer.data.shards import Corpus, Ids, open_shards
from jax_tformer.data.sources import TABLES, held_out_items, load_text, shard_files, split_text, text_files
from jax_tformer.data.tokenizers import Framing, Tokenizer
from jax_tformer.files import kept


class TextRows(NamedTuple):
    """The rows of a text, to train on and held out."""

    train: Items
    held_out: Items
    content: Sequence[str | memoryview]
    """What decides them, beside the settings: the text, or the SHA-256 of every file of ids."""
    bytes_per_token: float | None = None
    """UTF-8 bytes for each label of all that is held out, if they are known and tokens are predicted in order."""
    notes: Sequence[str] = ()


def text_rows(data: TextData, tokenizer: Tokenizer) -> tuple[TextRows, Finish]:
    """Makes rows of T tokens of a text, and what makes a batch of them.

    {"tokens": int32[B, T], "labels": int32[B, T]}: for language models the label of a token is the next token, and the
    text begins with the start token if the tokenizer has one. For masked data the label is the original token, or
    IGNORED where nothing was masked. Masks differ in every epoch; held-out windows are masked alike for all seeds, and
    do not overlap. For `data.packing` see `packed_rows`.

    Raises InputError if either part of the text is too short for one row, or if the tokenizer lacks a token.
    """
    if data.packing is not None:
        return _packed(data, tokenizer), as_read
    if data.source == "modular-addition":
        return _equations(data, tokenizer), as_read
    start = () if tokenizer.start_id is None else (tokenizer.start_id,)
    first, around, finish = tokenizer.framing.before if tokenizer.framing else start, Framing((), ()), _shift
    if isinstance(data, MaskedTextData):
        # Every window of a checkpoint's tokenizer is framed, like the texts that the checkpoint has read.
        first, around = (), tokenizer.framing or around
        mask_id = tokenizer.require("mask", "to mask text with")
        finish = partial(_mask_and_frame, data.masked, mask_id, tokenizer.ordinary_ids, around)
    inside = data.context_length - around.size
    require(
        inside > 0,
        f"context_length is {data.context_length}; expected more than the {around.size} special tokens of every window",
    )
    corpus = read_corpus(data, tokenizer, first)
    length = inside + (finish is _shift)
    for name, part in (("training", corpus.train), ("held-out", corpus.held_out)):
        require(
            len(part) >= length,
            f"the {name} part of the text has {len(part):,} tokens; expected at least {length:,}, for one window; "
            "give more text, a smaller --data.context-length or another --data.held-out",
        )
    train, held_out = windows(corpus.train, length, data.stride), windows(corpus.held_out, length, inside)
    labels = len(corpus.held_out) - len(first) if finish is _shift else 0
    return TextRows(train, held_out, corpus.content, corpus.bytes_for(labels), corpus.notes), finish


def windows(ids: Ids, length: int, stride: int) -> Items:
    """Returns all windows of `ids`, {"ids": int32[R, length]}; each begins `stride` ids after the one before."""

    def read(numbers: np.ndarray) -> Batch:
        return {"ids": np.stack([ids[first : first + length] for first in numbers * stride]).astype(np.int32)}

    return Items((len(ids) - length) // stride + 1, read)


def _shift(batch: Batch, generator: np.random.Generator, rows: np.ndarray, of: int) -> Batch:
    """Makes each token but the first the label of those before it. Copies, because labels may be changed."""
    return {"tokens": batch["ids"][:, :-1].copy(), "labels": batch["ids"][:, 1:].copy()}


def _mask_and_frame(
    fraction: float,
    mask_id: int,
    ordinary_ids: np.ndarray,
    around: Framing,
    batch: Batch,
    generator: np.random.Generator,
    rows: np.ndarray,
    of: int,
) -> Batch:
    """Masks windows with `mask_tokens`, and puts the special tokens of a checkpoint around them."""
    batch = mask_tokens(batch["ids"], generator, fraction, mask_id, ordinary_ids, rows=rows, of=of)
    before, after = (np.tile(np.array(ids, np.int32), (len(rows), 1)) for ids in (around.before, around.after))
    sides = (0, 0), (len(around.before), len(around.after))
    return {
        "tokens": np.concatenate([before, batch["tokens"], after], axis=1),
        "labels": np.pad(batch["labels"], sides, constant_values=IGNORED),
    }


def mask_tokens(
    windows: np.ndarray,
    generator: np.random.Generator,
    fraction: float,
    mask_id: int,
    ordinary_ids: np.ndarray,
    *,
    rows: np.ndarray,
    of: int,
) -> Batch:
    """Masks a `fraction` of each of the `windows`, int32[R, T], at least one token; the labels are the original tokens.

    Of those tokens, 80% become the mask token, 10% become a random one of `ordinary_ids`, int32[N], and 10% stay (BERT,
    section 3.1). The windows are the `rows`, int[R], of a batch `of` B, and all of that is drawn.
    """
    length = windows.shape[1]
    order, fate = generator.random((of, length))[rows], generator.random((of, length))[rows]
    chosen = order.argsort(axis=1) < max(1, round(fraction * length))
    tokens = np.where(chosen & (fate < 0.8), np.int32(mask_id), windows)
    random_ids = generator.choice(ordinary_ids, (of, length))[rows]
    tokens = np.where(chosen & (fate >= 0.8) & (fate < 0.9), random_ids, tokens)
    return {"tokens": tokens, "labels": np.where(chosen, windows, np.int32(IGNORED))}


def _packed(data: TextData, tokenizer: Tokenizer) -> TextRows:
    """Makes rows of documents; raises InputError if nothing says where they begin, or if they fill no row."""
    assert data.packing is not None
    length, separator = data.context_length, tokenizer.separator
    require(
        bool(separator),
        "the tokenizer has neither a start nor an end token, so that nothing says where documents begin; expected one; "
        "leave --data.packing out, or use another tokenizer",
    )
    corpus, made, notes = read_corpus(data, tokenizer, separator), list[Items](), list[str]()
    for name, ids in (("training", corpus.train), ("held-out", corpus.held_out)):
        begins, sizes = find_documents(ids, separator[0], closes=separator[0] == tokenizer.end_id)
        tokens, documents = int(sizes.sum()), f"{len(sizes):,} documents"
        require(
            tokens >= length,
            f"the {documents} of the {name} part have {tokens:,} tokens; expected at least {length:,}, for one row; "
            "give more text, a smaller --data.context-length or another --data.held-out",
        )
        packs = pack(begins, sizes, length, data.packing)
        made.append(packed_rows(ids, packs, length, (tokenizer.pad_id or 0) if data.packing == "best_fit" else None))
        held, inside = int(packs.sizes.sum()), int((~np.isin(packs.begins, begins)).sum())
        notes.append(
            f"{name} part, packed by {data.packing}: {documents} in {len(packs):,} rows of {length}; "
            f"{1 - held / len(packs) / length:.1%} of the places are padding, {1 - held / tokens:.1%} of the tokens "
            f"are cut off, {inside:,} pieces begin inside a document"
        )
    return TextRows(made[0], made[1], corpus.content, corpus.bytes_for(tokens), [*corpus.notes, *notes])


def _equations(data: TextData, tokenizer: Tokenizer) -> TextRows:
    """Makes rows of equations without their last word, which is the only label."""
    text, length = load_text(data).content, data.context_length
    equations = str(text, "utf-8").splitlines()
    encoded = tokenizer.encode_batch(equations)
    require(
        {*map(len, encoded)} == {length + 1},
        f"context_length is {length} and the tokenizer {data.tokenizer.kind!r}; expected 4 and 'words', because "
        "of an equation's five words the last one is predicted",
    )
    ids, held_out = np.stack(encoded), held_out_items(equations, data.held_out)

    def items(chosen: np.ndarray) -> Items:
        def read(numbers: np.ndarray) -> Batch:
            labels = np.full((len(numbers), length), IGNORED, np.int32)
            labels[:, -1] = chosen[numbers, -1]
            return {"tokens": chosen[numbers, :-1], "labels": labels}

        return Items(len(chosen), read)

    return TextRows(items(ids[~held_out]), items(ids[held_out]), [text])


def read_corpus(data: TextData, tokenizer: Tokenizer, first: Sequence[int]) -> Corpus:
    """Opens shards, or encodes text, of which each part, or each document that is to be packed, begins with `first`."""
    if shard_files(data):
        return open_shards(data, tokenizer)
    text, ends = load_text(data)
    parts = [[part] for part in split_text(text, data.held_out)]
    if data.packing is not None:
        cut, starts = len(parts[0][0]), [0, *(end + 2 for end in ends[:-1])]
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
