"""Batches for encoder-decoder models: pairs of source and target text, padded to fixed lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_tformer.data import dates
from jax_tformer.data.batches import Batch, Pipeline, endless, evaluation_items, fill_up, fingerprint, shuffled_items
from jax_tformer.data.ids import IGNORED, shift_right
from jax_tformer.data.sources import load_pairs
from jax_tformer.data.splits import held_out_items
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.errors import InputError
from jax_tformer.experiment import PairData, TrainingConfig

Pair = tuple[str, str]
PairIds = tuple[np.ndarray, np.ndarray]
_EXAMPLES = 512
_FEW = 0.05
"""The share of pairs that may be left out without a warning."""
_REST = 0.01
"""The share that the lengths which a warning names would leave out at most."""


@dataclass(frozen=True)
class PairBatcher:
    """Turns pairs into batches: S source and T target tokens, one start and one end token, the rest padding."""

    tokenizer: Tokenizer
    source_length: int
    target_length: int
    start_id: int
    end_id: int
    pad_id: int

    def encode(self, pairs: Sequence[Pair]) -> list[PairIds]:
        """The ids of every source and target, without special tokens."""
        sources = self.tokenizer.encode_batch([source for source, _ in pairs])
        targets = self.tokenizer.encode_batch([target for _, target in pairs])
        return list(zip(sources, targets, strict=True))

    def fits(self, pair: PairIds) -> bool:
        """Whether source and end token have room, and target and start token."""
        return len(pair[0]) < self.source_length and len(pair[1]) < self.target_length

    def batch(self, pairs: Sequence[PairIds]) -> Batch:
        """The batch of `pairs`, which must fit.

        "source": int32[B, S] and "source_mask": bool[B, S]; "target", the labels shifted right, and "labels":
        int32[B, T], and "target_mask": bool[B, T]. Masks are True at real tokens; elsewhere labels are IGNORED.
        """
        source, source_mask = self._ended([source for source, _ in pairs], self.source_length)
        labels, target_mask = self._ended([target for _, target in pairs], self.target_length)
        return {
            "source": source,
            "source_mask": source_mask,
            "target": np.where(target_mask, shift_right(labels, self.start_id), np.int32(self.pad_id)),
            "target_mask": target_mask,
            "labels": np.where(target_mask, labels, np.int32(IGNORED)),
        }

    def _ended(self, rows: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
        """int32[B, length], the rows, each with the end token and then padding; and where they are not padding."""
        lengths = np.array([len(row) for row in rows])[:, None]
        places = np.arange(length)
        ids = np.full((len(rows), length), self.pad_id, np.int32)
        ids[places < lengths] = np.concatenate(rows)
        ids[places == lengths] = self.end_id
        return ids, places <= lengths


def pair_batcher(data: PairData, tokenizer: Tokenizer) -> PairBatcher:
    """The batcher for `data`; raises InputError if the tokenizer lacks a start, end or padding token."""
    for role in ("start", "end", "pad"):
        if getattr(tokenizer, f"{role}_id") is None:
            raise InputError(f"the tokenizer has no {role} token; expected one, for pairs; use another tokenizer")
    start_id, end_id, pad_id = tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id
    assert start_id is not None
    assert end_id is not None
    assert pad_id is not None
    return PairBatcher(tokenizer, data.source_length, data.target_length, start_id, end_id, pad_id)


def pairs_pipeline(data: PairData, training: TrainingConfig, tokenizer: Tokenizer) -> Pipeline:
    """Batches of `PairBatcher.batch`, of dates or of the pairs in files.

    Raises InputError if no pair fits the lengths, on either side of the split, or the tokenizer lacks a special token.
    """
    batcher = pair_batcher(data, tokenizer)
    return _dates(data, training, batcher) if data.source == "dates" else _files(data, training, batcher)


def split_pairs(pairs: Sequence[Pair], fraction: float) -> tuple[list[Pair], list[Pair]]:
    """The training pairs and the held-out ones; pairs with the same source are on the same side."""
    chosen = held_out_items((source for source, _ in pairs), fraction)
    return [pair for pair in pairs if pair[0] not in chosen], [pair for pair in pairs if pair[0] in chosen]


def _files(data: PairData, training: TrainingConfig, batcher: PairBatcher) -> Pipeline:
    pairs = load_pairs(data)
    encoded = dict(zip(pairs, batcher.encode(pairs), strict=True))
    fitting = [pair for pair in pairs if batcher.fits(encoded[pair])]
    lengths = np.array([[len(source), len(target)] for source, target in map(encoded.__getitem__, pairs)])
    left_out = _left_out(lengths, data)
    training_pairs, held_out_pairs = split_pairs(fitting, data.held_out)
    if not training_pairs or not held_out_pairs:
        because = f" ({left_out.removeprefix('warning: ')})" if left_out else ""
        raise InputError(
            f"there are {len(training_pairs)} training and {len(held_out_pairs)} held-out pairs{because}; "
            "expected one of each at least; give more pairs, or a larger --data.source-length and --data.target-length"
        )
    rows = [encoded[pair] for pair in training_pairs]
    held_out_rows = [encoded[pair] for pair in held_out_pairs]

    def make_batch(number: int, _: np.random.Generator) -> Batch:
        chosen = shuffled_items(number, training.batch_size, len(rows), training.seed)
        return batcher.batch([rows[item] for item in chosen])

    return Pipeline(
        train=endless(make_batch, training.seed),
        evaluation=[
            fill_up(batcher.batch([held_out_rows[item] for item in chosen]), training.batch_size)
            for chosen in evaluation_items(len(held_out_rows), training)
        ],
        fingerprint=fingerprint([text for pair in pairs for text in pair], batcher.tokenizer, data, training),
        examples=held_out_pairs[:_EXAMPLES],
        notes=[left_out] if left_out else [],
    )


def _left_out(lengths: np.ndarray, data: PairData) -> str:
    """How many of the pairs with these `lengths`, int[N, 2], have no room, and why; a warning if they are many. ""
    where there are none."""
    most = np.array([data.source_length, data.target_length]) - 1
    longer = lengths > most
    count, total = int(longer.any(axis=1).sum()), len(lengths)
    if not count:
        return ""
    sides = [
        f"{number:,} {side} have more than {limit} tokens"
        for number, side, limit in zip(longer.sum(axis=0).tolist(), ("sources", "targets"), most.tolist(), strict=True)
        if number
    ]
    told = f"{count:,} of {total:,} pairs ({count / total:.1%}) are left out: {' and '.join(sides)}"
    if count <= _FEW * total:
        return told
    source, target = np.maximum(np.quantile(lengths, 1 - _REST / 2, axis=0, method="higher") + 1, most + 1).tolist()
    return (
        f"warning: {told}; --data.source-length {source} and --data.target-length {target} "
        f"would keep {1 - _REST:.0%} of them all"
    )


def _dates(data: PairData, training: TrainingConfig, batcher: PairBatcher) -> Pipeline:
    longest = [(source, dates.LAST_DAY.isoformat()) for source in dates.longest_sources()]
    source_length = 1 + max(len(source) for source, _ in batcher.encode(longest))
    target_length = 1 + max(len(target) for _, target in batcher.encode(longest))
    if source_length > data.source_length or target_length > data.target_length:
        raise InputError(
            f"source_length is {data.source_length} and target_length is {data.target_length}; "
            f"the dates need at least {source_length} and {target_length} with this tokenizer"
        )

    def draw(count: int, held_out: bool, generator: np.random.Generator) -> list[tuple[Pair, PairIds]]:
        # The check above is exact for characters; with other tokenizers a rare pair may still be too long.
        drawn: list[tuple[Pair, PairIds]] = []
        while len(drawn) < count:
            pairs = [dates.make_pair(generator, held_out, data.held_out) for _ in range(count - len(drawn))]
            drawn += [pair for pair in zip(pairs, batcher.encode(pairs), strict=True) if batcher.fits(pair[1])]
        return drawn

    def make_batch(_: int, generator: np.random.Generator) -> Batch:
        return batcher.batch([ids for _, ids in draw(training.batch_size, False, generator)])

    generator = np.random.default_rng(0)
    examples = [pair for pair, _ in draw(_EXAMPLES, True, generator)]
    evaluation = [draw(training.batch_size, True, generator) for _ in range(training.evaluate_batches)]
    return Pipeline(
        train=endless(make_batch, training.seed),
        evaluation=[batcher.batch([ids for _, ids in drawn]) for drawn in evaluation],
        fingerprint=fingerprint([dates.description()], batcher.tokenizer, data, training),
        examples=examples,
    )
