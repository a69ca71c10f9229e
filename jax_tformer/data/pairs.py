"""Makes batches of pairs of texts, padded to one length, or with about as many tokens each, in a few shapes."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import require
from jax_tformer.config.experiment import PairData, TrainingConfig
from jax_tformer.data.order import Batch, Items, Part, Shape, Source
from jax_tformer.data.sources import Rows, held_out_pairs, load_pairs
from jax_tformer.data.tokenizers import Tokenizer, pair_framing
from jax_tformer.files import batched, shortened

PairIds = tuple[np.ndarray, np.ndarray]
_TOGETHER = 2**12
"""Texts that are encoded together."""
_FEW = 0.05
"""The fraction of pairs that may be left out without a warning."""
_REST = 0.01
"""The lengths that a warning recommends leave out at most this fraction."""
_SHAPES, _STEPS = 6, 64
"""The most shapes of batches, and the lengths between which they are chosen."""
_EPOCHS = 100
"""Of so many epochs each shape has its share of batches: of one alone, the rarest would have too many."""


class PairBatcher:
    """Makes batches of pairs, padded to the S source and T target tokens of `data`, with start and end tokens.

    A tokenizer with a framing puts its own tokens around sources and targets, as the checkpoint that it is of.

    Raises InputError if the tokenizer lacks a start, end or padding token.
    """

    def __init__(self, data: PairData, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.lengths = (data.source_length, data.target_length)
        self.framing = pair_framing(tokenizer)
        self._pad_id = tokenizer.require("pad", "for pairs")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of every text, with those around it."""
        before, after = (np.array(ids, np.int32) for ids in (self.framing.before, self.framing.after))
        return [np.concatenate([before, ids, after]) for ids in self.tokenizer.encode_batch(texts)]

    def batch(self, pairs: Sequence[PairIds], lengths: Iterable[int]) -> Batch:
        """Makes a batch of `pairs` of encoded texts, which must fit into the `lengths` S and T.

        It holds "source": int32[B, S], "source_mask": bool[B, S], "labels" and "target" (the labels shifted right):
        int32[B, T], and "target_mask": bool[B, T]. Masks are True at real tokens; elsewhere labels are IGNORED.
        """
        sides = zip(zip(*pairs, strict=True), lengths, strict=True)
        (source, source_mask), (labels, target_mask) = (_pad(rows, self._pad_id, length) for rows, length in sides)
        return {
            "source": source,
            "source_mask": source_mask,
            "target": np.where(target_mask, shift_right(labels, self.framing.start_id or 0), np.int32(self._pad_id)),
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
    shifted = np.roll(ids, 1, axis=-1)
    shifted[..., 0] = start_id
    return shifted


def pair_source(data: PairData, training: TrainingConfig, tokenizer: Tokenizer) -> Source:
    """Makes rows of the pairs that fit: see `PairBatcher.batch`; with `data.tokens_per_batch`, of a few shapes.

    Raises InputError if no pair fits, to train on or held out, or if the tokenizer lacks a token.
    """
    texts = load_pairs(data)
    batcher = PairBatcher(data, tokenizer)
    kind = tokenizer.id_type
    encoded = (row.astype(kind).tobytes() for group in batched(texts, _TOGETHER) for row in batcher.encode(group))
    ids = Rows(encoded, lambda row: np.frombuffer(row, kind))
    lengths = (ids.sizes // np.dtype(kind).itemsize).reshape(-1, 2)
    left_out = _left_out(lengths, batcher)
    (fitting,) = (lengths <= batcher.lengths).all(axis=1).nonzero()
    held_out = held_out_pairs(data, texts, fitting)
    because = f" ({left_out.removeprefix('warning: ')})" if left_out else ""
    require(
        0 < held_out.sum() < len(held_out),
        f"there are {(~held_out).sum()} training and {held_out.sum()} held-out pairs{because}; "
        "expected one of each at least; give more pairs, or a larger --data.source-length and --data.target-length",
    )

    def items(chosen: np.ndarray, longest: np.ndarray) -> Items:
        return Items(
            len(chosen),
            lambda numbers: batcher.batch([(ids[2 * pair], ids[2 * pair + 1]) for pair in chosen[numbers]], longest),
        )

    def shape(rows: int, longest: np.ndarray, inside: np.ndarray) -> Shape:
        part = Part(items(fitting[inside & ~held_out], longest), items(fitting[inside & held_out], longest))
        return Shape(rows, [part], -(-_EPOCHS * part.train.count // rows))

    examples = [(texts[2 * pair], texts[2 * pair + 1]) for pair in fitting[held_out][: training.evaluate_examples]]
    shapes = [(training.batch_size, np.array(batcher.lengths), fitting >= 0)]
    notes = [left_out] if left_out else []
    if data.tokens_per_batch is not None:
        shapes = list(_shapes(lengths[fitting], data.tokens_per_batch, training.batch_size, batcher))
        sizes = [f"{rows:,} x {source} x {target}" for rows, (source, target), _ in shapes]
        places = sum(int(inside.sum() * longest.sum()) for _, longest, inside in shapes)
        notes.append(
            f"batches (rows x source x target) are {shortened(sizes, _SHAPES)}: each is compiled once, when it first "
            f"comes; {1 - lengths[fitting].sum() / places:.0%} of the places are padding"
        )
    return Source([shape(*each) for each in shapes], texts, examples=examples, notes=notes)


def _shapes(
    lengths: np.ndarray, tokens: int, batch_size: int, batcher: PairBatcher
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields rows, lengths and pairs, bool[N], of the shapes that have the fewest places for `lengths`, int[N, 2].

    The longest first. A batch has at most `tokens` tokens of sources and as many of targets, padding included.
    """
    step = np.ceil(_STEPS * (lengths / batcher.lengths).max(axis=1)).astype(int)
    upto = np.cumsum(np.bincount(step, minlength=_STEPS + 1))
    longest = np.array([lengths[step <= last].max(axis=0, initial=1) for last in range(_STEPS + 1)])
    rows = tokens // longest.max(axis=1) // batch_size * batch_size
    # The last step of shapes so far -> their places and all their last steps.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for _ in range(_SHAPES):
        best = {
            last: min(
                (places + int((upto[last] - upto[first]) * longest[last].sum()), (*ends, last))
                for first, (places, ends) in best.items()
                # A shape's pairs fill a batch, so that none comes often in one.
                if first in (0, last) or upto[last] - upto[first] >= rows[last]
            )
            for last in range(_STEPS + 1)
        }
    ends = sorted({*best[_STEPS][1]})
    for first, last in zip(ends[-2::-1], ends[:0:-1], strict=True):
        yield int(rows[last]), longest[last], (first < step) & (step <= last)


def _left_out(lengths: np.ndarray, batcher: PairBatcher) -> str:
    """Says how many pairs with these `lengths`, int[N, 2], are too long, as a warning if many; "" if none are."""
    longer = lengths > batcher.lengths
    share = longer.any(axis=1).mean()
    if not share:
        return ""
    counts = zip(longer.sum(axis=0), ("sources", "targets"), batcher.lengths, strict=True)
    sides = [f"{n:,} {side} have more than {x - batcher.framing.size} tokens" for n, side, x in counts if n]
    told = f"{longer.any(axis=1).sum():,} of {len(longer):,} pairs ({share:.1%}) are left out: {' and '.join(sides)}"
    if share <= _FEW:
        return told
    enough = np.quantile(lengths, 1 - _REST / 2, axis=0, method="higher")
    source, target = np.maximum(enough, batcher.lengths).tolist()
    return (
        f"warning: {told}; --data.source-length {source} and --data.target-length {target} "
        f"would keep {1 - _REST:.0%} of them all"
    )
