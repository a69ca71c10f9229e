"""Makes batches of (source, target) pairs, from files or dates, padded to fixed lengths."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from jax_tformer.config import IGNORED
from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import PairData, TrainingConfig
from jax_tformer.data import dates
from jax_tformer.data.batches import (
    Batch,
    MakeBatch,
    Pipeline,
    endless,
    fingerprint,
    held_out_items,
    shuffled,
    thinned_out,
)
from jax_tformer.data.text import read_json_lines, read_lines
from jax_tformer.data.tokenizers import Tokenizer, pair_framing
from jax_tformer.files import user_path

Pair = tuple[str, str]
PairIds = tuple[np.ndarray, np.ndarray]
T = TypeVar("T")
_EXAMPLES = 512
_TOGETHER = 2**12
"""Texts that are encoded together."""
_FEW = 0.05
"""The fraction of pairs that may be left out without a warning."""
_REST = 0.01
"""The lengths that a warning recommends leave out at most this fraction."""


def pair_files(data: PairData) -> list[Path]:
    """Returns the file of pairs, or the files of sources and of targets; raises InputError if `data` names neither."""
    if data.path is None:
        raise InputError(
            "no pairs were named; give --data.path tab-separated pairs, JSON lines with source and target, "
            "or a text file whose targets --data.target-path holds"
        )
    path = user_path(data.path)
    if data.target_path is not None:
        return [path, user_path(data.target_path)]
    if path.suffix.lower() not in (".tsv", ".jsonl"):
        raise InputError(
            f"{path} is neither .tsv nor .jsonl; expected one of them, or the targets' file as --data.target-path"
        )
    return [path]


class Rows(Sequence[T], Generic[T]):
    """Rows of bytes, in one array, each made what it stands for by `read`.

    Short texts and arrays take many times their length as objects of Python.
    """

    def __init__(self, rows: Iterable[bytes], read: Callable[[memoryview], T]) -> None:
        self._content, ends, self._read = bytearray(), array("q", [0]), read
        for row in rows:
            self._content += row
            ends.append(len(self._content))
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> T:  # type: ignore[override]  # no slices
        return self._read(memoryview(self._content)[self._ends[row] : self._ends[row + 1]])

    @property
    def sizes(self) -> np.ndarray:
        """The bytes of each row, int64[N]."""
        return np.diff(self._ends)


def packed(texts: Iterable[str]) -> Rows[str]:
    """Returns the texts in one array."""
    return Rows(map(str.encode, texts), lambda row: str(row, "utf-8"))


def load_pairs(data: PairData) -> Rows[str]:
    """Reads the pairs of the files that `data` names, in order: a source, its target, the next source.

    Raises InputError if the files do not exist, cannot be read, hold no pairs, are not UTF-8, or a line is not a pair.
    """
    return packed(chain.from_iterable(_read_pairs(data)))


def _read_pairs(data: PairData) -> Iterator[Pair]:
    path, *others = pair_files(data)
    rows: Iterable[Sequence[str]]
    if others:
        sources, targets = (sum(1 for _ in read_lines(side)) for side in (path, others[0]))
        told = f"{path} has {sources:,} lines and {others[0]} has {targets:,}"
        require(sources == targets, f"{told}; expected as many targets as sources, line by line")
        rows = zip(read_lines(path), read_lines(others[0]), strict=True)
    elif path.suffix.lower() == ".tsv":
        rows = (line.split("\t") for line in read_lines(path))
    else:
        rows = ((record["source"], record["target"]) for record in read_json_lines(path, ("source", "target")))
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            found = "1 column" if len(row) == 1 else f"{len(row)} columns"
            raise InputError(f"{path}, line {number:,}: {found}; expected 2, source and target, separated by one tab")
        for side, text in zip(("source", "target"), row, strict=True):
            if not text.strip():
                raise InputError(f"{path}, line {number:,}: the {side} is empty; expected text; remove the pair")
        yield row[0].strip(), row[1].strip()


def training_texts(texts: Rows[str], fraction: float) -> Rows[str]:
    """Returns the pairs without the `fraction` that is held out; pairs with the same source stay together."""
    held_out = held_out_items((texts[source] for source in range(0, len(texts), 2)), fraction)
    return packed(text for number, text in enumerate(texts) if not held_out[number // 2])


class PairBatcher:
    """Makes batches of pairs, padded to the S source and T target tokens of `data`, with start and end tokens.

    A tokenizer with a framing puts its own tokens around sources and targets, as the checkpoint that it is of.

    Raises InputError if the tokenizer lacks a start, end or padding token.
    """

    def __init__(self, data: PairData, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.source_length, self.target_length = data.source_length, data.target_length
        self.framing = framing = pair_framing(tokenizer)
        self.start_id, self.around = framing.start_id or 0, framing.size
        self.pad_id = tokenizer.require("pad", "for pairs")

    def encode(self, pairs: Sequence[Pair]) -> list[PairIds]:
        """Returns the ids of every source and target, without special tokens."""
        sources = self.tokenizer.encode_batch([source for source, _ in pairs])
        targets = self.tokenizer.encode_batch([target for _, target in pairs])
        return list(zip(sources, targets, strict=True))

    def fits(self, pair: PairIds) -> bool:
        """Whether the source and the target fit, each with the tokens around it."""
        return len(pair[0]) + self.around <= self.source_length and len(pair[1]) + self.around <= self.target_length

    def batch(self, pairs: Sequence[PairIds]) -> Batch:
        """Makes a batch of `pairs`, which must fit.

        It holds "source": int32[B, S], "source_mask": bool[B, S], "labels" and "target" (the labels shifted right):
        int32[B, T], and "target_mask": bool[B, T]. Masks are True at real tokens; elsewhere labels are IGNORED.
        """
        source, source_mask = self._framed([source for source, _ in pairs], self.source_length)
        labels, target_mask = self._framed([target for _, target in pairs], self.target_length)
        return {
            "source": source,
            "source_mask": source_mask,
            "target": np.where(target_mask, shift_right(labels, self.start_id), np.int32(self.pad_id)),
            "target_mask": target_mask,
            "labels": np.where(target_mask, labels, np.int32(IGNORED)),
        }

    def _framed(self, rows: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows with what is around them and padding, int32[B, length], and where they are not padding."""
        lengths, before = np.array([len(row) for row in rows])[:, None], self.framing.before
        # Counted from the first token of the text.
        places = np.arange(length) - len(before)
        ids = np.full((len(rows), length), self.pad_id, np.int32)
        ids[:, : len(before)] = before
        ids[(places >= 0) & (places < lengths)] = np.concatenate(rows)
        for number, id in enumerate(self.framing.after):
            ids[places == lengths + number] = id
        return ids, places < lengths + len(self.framing.after)


