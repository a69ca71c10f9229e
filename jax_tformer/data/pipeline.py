"""Makes the tokenizer and the batches that an experiment's data describes: of text in windows, or of pairs."""

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import tokenizers

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import require, require_ids
from jax_tformer.config.experiment import MaskedTextData, PairData, TextData, TrainingConfig
from jax_tformer.data import dates
from jax_tformer.data.shards import Corpus, TokenWindows, open_shards
from jax_tformer.data.sources import (
    TABLES,
    Rows,
    held_out_items,
    held_out_pairs,
    load_pairs,
    load_text,
    shard_files,
    split_text,
    text_files,
    training_texts,
)
from jax_tformer.data.tokenizers import Framing, Pieces, Role, Tokenizer, build_tokenizer, pair_framing
from jax_tformer.files import combined_hash, kept

if TYPE_CHECKING:
    # Imported at first use because it imports JAX, so that errors in the data are reported sooner.
    import grain

Batch = dict[str, np.ndarray]
"""Arrays of B rows, or of those that one process makes: "tokens", or "source" and "target" with masks, and "labels"."""
Pair = tuple[str, str]
PairIds = tuple[np.ndarray, np.ndarray]
_DATE_SAMPLES = 10_000
_TOGETHER = 2**12
"""Texts that are encoded together."""
_FEW = 0.05
"""The fraction of pairs that may be left out without a warning."""
_REST = 0.01
"""The lengths that a warning recommends leave out at most this fraction."""


