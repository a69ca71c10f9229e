"""What a pipeline is: endless training batches that resume exactly, and fixed batches for evaluation."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jax_tformer.data.ids import IGNORED
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.experiment import PairData, TextData, TrainingConfig

if TYPE_CHECKING:
    # Imported at first use, since it imports JAX: what is wrong with the data is known before that.
    import grain

Batch = dict[str, np.ndarray]


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


def endless(make_batch: Callable[[int, np.random.Generator], Batch], seed: int) -> "grain.MapDataset[Batch]":
    """Training batches `make_batch(number, generator)`, the generator's numbers depending on number and seed only.

    An element is a whole batch: Grain would need six times as long to gather its rows one by one.
    """
    import grain

    return grain.MapDataset.range(sys.maxsize).seed(seed).random_map(make_batch)


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


def evaluation_items(count: int, training: TrainingConfig) -> list[np.ndarray]:
    """Which of `count` held-out items are in which evaluation batch: spread evenly if they are more than needed."""
    wanted = min(count, training.evaluate_batches * training.batch_size)
    items = np.arange(wanted) * count // wanted
    return [items[first : first + training.batch_size] for first in range(0, wanted, training.batch_size)]


def fill_up(batch: Batch, batch_size: int) -> Batch:
    """`batch` with `batch_size` rows: the last one again as often as needed, without labels that count."""
    missing = batch_size - len(batch["labels"])
    filled = {name: np.concatenate([rows, rows[-1:].repeat(missing, 0)]) for name, rows in batch.items()}
    filled["labels"][len(batch["labels"]) :] = IGNORED
    return filled


def fingerprint(
    content: Iterable[str | memoryview], tokenizer: Tokenizer, data: TextData | PairData, training: TrainingConfig
) -> str:
    """SHA-256, in hexadecimal, of what decides the training batches: texts (or their UTF-8), tokenizer and settings.

    Where the files and the tokenizer lie is left out: moving them changes nothing.
    """
    settings = dataclasses.asdict(data) | {"path": None, "target_path": None, "kind": type(data).__name__}
    settings["tokenizer"]["name"] = None
    del settings["tokenizer"]["revision"]
    settings |= {"batch_size": training.batch_size, "seed": training.seed}
    digest = hashlib.sha256()
    for text in (json.dumps(settings, sort_keys=True), tokenizer.to_json(), *content):
        # Hashed one by one, so that moving text from the end of one to the start of the next shows.
        digest.update(hashlib.sha256(text.encode() if isinstance(text, str) else text).digest())
    return digest.hexdigest()
