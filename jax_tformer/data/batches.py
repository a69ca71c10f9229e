"""Defines batches: what they contain, how items are chosen for them, and how their ids are checked."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import require_ids
from jax_tformer.config.experiment import PairData, TextData, TrainingConfig
from jax_tformer.files import combined_hash

if TYPE_CHECKING:
    # Imported at first use because it imports JAX, so that errors in the data are reported sooner.
    import grain

    from jax_tformer.data.tokenizers import Tokenizer

Batch = dict[str, np.ndarray]
"""Arrays of B rows, or of those that one process makes: "tokens", or "source" and "target" with masks, and "labels"."""


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

    def train_iterator(self) -> "grain.DatasetIterator[Batch]":
        """Iterates over the training batches, which a background thread makes.

        `get_state()` returns a small dict for JSON; `set_state(state)` continues with the batch that was next then.
        """
        import grain

        return iter(self.train.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


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
