"""Batches: what is in them, how they are checked, and the record of all batches of one experiment."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jax_tformer.errors import InputError
from jax_tformer.experiment import PairData, TextData, TrainingConfig
from jax_tformer.files import combined_hash

if TYPE_CHECKING:
    # Imported at first use, since it imports JAX: what is wrong with the data is known before that.
    import grain

    from jax_tformer.data.tokenizers import Tokenizer

IGNORED = -100
"""The label of positions that do not count in the loss."""

Batch = dict[str, np.ndarray]
"""Arrays of B rows: "tokens", or "source" and "target" with their masks, and "labels"."""


@dataclass(frozen=True)
class Pipeline:
    """The batches of one experiment. All have B rows and the same shapes, so that one compilation serves all."""

    train: "grain.MapDataset[Batch]"
    """Training batches by number, without end; a batch is a function of its number and the seed."""
    evaluation: list[Batch]
    """Held-out batches; rows that fill up the last one have no label but IGNORED."""
    fingerprint: str
    """Changes with whatever changes the batches; a run continues only on the same one."""
    bytes_per_token: float | None = None
    """UTF-8 bytes per token of the held-out text; None where tokens do not make up a text."""
    examples: list[tuple[str, str]] | None = None
    """Held-out (source, target) pairs; None where there are no pairs."""
    notes: list[str] = field(default_factory=list)
    """What the user should know about the data, a line each."""

    def train_iterator(self) -> "grain.DatasetIterator[Batch]":
        """Training batches from the first, made in a background thread.

        `get_state()` is a small dict for JSON; `set_state(state)` continues with the batch that came next then.
        """
        import grain

        return iter(self.train.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


MakeBatch = Callable[[np.ndarray, np.random.Generator], Batch]
"""From the numbers of its items, int64[B], to a batch; the generator is for what is drawn at random besides."""


def endless(make_batch: Callable[[int, np.random.Generator], Batch], seed: int) -> "grain.MapDataset[Batch]":
    """Training batches `make_batch(number, generator)`, the generator's numbers depending on number and seed only.

    An element is a whole batch: Grain would need six times as long to gather its rows one by one.
    """
    import grain

    return grain.MapDataset.range(sys.maxsize).seed(seed).random_map(make_batch)


def shuffled(make_batch: MakeBatch, count: int, training: TrainingConfig) -> "grain.MapDataset[Batch]":
    """Training batches of `count` items: every epoch reads all of them, in a random order of its own."""

    def make(number: int, generator: np.random.Generator) -> Batch:
        return make_batch(shuffled_items(number, training.batch_size, count, training.seed), generator)

    return endless(make, training.seed)


def shuffled_items(batch: int, batch_size: int, count: int, seed: int) -> np.ndarray:
    """int64[B], which of `count` items are in training batch number `batch`.

    Batches follow one another through all items in random order, then through all of them in another order, and so on:
    the order of grain.MapDataset.shuffle().repeat(), without an object for every item.
    """
    import grain

    positions = (divmod(batch * batch_size + row, count) for row in range(batch_size))
    return np.array(
        [
            grain.experimental.index_shuffle(index, max_index=count - 1, seed=(seed + epoch) % 2**32, rounds=4)
            for epoch, index in positions
        ]
    )


def held_out_items(items: Iterable[str], fraction: float) -> set[str]:
    """The `fraction` of the distinct `items`, at least one of them, whose hashes are lowest.

    By content, and not by position: a file may be sorted, and an item that occurs twice must not be on both sides.
    """
    # Python's own hash differs from process to process.
    ranked = sorted(set(items), key=lambda item: hashlib.sha256(item.encode()).digest())
    return set(ranked[: max(1, round(fraction * len(ranked)))])


def thinned_out(make_batch: MakeBatch, count: int, training: TrainingConfig) -> list[Batch]:
    """The evaluation batches of `count` held-out items, the same for every seed; the last one is filled up."""
    generator = np.random.default_rng(0)
    return [
        _filled_up(make_batch(items, generator), training.batch_size) for items in evaluation_items(count, training)
    ]


def evaluation_items(count: int, training: TrainingConfig) -> list[np.ndarray]:
    """Which of `count` held-out items are in which evaluation batch: spread evenly if they are more than needed."""
    wanted = min(count, training.evaluate_batches * training.batch_size)
    items = np.arange(wanted) * count // wanted
    return [items[first : first + training.batch_size] for first in range(0, wanted, training.batch_size)]


def _filled_up(batch: Batch, batch_size: int) -> Batch:
    """`batch` with `batch_size` rows: the last one again as often as needed, without labels that count."""
    missing = batch_size - len(batch["labels"])
    filled = {name: np.concatenate([rows, rows[-1:].repeat(missing, 0)]) for name, rows in batch.items()}
    filled["labels"][len(batch["labels"]) :] = IGNORED
    return filled


def fingerprint(
    content: Iterable[str | memoryview], tokenizer: "Tokenizer", data: TextData | PairData, training: TrainingConfig
) -> str:
    """SHA-256, in hexadecimal, of what decides the training batches: texts (or their UTF-8), tokenizer and settings.

    Where the files and the tokenizer lie is left out: moving them changes nothing.
    """
    settings = dataclasses.asdict(data) | {"path": None, "target_path": None, "kind": type(data).__name__}
    settings["tokenizer"]["name"] = None
    del settings["tokenizer"]["revision"]
    settings |= {"batch_size": training.batch_size, "seed": training.seed}
    return combined_hash([json.dumps(settings, sort_keys=True), tokenizer.to_json(), *content])


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises InputError unless all `ids` are from 0 to below `vocab_size`.

    JAX has no such check: an id beyond the table silently gives NaN.
    """
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise InputError(
            f"a token has the id {int(wrong[0])}; expected ids from 0 to {vocab_size - 1}; "
            "use the tokenizer that the model was trained with"
        )


def check_batch_ids(batch: Batch, vocab_size: int | None) -> None:
    """`check_ids` for whatever the model will look up in a batch."""
    for name in ("tokens", "source", "target"):
        if name in batch:
            check_ids(batch[name], vocab_size or 0)
