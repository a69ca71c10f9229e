"""What a benchmark of training asks of every implementation, and the batch that all of them train on."""

from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.sides import START_ID
from jax_tformer.config import TransformerConfig
from jax_tformer.data.batches import IGNORED
from jax_tformer.data.pairs import shift_right
from jax_tformer.experiment import OptimizerConfig

OPTIMIZER = OptimizerConfig(learning_rate=1e-4, schedule="constant", warmup_steps=0)
"""Clipping, AdamW and weight decay as in training; a rate at which the first updates show in the loss."""
STEPS = 1000
"""Updates that the schedule is for."""
_MASKED = 0.15


class BatchShape(NamedTuple):
    """One batch."""

    rows: int
    length: int
    """Tokens of a row; in an encoder-decoder, of a target."""
    source: int = 0
    """Tokens of a source; 0 where there is one stack alone."""

    @property
    def tokens(self) -> int:
        """That the model reads in one step, source and target."""
        return self.rows * (self.length + self.source)


class TrainingSide(Protocol):
    """One implementation, in its own process or in this one; made with (config, shape, seed, device)."""

    def steps(self, count: int) -> list[float]:
        """Seconds of `count` updates, each waited for; the very first compiles."""

    def loss(self) -> float:
        """Mean cross-entropy of the last step, before its update, in nats a token."""

    def libraries_memory(self) -> int:
        """Bytes that the process held before there was a model."""

    def forget_peak(self) -> None:
        """From here on, the peak of memory is that of what follows."""

    def device_memory(self) -> int | None:
        """The most bytes on the accelerator so far; None where there is none."""


def draw_batch(config: TransformerConfig, shape: BatchShape, seed: int) -> dict[str, np.ndarray]:
    """Random ids, the same for every side: rows with next tokens as labels, masked text, or pairs, by the model's kind.

    int32 `[B, T]`; of masked text, 15% of the labels count. There is no padding.
    """
    generator, vocabulary = np.random.default_rng(seed), config.vocab_size or 0

    def draw(length: int) -> np.ndarray:
        return generator.integers(0, vocabulary, (shape.rows, length), dtype=np.int32)

    if config.encoder is None:
        text = draw(shape.length + 1)
        return {"tokens": text[:, :-1].copy(), "labels": text[:, 1:].copy()}
    if config.decoder is None:
        chosen = generator.random((shape.rows, shape.length)) < _MASKED
        # However short the rows: one label at least.
        chosen[0, 0] = True
        return {"tokens": draw(shape.length), "labels": np.where(chosen, draw(shape.length), np.int32(IGNORED))}
    labels = draw(shape.length)
    return {"source": draw(shape.source), "target": shift_right(labels, START_ID), "labels": labels}
