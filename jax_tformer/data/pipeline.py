"""Makes the tokenizer and the batches that an experiment's data describes."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from jax_tformer.config.errors import require, require_ids
from jax_tformer.config.experiment import MaskedTextData, PairData, TextData, TrainingConfig
from jax_tformer.data import generated
from jax_tformer.data.order import Batch, Part, endless, evaluation_batches, training_batches
from jax_tformer.data.pairs import PairBatcher, PairIds, pair_source
from jax_tformer.data.sources import (
    held_out_pairs,
    load_pairs,
    load_text,
    packed,
    shard_files,
    sources_of,
    training_end,
)
from jax_tformer.data.text import text_source
from jax_tformer.data.tokenizers import Pieces, Role, Tokenizer, build_tokenizer
from jax_tformer.files import combined_hash

if TYPE_CHECKING:
    # Imported at first use because it imports JAX, so that errors in the data are reported sooner.
    import grain

Pair = tuple[str, str]
_DATE_SAMPLES = 10_000
_LATER = ("packing", "tokens_per_batch")
"""Fields that the data of older runs lacks."""


@dataclass(frozen=True)
class Pipeline:
    """The batches of one experiment, or the rows of them that one process makes."""

    train: "grain.MapDataset[Batch]"
    """Endless training batches; a batch depends only on its number and the seed."""
    evaluation: list[Batch]
    """Held-out batches, the longest first; in rows that fill up the last of a shape, all labels are IGNORED."""
    fingerprint: str
    """A hash of all that decides the batches; a run continues only with the same fingerprint."""
    bytes_per_token: float | None = None
    """UTF-8 bytes per token of the held-out text; None for pairs and masked text."""
    examples: Sequence[tuple[str, str]] = ()
    """Held-out (source, target) pairs; none for text."""
    notes: Sequence[str] = ()
    """Notes for the user about the data, a line each."""
    seen: list[Batch] | None = None
    """Training items, whose right answers are counted beside those of held-out ones; None: neither are."""
    epochs: Callable[[int], dict[str, float]] = lambda steps: {}
    """How often each of several sources was read after so many steps, by name."""

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
    """Makes the batches of `data`, of text or of pairs: see `text_source` and `PairBatcher.batch`.

    `rows`, int[R], are those of each batch that this process makes, in rising order; None: all. They are the same
    numbers whichever others are made. Raises InputError if the text cannot be read, is too short, or does not suit the
    tokenizer, and if no training pair or no held-out pair fits.
    """
    rows = np.arange(training.batch_size) if rows is None else rows
    if isinstance(data, PairData) and data.source == "dates":
        return _dates_pipeline(data, training, PairBatcher(data, tokenizer), rows)
    parts = sources_of(data)
    made = [
        pair_source(part, training, tokenizer) if isinstance(part, PairData) else text_source(part, training, tokenizer)
        for part, _ in parts
    ]
    source = made[0]
    if len(made) > 1:
        # Rows of one shape, of each source its share; what is said about each has its path.
        both = [*zip(made, parts, strict=True)]
        mixture = [one.shapes[0].parts[0]._replace(share=share, path=of.path) for one, (of, share) in both]
        source = source._replace(
            shapes=[source.shapes[0]._replace(parts=mixture)],
            content=chain([json.dumps([part.share for part in mixture])], *(one.content for one in made)),
            bytes_per_token=None,
            examples=[*chain.from_iterable(zip(*(one.examples for one in made), strict=False))],
            notes=[f"{of.path}: {note}" for one, (of, _) in both for note in one.notes],
        )
    (size, mixed, _) = shape = source.shapes[0]
    shares = sum(part.share for part in mixed)
    seen = None
    if data.source == "modular-addition":
        trained = source._replace(shapes=[shape._replace(parts=[Part(mixed[0].train, mixed[0].train)])])
        seen = evaluation_batches(trained, training, rows)
    return Pipeline(
        train=training_batches(source, training, rows),
        evaluation=evaluation_batches(source, training, rows),
        fingerprint=fingerprint(source.content, tokenizer, data, training),
        bytes_per_token=source.bytes_per_token,
        examples=source.examples,
        notes=source.notes,
        seen=seen,
        epochs=lambda steps: {
            f"epochs/{part.path}": steps * size * part.share / shares / part.train.count for part in mixed if part.path
        },
    )


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
    if len(parts := sources_of(data)) > 1:
        return packed(chain.from_iterable(_texts(part) for part, _ in parts))
    if isinstance(data, TextData):
        told = f"{data.path} holds ids; expected the tokenizer that made them: --data.tokenizer.kind huggingface"
        require(not shard_files(data), f"{told} --data.tokenizer.name FOLDER --data.tokenizer.vocab-size None")
        text = load_text(data).content
        return Pieces([text if kind in ("characters", "words") else text[: training_end(text, data.held_out)]])
    if data.source == "dates" and kind == "characters":
        return (generated.date_alphabet(),)
    if data.source == "dates":
        generator = np.random.default_rng(0)
        pairs = (generated.make_date_pair(generator, False, data.held_out) for _ in range(_DATE_SAMPLES))
        return list(chain.from_iterable(pairs))
    texts = load_pairs(data)
    if kind != "bpe":
        return texts
    held_out = held_out_pairs(data, texts, range(len(texts) // 2))
    return packed(text for number, text in enumerate(texts) if not held_out[number // 2])


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
    return combined_hash(chain([json.dumps(settings, sort_keys=True), tokenizer.as_json], content))


def check_batch_ids(batch: Batch, vocab_size: int | None) -> None:
    """Calls `require_ids` for every array of a batch that the model embeds."""
    for name in {"tokens", "source", "target"} & batch.keys():
        require_ids(batch[name], vocab_size or 0)


def _dates_pipeline(data: PairData, training: TrainingConfig, batcher: PairBatcher, rows: np.ndarray) -> Pipeline:
    longest = generated.longest_dates(), [generated.LAST_DAY.isoformat()]
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
            pairs = [generated.make_date_pair(generator, held_out, data.held_out) for _ in range(count - len(drawn))]
            ids = batcher.encode(list(chain.from_iterable(pairs)))
            both = zip(pairs, zip(ids[::2], ids[1::2], strict=True), strict=True)
            drawn += [pair for pair in both if all(np.less_equal([*map(len, pair[1])], batcher.lengths))]
        return drawn

    def make_batch(held_out: bool, generator: np.random.Generator) -> Batch:
        drawn = draw(training.batch_size, held_out, generator)
        return batcher.batch([drawn[row][1] for row in rows], batcher.lengths)

    # All that decides the pairs, because another release of Babel may write dates differently.
    written = repr([(way.template, [words for _, words in way.tables]) for way in generated.date_formats()])
    generator = np.random.default_rng(0)
    examples = [pair for pair, _ in draw(training.evaluate_examples, True, generator)]
    return Pipeline(
        train=endless(lambda _, generator: make_batch(False, generator), training.seed),
        evaluation=[make_batch(True, generator) for _ in range(training.evaluate_batches)],
        fingerprint=fingerprint([written], batcher.tokenizer, data, training),
        examples=examples,
    )
