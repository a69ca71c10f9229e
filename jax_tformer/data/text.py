"""Makes batches of text: of windows of it, masked or not, or of documents that are packed into rows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import tokenizers

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import require
from jax_tformer.config.experiment import MaskedTextData, TextData, TrainingConfig
from jax_tformer.data.order import Batch, Items, Part, Shape, Source, as_read
from jax_tformer.data.packing import find_documents, pack, packed_rows
from jax_tformer.data.shards import Corpus, Ids, open_shards
from jax_tformer.data.sources import TABLES, held_out_items, load_text, shard_files, split_text, text_files
from jax_tformer.data.tokenizers import Framing, Tokenizer
from jax_tformer.files import kept


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
    masks, framing = isinstance(data, MaskedTextData), tokenizer.framing
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
    corpus, parts = read_corpus(data, tokenizer, first), list[Items]()
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
        self._fraction, self._mask_id = data.masked, tokenizer.require("mask", "to mask text with")
        self._ordinary_ids = tokenizer.ordinary_ids
        self._before, self._after = around.before, around.after

    def __call__(self, batch: Batch, generator: np.random.Generator, rows: np.ndarray, of: int) -> Batch:
        """Masks the `rows`, int[R], of a batch `of` B: see `Finish`."""
        original, length = batch["tokens"], batch["tokens"].shape[1]
        order, fate = generator.random((of, length))[rows], generator.random((of, length))[rows]
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
    shape = Shape(training.batch_size, [Part(made[0], made[1])])
    return Source([shape], corpus.content, bytes_per_token=corpus.bytes_for(tokens), notes=[*corpus.notes, *notes])


def _equations(data: TextData, training: TrainingConfig, tokenizer: Tokenizer) -> Source:
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

    shape = Shape(training.batch_size, [Part(items(ids[~held_out]), items(ids[held_out]))])
    return Source([shape], [text])


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