@dataclass(frozen=True)
class Pipeline:
    """The batches of one experiment, or the rows of them that one process makes.

    All have the same shapes, so that the step is compiled only once.
    """

    train: "grain.MapDataset[Batch]"
    """Endless training batches; a batch depends only on its number and the seed."""
    evaluation: list[Batch]
    """Held-out batches; in rows that fill up the last one, all labels are IGNORED."""
    fingerprint: str
    """A hash of all that decides the batches; a run continues only with the same fingerprint."""
    bytes_per_token: float | None = None
    """UTF-8 bytes per token of the held-out text; None for pairs and masked text."""
    examples: list[tuple[str, str]] | None = None
    """Held-out (source, target) pairs; None for text."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user about the data, a line each."""
    seen: list[Batch] | None = None
    """Training items, whose right answers are counted beside those of held-out ones; None: neither are."""

    def train_iterator(self) -> "grain.DatasetIterator[Batch]":
        """Iterates over the training batches, which a background thread makes.

        `get_state()` returns a small dict for JSON; `set_state(state)` continues with the batch that was next then.
        """
        import grain

        return iter(self.train.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def build_tokenizer_for(data: TextData | PairData) -> Tokenizer:
    """Makes the tokenizer for `data`, from its text if its kind needs that.

    BPE is trained on the training part only. A tokenizer of characters or words takes those of all text, because
    held-out text must be encodable.

    Raises InputError if the text cannot be read or the tokenizer cannot be loaded.
    """
    return build_tokenizer(data.tokenizer, _texts(data), special_tokens_for(data))


def build_pipeline(
    data: TextData | PairData, training: TrainingConfig, tokenizer: Tokenizer, rows: np.ndarray | None = None
) -> Pipeline:
    """Makes the batches of `data`, of windows of text or of pairs: see `_windows_pipeline` and `PairBatcher.batch`.

    `rows`, int[R], are those of each batch that this process makes, in rising order; None: all. They are the same
    numbers whichever others are made. Raises InputError if the text cannot be read, is too short, or does not suit the
    tokenizer, and if no training pair or no held-out pair fits.
    """
    rows = np.arange(training.batch_size) if rows is None else rows
    if isinstance(data, PairData):
        make = _dates_pipeline if data.source == "dates" else _pairs_pipeline
        return make(data, training, PairBatcher(data, tokenizer), rows)
    if data.source == "modular-addition":
        return _equations_pipeline(data, training, tokenizer, rows)
    return _windows_pipeline(data, training, tokenizer, rows)


def special_tokens_for(data: TextData | PairData) -> Mapping[Role, str]:
    """Returns the special tokens, by role, of a tokenizer that is made for `data`."""
    if isinstance(data, PairData):
        return {"pad": "<|pad|>", "start": "<|start|>", "end": "<|end|>"}
    if isinstance(data, MaskedTextData):
        return {"pad": "<|pad|>", "mask": "<|mask|>"}
    # One token begins and ends texts, as in GPT-2. A character tokenizer has characters only, as in nanoGPT.
    return {} if data.tokenizer.kind in ("characters", "words") else {"start": "<|endoftext|>", "end": "<|endoftext|>"}


def _texts(data: TextData | PairData) -> Iterable[str]:
    """Returns the texts from which a tokenizer of this kind is made."""
    kind = data.tokenizer.kind
    if kind in ("bytes", "huggingface"):
        return ()
    if isinstance(data, TextData):
        told = f"{data.path} holds ids; expected the tokenizer that made them: --data.tokenizer.kind huggingface"
        require(not shard_files(data), f"{told} --data.tokenizer.name FOLDER --data.tokenizer.vocab-size None")
        text = load_text(data)
        return Pieces(text if kind in ("characters", "words") else split_text(text, data.held_out)[0])
    if data.source == "dates" and kind == "characters":
        return (dates.alphabet(),)
    if data.source == "dates":
        generator = np.random.default_rng(0)
        pairs = (dates.make_pair(generator, False, data.held_out) for _ in range(_DATE_SAMPLES))
        return list(chain.from_iterable(pairs))
    texts = load_pairs(data)
    return training_texts(data, texts) if kind == "bpe" else texts


MakeBatch = Callable[[np.ndarray, np.random.Generator, np.ndarray], Batch]
"""Makes some rows, int[R], of the batch of the items with these numbers, int64[B].

Whatever is random is drawn from the generator for all rows, so that a row does not depend on which others are made.
"""


def endless(make_batch: Callable[[int, np.random.Generator], Batch], seed: int) -> "grain.MapDataset[Batch]":
    """Makes endless training batches: `make_batch(number, generator)`, where number and seed decide the generator.

    Each element is a whole batch, because Grain takes six times as long to gather single rows.
    """
    import grain

    return grain.MapDataset.range(sys.maxsize).seed(seed).random_map(make_batch)


def shuffled(
    make_batch: MakeBatch, count: int, training: TrainingConfig, rows: np.ndarray
) -> "grain.MapDataset[Batch]":
    """Makes `rows` of endless training batches of `count` items.

    Every epoch reads all items, each in another random order.
    """

    def make(number: int, generator: np.random.Generator) -> Batch:
        return make_batch(shuffled_items(number, training.batch_size, count, training.seed), generator, rows)

    return endless(make, training.seed)


def shuffled_items(batch: int, batch_size: int, count: int, seed: int) -> np.ndarray:
    """Returns which of `count` items are in training batch number `batch`, int64[B].

    The order is that of grain.MapDataset.shuffle().repeat(), without an object for every item.
    """
    import grain

    positions = (divmod(batch * batch_size + row, count) for row in range(batch_size))
    return np.array(
        [
            grain.experimental.index_shuffle(index, max_index=count - 1, seed=(seed + epoch) % 2**32, rounds=4)
            for epoch, index in positions
        ]
    )


def thinned_out(make_batch: MakeBatch, count: int, training: TrainingConfig, rows: np.ndarray) -> list[Batch]:
    """Makes `rows` of the evaluation batches of `count` held-out items, the same for every seed.

    Rows that fill up the last batch repeat its last item, with labels that the loss ignores.
    """
    generator = np.random.default_rng(0)

    def make(items: np.ndarray) -> Batch:
        batch = make_batch(items, generator, np.minimum(rows, len(items) - 1))
        batch["labels"][rows >= len(items)] = IGNORED
        return batch

    return [make(items) for items in evaluation_items(count, training)]


def evaluation_items(count: int, training: TrainingConfig) -> list[np.ndarray]:
    """Chooses the held-out items of each evaluation batch, spread evenly if there are more than needed."""
    wanted = min(count, training.evaluate_batches * training.batch_size)
    items = np.arange(wanted) * count // wanted
    return [items[first : first + training.batch_size] for first in range(0, wanted, training.batch_size)]


def fingerprint(
    content: Iterable[str | memoryview], tokenizer: "Tokenizer", data: TextData | PairData, training: TrainingConfig
) -> str:
    """Returns the SHA-256, in hexadecimal, of what decides the batches: texts (or their UTF-8), tokenizer, settings.

    The paths of files and tokenizer do not count, so that they may be moved.
    """
    settings = dataclasses.asdict(data) | {"path": None, "target_path": None, "kind": type(data).__name__}
    settings["tokenizer"]["name"] = None
    del settings["tokenizer"]["revision"]
    settings |= {"batch_size": training.batch_size, "seed": training.seed}
    return combined_hash(chain([json.dumps(settings, sort_keys=True), tokenizer.to_json()], content))


def check_batch_ids(batch: Batch, vocab_size: int | None) -> None:
    """Calls `require_ids` for every array of a batch that the model embeds."""
    for name in ("tokens", "source", "target"):
        if name in batch:
            require_ids(batch[name], vocab_size or 0)


def windows(stream: np.ndarray | TokenWindows, length: int, stride: int) -> np.ndarray | TokenWindows:
    """Returns all windows of `stream`, [N, length], as a view; each begins `stride` ids after the previous one."""
    if isinstance(stream, TokenWindows):
        return dataclasses.replace(stream, length=length, stride=stride)
    return np.lib.stride_tricks.sliding_window_view(stream, length)[::stride]


def token_stream(tokenizer: Tokenizer, text: memoryview, first: Sequence[int] = ()) -> np.ndarray:
    """Returns `first` and then the ids of `text`, as `Tokenizer.encode_text` does; caches ids that are slow to make."""
    if tokenizer.has_table:
        return tokenizer.encode_text(text, first)
    key = ("ids of pieces", tokenizers.__version__, tokenizer.to_json(), str(list(first)), text)
    return np.frombuffer(kept(key, lambda: tokenizer.encode_text(text, first).data), tokenizer.id_type)


def _windows_pipeline(data: TextData, training: TrainingConfig, tokenizer: Tokenizer, rows: np.ndarray) -> Pipeline:
    """Makes `rows` of batches {"tokens": int32[B, T], "labels": int32[B, T]} of windows of text.

    For language models the label of a token is the next token, and the text begins with the start token if the
    tokenizer has one. For masked data the label is the original token, or IGNORED where nothing was masked. The seed
    masks each window differently in every epoch; held-out windows are masked alike for all seeds. Held-out windows do
    not overlap. If there are more than the evaluation batches hold, they are taken at even distances.

    Raises InputError if either part of the text is too short for one window, or if a tokenizer for masked data has no
    mask token.
    """
    start = () if tokenizer.start_id is None else (tokenizer.start_id,)
    masking, around = None, Framing((), ())
    first = start if tokenizer.framing is None else tokenizer.framing.before
    if isinstance(data, MaskedTextData):
        masking = data.masked, tokenizer.require("mask", "to mask text with"), tokenizer.ordinary_ids
        # Every window of a checkpoint's tokenizer is framed, like the texts that the checkpoint has read.
        first, around = (), tokenizer.framing or around
    inside = data.context_length - around.size
    require(
        inside > 0,
        f"context_length is {data.context_length}; expected more than the {around.size} special tokens of every window",
    )
    length = inside if masking else inside + 1
    corpus = _read_corpus(data, tokenizer, first)
    for name, part in (("training", corpus.train), ("held-out", corpus.held_out)):
        require(
            len(part) >= length,
            f"the {name} part of the text has {len(part):,} tokens; expected at least {length:,}, for one window; "
            "give more text, a smaller --data.context-length or another --data.held-out",
        )
    train, held_out = windows(corpus.train, length, data.stride), windows(corpus.held_out, length, inside)

    def batches_of(windows: np.ndarray | TokenWindows) -> MakeBatch:
        def make_batch(items: np.ndarray, generator: np.random.Generator, rows: np.ndarray) -> Batch:
            chosen = windows[items[rows]].astype(np.int32)
            if not masking:
                # Each token but the first is predicted from those before it. Copies, because labels may be changed.
                return {"tokens": chosen[:, :-1].copy(), "labels": chosen[:, 1:].copy()}
            batch = mask_tokens(chosen, generator, *masking, rows=rows, of=len(items))
            before, after = (
                np.tile(np.array(ids, np.int32), (len(chosen), 1)) for ids in (around.before, around.after)
            )
            sides = (0, 0), (len(around.before), len(around.after))
            return {
                "tokens": np.concatenate([before, batch["tokens"], after], axis=1),
                "labels": np.pad(batch["labels"], sides, constant_values=IGNORED),
            }

        return make_batch

    return Pipeline(
        train=shuffled(batches_of(train), len(train), training, rows),
        evaluation=thinned_out(batches_of(held_out), len(held_out), training, rows),
        fingerprint=fingerprint(corpus.content, tokenizer, data, training),
        bytes_per_token=None if masking else corpus.bytes_per_token,
        notes=corpus.notes,
    )


def _equations_pipeline(data: TextData, training: TrainingConfig, tokenizer: Tokenizer, rows: np.ndarray) -> Pipeline:
    """Makes `rows` of batches {"tokens": int32[B, T], "labels": int32[B, T]} of equations without their last word,
    which is the only label."""
    text = load_text(data)
    equations = str(text, "utf-8").splitlines()
    encoded, length = tokenizer.encode_batch(equations), data.context_length
    require(
        {*map(len, encoded)} == {length + 1},
        f"context_length is {length} and the tokenizer {data.tokenizer.kind!r}; expected 4 and 'words', because "
        "of an equation's five words the last one is predicted",
    )
    ids, held_out = np.stack(encoded), held_out_items(equations, data.held_out)

    def batches_of(chosen: np.ndarray) -> MakeBatch:
        def make_batch(items: np.ndarray, _: np.random.Generator, rows: np.ndarray) -> Batch:
            taken = chosen[items[rows]]
            labels = np.full((len(rows), length), IGNORED, np.int32)
            labels[:, -1] = taken[:, -1]
            return {"tokens": taken[:, :-1].copy(), "labels": labels}

        return make_batch

    train, rest = ids[~held_out], ids[held_out]
    return Pipeline(
        train=shuffled(batches_of(train), len(train), training, rows),
        evaluation=thinned_out(batches_of(rest), len(rest), training, rows),
        fingerprint=fingerprint([text], tokenizer, data, training),
        seen=thinned_out(batches_of(train), len(train), training, rows),
    )


def _read_corpus(data: TextData, tokenizer: Tokenizer, first: Sequence[int]) -> Corpus:
    """Opens shards, or encodes text, of which each part begins with the ids `first`."""
    if shard_files(data):
        return open_shards(data, tokenizer)
    text = load_text(data)
    parts = split_text(text, data.held_out)
    ids, held_out_ids = (token_stream(tokenizer, part, first) for part in parts)
    counts = Counter(path.suffix.lower() for path in text_files(data)) if data.source == "files" else Counter[str]()
    notes = [f"{counts[kind]:,} {kind} files are read as plain text" for kind in TABLES if counts[kind]]
    bytes_per_token = len(parts[1]) / max(1, len(held_out_ids) - len(first))
    return Corpus(ids, held_out_ids, [text], bytes_per_token, notes)


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


class PairBatcher:
    """Makes batches of pairs, padded to the S source and T target tokens of `data`, with start and end tokens.

    A tokenizer with a framing puts its own tokens around sources and targets, as the checkpoint that it is of.

    Raises InputError if the tokenizer lacks a start, end or padding token.
    """

    def __init__(self, data: PairData, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.lengths = tokenizer, (data.source_length, data.target_length)
        self._framing, self._pad_id = pair_framing(tokenizer), tokenizer.require("pad", "for pairs")

    @property
    def most(self) -> tuple[int, int]:
        """The most tokens of a source and of a target, without those around them."""
        source, target = self.lengths
        return source - self._framing.size, target - self._framing.size

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of every text, with those around it."""
        before, after = (np.array(ids, np.int32) for ids in (self._framing.before, self._framing.after))
        return [np.concatenate([before, ids, after]) for ids in self.tokenizer.encode_batch(texts)]

    def batch(self, pairs: Sequence[PairIds]) -> Batch:
        """Makes a batch of `pairs` of encoded texts, which must fit.

        It holds "source": int32[B, S], "source_mask": bool[B, S], "labels" and "target" (the labels shifted right):
        int32[B, T], and "target_mask": bool[B, T]. Masks are True at real tokens; elsewhere labels are IGNORED.
        """
        sides = zip(zip(*pairs, strict=True), self.lengths, strict=True)
        (source, source_mask), (labels, target_mask) = (_pad(rows, self._pad_id, length) for rows, length in sides)
        return {
            "source": source,
            "source_mask": source_mask,
            "target": np.where(target_mask, shift_right(labels, self._framing.start_id or 0), np.int32(self._pad_id)),
            "target_mask": target_mask,
            "labels": np.where(target_mask, labels, np.int32(IGNORED)),
        }


def _pad(rows: Sequence[np.ndarray], pad_id: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows with padding, int32[B, length], and where they are not padding."""
    is_token = np.arange(length) < np.array([len(row) for row in rows])[:, None]
    ids = np.full(is_token.shape, pad_id, np.int32)
    ids[is_token] = np.concatenate(rows)
    return ids, is_token


def shift_right(ids: np.ndarray, start_id: int) -> np.ndarray:
    """Returns the decoder's input for labels `ids`, int32[..., T]: the start token, then all but the last label."""
    start = np.full((*ids.shape[:-1], 1), start_id, ids.dtype)
    return np.concatenate([start, ids[..., :-1]], axis=-1)


def _pairs_pipeline(data: PairData, training: TrainingConfig, batcher: PairBatcher, rows: np.ndarray) -> Pipeline:
    texts, tokenizer = load_pairs(data), batcher.tokenizer
    ids = _encoded(texts, batcher)
    lengths = (ids.sizes // np.dtype(tokenizer.id_type).itemsize).reshape(-1, 2)
    left_out = _left_out(lengths, batcher)
    (fitting,) = (lengths <= batcher.lengths).all(axis=1).nonzero()
    held_out = held_out_pairs(data, texts, fitting)
    training_pairs, evaluated = fitting[~held_out], fitting[held_out]
    because = f" ({left_out.removeprefix('warning: ')})" if left_out else ""
    require(
        bool(len(training_pairs) and len(evaluated)),
        f"there are {len(training_pairs)} training and {len(evaluated)} held-out pairs{because}; "
        "expected one of each at least; give more pairs, or a larger --data.source-length and --data.target-length",
    )

    def batches_of(chosen: np.ndarray) -> MakeBatch:
        return lambda items, _, rows: batcher.batch(
            [(ids[2 * pair], ids[2 * pair + 1]) for pair in chosen[items[rows]]]
        )

    return Pipeline(
        train=shuffled(batches_of(training_pairs), len(training_pairs), training, rows),
        evaluation=thinned_out(batches_of(evaluated), len(evaluated), training, rows),
        fingerprint=fingerprint(texts, tokenizer, data, training),
        examples=[(texts[2 * pair], texts[2 * pair + 1]) for pair in evaluated[: training.evaluate_examples]],
        notes=[left_out] if left_out else [],
    )


def _encoded(texts: Iterable[str], batcher: PairBatcher) -> Rows[np.ndarray]:
    """Returns the ids of all texts, as `PairBatcher.encode` does."""
    rest, kind = iter(texts), batcher.tokenizer.id_type
    groups = iter(lambda: list(islice(rest, _TOGETHER)), [])
    ids = (row for group in groups for row in batcher.encode(group))
    return Rows((row.astype(kind).tobytes() for row in ids), lambda row: np.frombuffer(row, kind))


def _left_out(lengths: np.ndarray, batcher: PairBatcher) -> str:
    """Says how many pairs with these `lengths`, int[N, 2], are too long, as a warning if many; "" if none are."""
    longer = lengths > batcher.lengths
    count, total = int(longer.any(axis=1).sum()), len(lengths)
    if not count:
        return ""
    sides = [
        f"{number:,} {side} have more than {limit} tokens"
        for number, side, limit in zip(longer.sum(axis=0).tolist(), ("sources", "targets"), batcher.most, strict=True)
        if number
    ]
    told = f"{count:,} of {total:,} pairs ({count / total:.1%}) are left out: {' and '.join(sides)}"
    if count <= _FEW * total:
        return told
    enough = np.quantile(lengths, 1 - _REST / 2, axis=0, method="higher")
    source, target = np.maximum(enough, batcher.lengths).tolist()
    return (
        f"warning: {told}; --data.source-length {source} and --data.target-length {target} "
        f"would keep {1 - _REST:.0%} of them all"
    )


def _dates_pipeline(data: PairData, training: TrainingConfig, batcher: PairBatcher, rows: np.ndarray) -> Pipeline:
    longest = dates.longest_sources(), [dates.LAST_DAY.isoformat()]
    source_length, target_length = (max(map(len, batcher.encode(texts))) for texts in longest)
    require(
        source_length <= data.source_length and target_length <= data.target_length,
        f"source_length is {data.source_length} and target_length is {data.target_length}; "
        f"the dates need at least {source_length} and {target_length} with this tokenizer",
    )

    def draw(count: int, held_out: bool, generator: np.random.Generator) -> list[tuple[Pair, PairIds]]:
        # The check above is exact for characters; with other tokenizers a few pairs may still be too long.
        drawn: list[tuple[Pair, PairIds]] = []
        while len(drawn) < count:
            pairs = [dates.make_pair(generator, held_out, data.held_out) for _ in range(count - len(drawn))]
            ids = batcher.encode(list(chain.from_iterable(pairs)))
            both = zip(pairs, zip(ids[::2], ids[1::2], strict=True), strict=True)
            drawn += [pair for pair in both if all(np.less_equal([*map(len, pair[1])], batcher.lengths))]
        return drawn

    def make_batch(held_out: bool, generator: np.random.Generator) -> Batch:
        drawn = draw(training.batch_size, held_out, generator)
        return batcher.batch([drawn[row][1] for row in rows])

    generator = np.random.default_rng(0)
    examples = [pair for pair, _ in draw(training.evaluate_examples, True, generator)]
    return Pipeline(
        train=endless(lambda _, generator: make_batch(False, generator), training.seed),
        evaluation=[make_batch(True, generator) for _ in range(training.evaluate_batches)],
        fingerprint=fingerprint([dates.description()], batcher.tokenizer, data, training),
        examples=examples,
    )
