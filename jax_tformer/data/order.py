"""Decides what is held out, and what is in which batch from its number and the seed alone, so that any batch can be
made at any time.

Grain permutes numbers without a list of them, gives every batch random numbers of its own, and makes the next batches
in a thread. It packs and mixes only from the first element on, so that is done here.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jax_tformer.config import IGNORED
from jax_tformer.config.experiment import TrainingConfig

if TYPE_CHECKING:
    # Imported at first use because it imports JAX, so that errors in the data are reported sooner.
    import grain

Batch = dict[str, np.ndarray]
"""Arrays of B rows, or of those that one process makes: "tokens", or "source" and "target" with masks, and "labels"."""
Read = Callable[[np.ndarray], Batch]
"""Makes R rows, those of the items or draws with the numbers int64[R]."""
Finish = Callable[[Batch, np.random.Generator, np.ndarray, int], Batch]
"""Makes some rows, int[R], of a batch of B rows of what was read for them.

Whatever is random is drawn for all B, so that a row does not depend on which others are made.
"""


@dataclass(frozen=True)
class Items:
    """What rows are made of: so many, and how they are read."""

    count: int
    read: Read


class Part(NamedTuple):
    """The rows of one source: those to train on, and those held out."""

    train: Items
    held_out: Items
    share: int = 1
    """Of as many rows as the shares of all sources add up to, so many are of this one."""
    path: str | None = None
    """What the user calls it, if there are several."""


class Shape(NamedTuple):
    """What batches of one shape are made of."""

    size: int
    """B, rows of a batch: the batch size, or a multiple of it."""
    parts: Sequence[Part]
    share: int = 1
    """Of as many batches as the shares of all shapes add up to, so many have this one."""


def as_read(batch: Batch, *_: object) -> Batch:
    """Leaves the rows of a batch as they are."""
    return batch


class Source(NamedTuple):
    """What batches are made of, and what is known about it."""

    shapes: Sequence[Shape]
    """The largest first."""
    content: Iterable[str | memoryview]
    """What decides the rows, beside the settings: texts, or the SHA-256 of every file of ids."""
    finish: Finish = as_read
    bytes_per_token: float | None = None
    """UTF-8 bytes for each label of all that is held out, if they are known and tokens are predicted in order."""
    examples: Sequence[tuple[str, str]] = ()
    """Held-out (source, target) pairs."""
    notes: Sequence[str] = ()
    """Notes for the user, a line each."""


def permute(number: int, count: int, seed: int) -> tuple[int, int]:
    """Returns what stands at place `number` of endless epochs of `count` items: the epoch and the item.

    Each epoch has another order, that of grain.MapDataset.shuffle().repeat().
    """
    import grain

    epoch, place = divmod(number, count)
    seed = (seed + epoch) % 2**32
    return epoch, grain.experimental.index_shuffle(place, max_index=count - 1, seed=seed, rounds=4)


def choose(number: int, shares: Sequence[int], seed: int) -> tuple[int, int]:
    """Returns which of several sources draw `number` is of, and the number that the draw has among those of the source.

    Of every sum(shares) draws each source has its share, in another order each time.
    """
    if len(shares) == 1:
        return 0, number
    epoch, place = permute(number, sum(shares), seed)
    source = int(np.searchsorted(np.cumsum(shares), place, side="right"))
    return source, epoch * shares[source] + place - sum(shares[:source])


def _gather(items: Sequence[Items], chosen: np.ndarray) -> Batch:
    """Makes a row for each (source, item) that is chosen, int64[R, 2]."""
    sources, numbers = chosen.T
    found = [items[source].read(numbers[sources == source]) for source in np.unique(sources)]
    places = np.argsort(np.argsort(sources, kind="stable"))
    return {name: np.concatenate([rows[name] for rows in found])[places] for name in found[0]}


def endless(make_batch: Callable[[int, np.random.Generator], Batch], seed: int) -> "grain.MapDataset[Batch]":
    """Makes endless training batches: `make_batch(number, generator)`, where number and seed decide the generator.

    Each element is a whole batch, because Grain takes six times as long to gather single rows.
    """
    import grain

    return grain.MapDataset.range(sys.maxsize).seed(seed).random_map(make_batch)


def training_batches(source: Source, training: TrainingConfig, rows: np.ndarray) -> "grain.MapDataset[Batch]":
    """Makes endless training batches, of each the rows on the devices that have `rows` of a batch of batch_size."""
    seed = training.seed

    def make(number: int, generator: np.random.Generator) -> Batch:
        which, number = choose(number, [shape.share for shape in source.shapes], seed)
        size, parts, _ = source.shapes[which]
        mine = _rows_of(size, training, rows)
        shares = [part.share for part in parts]
        drawn = (choose(number * size + int(row), shares, seed) for row in mine)
        chosen = [(of, permute(count, parts[of].train.count, seed)[1]) for of, count in drawn]
        return source.finish(_gather([part.train for part in parts], np.array(chosen)), generator, mine, size)

    return endless(make, seed)


def evaluation_batches(source: Source, training: TrainingConfig, rows: np.ndarray) -> list[Batch]:
    """Makes the evaluation batches, as `training_batches` does, of held-out items at even distances, for any seed.

    Rows that fill up the last batch of a shape repeat its last item, with labels that the loss ignores.
    """
    full = np.cumsum([-(-sum(part.held_out.count for part in parts) // size) for size, parts, _ in source.shapes])
    wanted = min(training.evaluate_batches, full[-1])
    ends = np.searchsorted(np.arange(wanted) * full[-1] // wanted, full)
    generator = np.random.default_rng(0)
    made = []
    for (size, parts, _), batches in zip(source.shapes, np.diff(ends, prepend=0), strict=True):
        mine = _rows_of(size, training, rows)
        shares = sum(part.share for part in parts)
        chosen = np.array(
            [
                (of, item)
                for of, part in enumerate(parts)
                for item in _spread(part.held_out.count, size * batches * part.share // shares)
            ]
        )
        for first in range(0, len(chosen), size):
            left = min(size, len(chosen) - first)
            there = np.minimum(mine, left - 1)
            batch = _gather([part.held_out for part in parts], chosen[first + there])
            batch = source.finish(batch, generator, there, left)
            batch["labels"][mine >= left] = IGNORED
            made.append(batch)
    return made


def _spread(count: int, most: int) -> np.ndarray:
    """Returns at most so many of `count` numbers, at even distances."""
    few = min(count, most)
    return np.arange(few) * count // max(1, few)


def _rows_of(size: int, training: TrainingConfig, rows: np.ndarray) -> np.ndarray:
    times = size // training.batch_size
    return (rows[:, None] * times + np.arange(times)).ravel()


def held_out_items(items: Iterable[str], fraction: float) -> np.ndarray:
    """Returns, bool[N], which of N items belong to the `fraction` of the distinct ones, at least one, held out.

    Those with the lowest hashes are. The content decides and not the position: files may be sorted, and equal items
    must be on the same side.
    """
    # Python's own hash differs between processes. Of ten million items, two have the same 8 bytes with a probability of
    # one in 400,000, and are then on the same side.
    digests = (hashlib.sha256(item.encode()).digest() for item in items)
    hashes = np.fromiter((int.from_bytes(digest[:8], "big") for digest in digests), np.uint64)
    ranked = np.unique(hashes)
    return np.isin(hashes, ranked[: max(1, round(fraction * len(ranked)))])
