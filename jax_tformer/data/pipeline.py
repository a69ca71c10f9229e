"""Makes the tokenizer and the batches that an experiment's data describes: of text in windows, or of pairs."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import require, require_ids
from jax_tformer.config.experiment import MaskedTextData, PairData, TextData, TrainingConfig
from jax_tformer.data import dates
from jax_tformer.data.order import Batch, Items, Shape, endless, make_batches, shuffled
from jax_tformer.data.sources import (
    Rows,
    held_out_pairs,
    load_pairs,
    load_text,
    shard_files,
    split_text,
    training_texts,
)
from jax_tformer.data.text import text_rows
from jax_tformer.data.tokenizers import Pieces, Role, Tokenizer, build_tokenizer, pair_framing
from jax_tformer.files import combined_hash

if TYPE_CHECKING:
    # Imported at first use because it imports JAX, so that errors in the data are reported sooner.
    import grain

Pair = tuple[str, str]
PairIds = tuple[np.ndarray, np.ndarray]
_LATER = ("packing",)
"""Fields that data of older runs has not."""
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
    notes: Sequence[str] = ()
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
    """Makes the batches of `data`, of text or of pairs: see `text_rows` and `PairBatcher.batch`.

    `rows`, int[R], are those of each batch that this process makes, in rising order; None: all. They are the same
    numbers whichever others are made. Raises InputError if the text cannot be read, is too short, or does not suit the
    tokenizer, and if no training pair or no held-out pair fits.
    """
    rows = np.arange(training.batch_size) if rows is None else rows
    if isinstance(data, PairData):
        make = _dates_pipeline if data.source == "dates" else _pairs_pipeline
        return make(data, training, PairBatcher(data, tokenizer), rows)
    return _text_pipeline(data, training, tokenizer, rows)


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
        text = load_text(data).content
        return Pieces([text if kind in ("characters", "words") else split_text(text, data.held_out)[0]])
    if data.source == "dates" and kind == "characters":
        return (dates.alphabet(),)
    if data.source == "dates":
        generator = np.random.default_rng(0)
        pairs = (dates.make_pair(generator, False, data.held_out) for _ in range(_DATE_SAMPLES))
        return list(chain.from_iterable(pairs))
    texts = load_pairs(data)
    return training_texts(data, texts) if kind == "bpe" else texts


def fingerprint(
    content: Iterable[str | memoryview], tokenizer: "Tokenizer", data: TextData | PairData, training: TrainingConfig
) -> str:
    """Returns the SHA-256, in hexadecimal, of what decides the batches: texts (or their UTF-8), tokenizer, settings.

    The paths of files and tokenizer do not count, so that they may be moved.
    """
    settings = dataclasses.asdict(data) | {"path": None, "target_path": None, "kind": type(data).__name__}
    # A field that came later counts only where it is set, so that older runs go on.
    settings = {name: value for name, value in settings.items() if value is not None or name not in _LATER}
    settings["tokenizer"]["name"] = None
    del settings["tokenizer"]["revision"]
    settings |= {"batch_size": training.batch_size, "seed": training.seed}
    return combined_hash(chain([json.dumps(settings, sort_keys=True), tokenizer.to_json()], content))


def check_batch_ids(batch: Batch, vocab_size: int | None) -> None:
    """Calls `require_ids` for every array of a batch that the model embeds."""
    for name in ("tokens", "source", "target"):
        if name in batch:
            require_ids(batch[name], vocab_size or 0)


def _text_pipeline(data: TextData, training: TrainingConfig, tokenizer: Tokenizer, rows: np.ndarray) -> Pipeline:
    text, finish = text_rows(data, tokenizer)
    shape = Shape(training.batch_size, shuffled(text.train, training.seed), text.held_out)
    seen = replace(shape, held_out=text.train)
    return Pipeline(
        *make_batches([shape], training, rows, finish),
        fingerprint=fingerprint(text.content, tokenizer, data, training),
        bytes_per_token=text.bytes_per_token,
        notes=text.notes,
        seen=make_batches([seen], training, rows)[1] if data.source == "modular-addition" else None,
    )


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

    def items(chosen: np.ndarray) -> Items:
        def read(numbers: np.ndarray) -> Batch:
            return batcher.batch([(ids[2 * pair], ids[2 * pair + 1]) for pair in chosen[numbers]])

        return Items(len(chosen), read)

    shape = Shape(training.batch_size, shuffled(items(training_pairs), training.seed), items(evaluated))
    return Pipeline(
        *make_batches([shape], training, rows),
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