def shift_right(ids: np.ndarray, start_id: int) -> np.ndarray:
    """Returns the decoder's input for labels `ids`, int32[..., T]: the start token, then all but the last label."""
    start = np.full((*ids.shape[:-1], 1), start_id, ids.dtype)
    return np.concatenate([start, ids[..., :-1]], axis=-1)


def pairs_pipeline(data: PairData, training: TrainingConfig, tokenizer: Tokenizer, rows: np.ndarray) -> Pipeline:
    """Makes `rows` of batches as `PairBatcher.batch` describes, of dates or of pairs in files.

    Raises InputError if no training pair or no held-out pair fits, or if the tokenizer lacks a special token.
    """
    batcher = PairBatcher(data, tokenizer)
    return (_dates if data.source == "dates" else _files)(data, training, batcher, rows)


def _files(data: PairData, training: TrainingConfig, batcher: PairBatcher, rows: np.ndarray) -> Pipeline:
    texts, tokenizer = load_pairs(data), batcher.tokenizer
    ids = _encoded(texts, tokenizer)
    lengths = (ids.sizes // np.dtype(tokenizer.id_type).itemsize).reshape(-1, 2)
    left_out = _left_out(lengths, data, batcher.around)
    (fitting,) = (lengths + batcher.around <= [data.source_length, data.target_length]).all(axis=1).nonzero()
    held_out = held_out_items((texts[2 * pair] for pair in fitting), data.held_out)
    training_pairs, held_out_pairs = fitting[~held_out], fitting[held_out]
    because = f" ({left_out.removeprefix('warning: ')})" if left_out else ""
    require(
        bool(len(training_pairs) and len(held_out_pairs)),
        f"there are {len(training_pairs)} training and {len(held_out_pairs)} held-out pairs{because}; "
        "expected one of each at least; give more pairs, or a larger --data.source-length and --data.target-length",
    )

    def batches_of(chosen: np.ndarray) -> MakeBatch:
        return lambda items, _, rows: batcher.batch(
            [(ids[2 * pair], ids[2 * pair + 1]) for pair in chosen[items[rows]]]
        )

    return Pipeline(
        train=shuffled(batches_of(training_pairs), len(training_pairs), training, rows),
        evaluation=thinned_out(batches_of(held_out_pairs), len(held_out_pairs), training, rows),
        fingerprint=fingerprint(texts, tokenizer, data, training),
        examples=[(texts[2 * pair], texts[2 * pair + 1]) for pair in held_out_pairs[:_EXAMPLES]],
        notes=[left_out] if left_out else [],
    )


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Rows[np.ndarray]:
    """Returns the ids of all texts, without special tokens."""
    rest = iter(texts)
    groups = iter(lambda: list(islice(rest, _TOGETHER)), [])
    ids = (row for group in groups for row in tokenizer.encode_batch(group))
    return Rows(
        (row.astype(tokenizer.id_type).tobytes() for row in ids), lambda row: np.frombuffer(row, tokenizer.id_type)
    )


def _left_out(lengths: np.ndarray, data: PairData, around: int) -> str:
    """Says how many pairs with these `lengths`, int[N, 2], are too long, as a warning if many; "" if none are."""
    most = np.array([data.source_length, data.target_length]) - around
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
    source, target = np.maximum(
        np.quantile(lengths, 1 - _REST / 2, axis=0, method="higher") + around, most + around
    ).tolist()
    return (
        f"warning: {told}; --data.source-length {source} and --data.target-length {target} "
        f"would keep {1 - _REST:.0%} of them all"
    )


def _dates(data: PairData, training: TrainingConfig, batcher: PairBatcher, rows: np.ndarray) -> Pipeline:
    longest = [(source, dates.LAST_DAY.isoformat()) for source in dates.longest_sources()]
    source_length = batcher.around + max(len(source) for source, _ in batcher.encode(longest))
    target_length = batcher.around + max(len(target) for _, target in batcher.encode(longest))
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
            drawn += [pair for pair in zip(pairs, batcher.encode(pairs), strict=True) if batcher.fits(pair[1])]
        return drawn

    def make_batch(held_out: bool, generator: np.random.Generator) -> Batch:
        drawn = draw(training.batch_size, held_out, generator)
        return batcher.batch([drawn[row][1] for row in rows])

    generator = np.random.default_rng(0)
    examples = [pair for pair, _ in draw(_EXAMPLES, True, generator)]
    return Pipeline(
        train=endless(lambda _, generator: make_batch(False, generator), training.seed),
        evaluation=[make_batch(True, generator) for _ in range(training.evaluate_batches)],
        fingerprint=fingerprint([dates.description()], batcher.tokenizer, data, training),
        examples=examples,
    )
