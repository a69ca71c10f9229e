"""What a benchmark asks of every implementation, and the weights and prompts that all of them get.

A side that trains is one of the comparison's (twin/sides.py), on one batch. Nothing here imports a
framework: a side that computes with PyTorch shall hold no more than PyTorch does.
"""

from typing import Any, NamedTuple

import numpy as np

from benchmarks.training_cases import BatchShape, draw_batch
from jax_tformer.config import TransformerConfig
from twin.machine import free_torch_memory
from twin.sides import Shapes, StepFigures, Tensors

OURS, REFERENCE, HUGGING_FACE = "benchmarks.sides.ours", "benchmarks.sides.reference", "benchmarks.sides.hugging_face"
"""The modules of the sides. Each has `training(config, shape, device)`, which makes a `Training`, and a `Decoding`.

`Decoding(config, device).decode(prompts, new_tokens, room, beams)` is greedy or beam search for `new_tokens` of the
`room` new tokens that a cache of fixed size has slots for. It returns a `Decoded`.
"""
Prompts = list[list[int]]


class Decoded(NamedTuple):
    """One timed generation."""

    seconds: float
    tokens: np.ndarray
    """int32 `[B, N]`, the new tokens; of a beam search, the best sequence of each row."""


class Turn(NamedTuple):
    """What a side that trains did in one turn."""

    warm: StepFigures
    """It finds caches cold and memory handed back, as no step does that follows another."""
    steps: list[StepFigures]
    product_rate: float
    """Floating-point operations a second of a large product."""


class Training:
    """A side that trains, a `JaxSide` or a `TorchSide`, on one batch, from the weights that all sides get."""

    def __init__(self, side: Any, config: TransformerConfig, shape: BatchShape) -> None:
        self._side, self._batch = side, draw_batch(config, shape)
        self.device_memory = side.device_memory
        side.start(0, draw_weights(side.shapes()))

    def first_step(self) -> StepFigures:
        """Makes the first update, which also compiles; then hands back memory as `turn` does."""
        figures = self._side.step(self._batch, None)
        free_torch_memory()
        return figures

    def turn(self, steps: int, size: int) -> Turn:
        """Makes one update to warm up, then so many `steps`; and a product of two squares of this `size`.

        On a GPU the memory for PyTorch's activations is handed back afterwards.
        """
        warm, *taken = [self._side.step(self._batch, None) for _ in range(1 + steps)]
        rate = self._side.product_rate(size)
        free_torch_memory()
        return Turn(warm, taken, rate)


def draw_weights(shapes: Shapes) -> Tensors:
    """Draws weights by `torch_ref`'s names: matrices and biases N(0, 0.02^2), scales of norms N(1, 0.02^2).

    Drawn by NumPy, so that all processes get the same bits, with a GPU or without, with JAX or without.
    """
    generator, weights = np.random.default_rng(0), {}
    for name in sorted(shapes):
        middle = 1.0 if len(shapes[name]) == 1 and name.endswith("weight") else 0.0
        weights[name] = middle + np.float32(0.02) * generator.standard_normal(shapes[name], np.float32)
    return weights


def draw_prompts(vocabulary: int, batch: int, length: int) -> Prompts:
    """Draws random ids, the same for every side."""
    return np.random.default_rng(1).integers(0, vocabulary, (batch, length)).tolist()
