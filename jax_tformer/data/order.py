"""Decides what is in which batch from its number and the seed alone, so that any batch can be made at any time.

Grain permutes numbers without a list of them, gives every batch random numbers of its own, and makes the next batches
in a thread. It packs and mixes only from the first element on, so that is done here.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(frozen=True)
class Shape:
    """What batches of one shape are made of."""

    size: int
    """B, rows of a batch: the batch size, or a multiple of it."""
    draw: Read
    """Makes the rows of training; draws are numbered without end."""
    held_out: Items
    share: int = 1
    """Of as many batches as the shares of all shapes add up to, so many have this one."""


def permute(number: int, count: int, seed: int) -> tuple[int, int]:
    """Returns what stands at place `number` of endless epochs of `count` items: the epoch and the item.

    Each epoch has another order, that of grain.MapDataset.shuffle().repeat().
    """
    import grain

    epoch, place = divmod(number, count)
    shuffle = grain.experimental.index_shuffle
    return epoch, shuffle(place, max_index=count - 1, seed=(seed + epoch) % 2**32, rounds=4)


def choose(number: int, shares: Sequence[int], seed: int) -> tuple[int, int]:
    """Returns which of several sources draw `number` is of, and the number that the draw has among those of the source.

    Of every sum(shares) draws each source has its share, in another order each time.
    """
    epoch, place = permute(number, sum(shares), seed)
    source = int(np.searchsorted(np.cumsum(shares), place, side="right"))
    return source, epoch * shares[source] + place - sum(shares[:source])


def shuffled(items: Items, seed: int) -> Read:
    """Draws all items in every epoch, each time in another order."""
    return lambda numbers: items.read(np.array([permute(int(n), items.count, seed)[1] for n in numbers]))


def mixed(draws: Sequence[Read], shares: Sequence[int], seed: int) -> Read:
    """Draws from several sources, from each its share."""
    return lambda numbers: _gather(draws, np.array([choose(int(n), shares, seed) for n in numbers]))


def spread(items: Items, most: int) -> Items:
    """Returns at most so many of the items, at even distances."""
    count = min(items.count, most)
    return Items(count, lambda numbers: items.read(numbers * items.count // count))


def joined(parts: Sequence[Items]) -> Items:
    """Returns the items of all parts, in their order."""
    ends = np.cumsum([part.count for part in parts])

    def read(numbers: np.ndarray) -> Batch:
        of = np.searchsorted(ends, numbers, side="right")
        return _gather([part.read for part in parts], np.stack([of, numbers - np.append(0, ends)[of]], axis=1))

    return Items(int(ends[-1]), read)


def _gather(reads: Sequence[Read], chosen: np.ndarray) -> Batch:
    """Makes a row for each (reader, number) that is chosen, int64[R, 2]."""
    sources, numbers = chosen.T
    found = [reads[source](numbers[sources == source]) for source in np.unique(sources)]
    places = np.argsort(np.argsort(sources, kind="stable"))
    return {name: np.concatenate([rows[name] for rows in found])[places] for name in found[0]}


def endless(make_batch: Callable[[int, np.random.Generator], Batch], seed: int) -> "grain.MapDataset[Batch]":
    """Makes endless training batches: `make_batch(number, generator)`, where number and seed decide the generator.

    Each element is a whole batch, because Grain takes six times as long to gather single rows.
    """
    import grain

    return grain.MapDataset.range(sys.maxsize).seed(seed).random_map(make_batch)


def as_read(batch: Batch, *_: object) -> Batch:
    """Leaves the rows of a batch as they are."""
    return batch


def make_batches(
    shapes: Sequence[Shape], training: TrainingConfig, rows: np.ndarray, finish: Finish = as_read
) -> "tuple[grain.MapDataset[Batch], list[Batch]]":
    """Makes endless training batches, and the evaluation batches, of held-out items at even distances.

    Of each batch it makes the rows that are on the devices which have `rows` of one of `batch_size`. Evaluation is the
    same for every seed; rows that fill up the last batch of a shape repeat its last item, with IGNORED labels.
    """
    shares = [shape.share for shape in shapes]

    def rows_of(shape: Shape) -> np.ndarray:
        times = shape.size // training.batch_size
        found: np.ndarray = (rows[:, None] * times + np.arange(times)).ravel()
        return found

    def make(number: int, generator: np.random.Generator) -> Batch:
        which, number = choose(number, shares, training.seed)
        shape, mine = shapes[which], rows_of(shapes[which])
        return finish(shape.draw(number * shape.size + mine), generator, mine, shape.size)

    full = np.cumsum([-(-shape.held_out.count // shape.size) for shape in shapes])
    wanted = min(training.evaluate_batches, full[-1])
    ends = np.searchsorted(np.arange(wanted) * full[-1] // wanted, full)
    generator, evaluation = np.random.default_rng(0), list[Batch]()
    for shape, batches in zip(shapes, np.diff(ends, prepend=0), strict=True):
        items, mine = spread(shape.held_out, batches * shape.size), rows_of(shape)
        for first in range(0, items.count, shape.size):
            left = min(shape.size, items.count - first)
            there = np.minimum(mine, left - 1)
            batch = finish(items.read(first + there), generator, there, left)
            batch["labels"][mine >= left] = IGNORED
            evaluation.append(batch)
    return endless(make, training.seed), evaluation
