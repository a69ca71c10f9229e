"""What is trained: the models, their batches, and the optimizer."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jax_tformer.config import IGNORED, DropoutConfig, TransformerConfig
from jax_tformer.config.experiment import OptimizerConfig, TrainingConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.data.pairs import shift_right
from twin.sides import Tensors

OPTIMIZER = OptimizerConfig(learning_rate=1e-4, schedule="constant", warmup_steps=0)
"""Clipping, AdamW and weight decay as in training; a rate at which the first updates show in the loss."""
TRAINING = TrainingConfig(steps=1000)
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
"""Sides that start from the same weights report losses no further apart than this, relatively."""
START_ID = 0
"""Translations begin with this token."""
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

    def __str__(self) -> str:
        source = f"{self.source} source and " if self.source else ""
        return f"{self.rows} x {source}{self.length} tokens"


@dataclass(frozen=True)
class TrainingCase:
    """One setting in which all sides train."""

    model: str
    config: TransformerConfig
    shape: BatchShape
    rounds: int
    steps: int
    """Updates that a side makes in one turn."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model}, {self.shape}, {self.config.compute.dtype}"


def cases(device: str, *, quick: bool) -> list[TrainingCase]:
    """The figures that are published; quick: the same on models of no size, to see whether it runs, not how fast."""
    if device == "cpu":
        found = [
            TrainingCase("small gpt", small_gpt(), BatchShape(8, 256), rounds=3, steps=3),
            TrainingCase("gpt2", architecture("gpt2"), BatchShape(2, 256), rounds=2, steps=2),
            TrainingCase("vaswani-base", architecture("vaswani-base"), BatchShape(16, 64, 64), rounds=2, steps=2),
            TrainingCase("bert-base", architecture("bert-base"), BatchShape(8, 128), rounds=2, steps=2),
        ]
    else:
        wide = replace(small_gpt(1600), vocab_size=ARCHITECTURES["gpt2"].vocab_size)
        large = {
            "gpt2": (architecture("gpt2"), BatchShape(16, 1024)),
            "gpt2 xl, 6 layers": (wide, BatchShape(8, 1024)),
            "vaswani-base": (architecture("vaswani-base"), BatchShape(64, 256, 256)),
            "bert-base": (architecture("bert-base"), BatchShape(32, 512)),
        }
        found = [
            TrainingCase(name, replace(config, compute=replace(config.compute, dtype="bfloat16")), shape, 5, 10)
            for name, (config, shape) in large.items()
        ]
    return [_shrunk(case) for case in found] if quick else found


def small_gpt(width: int = 384) -> TransformerConfig:
    """GPT-2's architecture on characters, with heads of width 64."""
    config = architecture("gpt2")
    stack = replace(config.output_stack, num_layers=6, num_heads=width // 64, feedforward_width=4 * width)
    return replace(config, d_model=width, decoder=stack, vocab_size=65)


def architecture(name: str) -> TransformerConfig:
    """Returns a preset without dropout."""
    return without_dropout(ARCHITECTURES[name])


def without_dropout(config: TransformerConfig) -> TransformerConfig:
    """Drops nothing: no implementation draws another's masks, and the losses must agree."""
    return replace(config, dropout=DropoutConfig())


def _shrunk(case: TrainingCase) -> TrainingCase:
    from twin.cases import reduced  # which imports JAX

    shape = BatchShape(rows=2, length=8, source=6 if case.shape.source else 0)
    return replace(case, config=reduced(case.config), shape=shape, rounds=2, steps=1)


def draw_batch(config: TransformerConfig, shape: BatchShape) -> Tensors:
    """Draws random ids, the same for every side: texts with their next tokens, masked texts, or pairs.

    int32 `[B, T]`; of masked text, 15% of the labels count. There is no padding.
    """
    generator, vocabulary = np.random.default_rng(0), config.vocab_size or 0

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
