"""What a benchmark asks of every implementation, and the weights that all of them get."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from flax import traverse_util

from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params

START_ID = 0
"""Translations begin with this token."""


class Decoded(NamedTuple):
    """One timed generation."""

    seconds: float
    tokens: np.ndarray
    """int32 `[B, N]`, the new tokens; of a beam search, the best sequence of each row."""


class Side(Protocol):
    """One implementation, in its own process or in this one."""

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int, room: int, beams: int) -> Decoded:
        """Greedy or beam search, `new_tokens` of the `room` new tokens that a cache of fixed size has slots for."""

    def intervals(self, prompt: Sequence[int], count: int, room: int) -> list[float]:
        """Seconds between the tokens of one row as they come, `count` of them, the prompt's not included."""

    def device_memory(self) -> int | None:
        """The most bytes on the accelerator so far; None where there is none."""


def draw_weights(net: Transformer, seed: int) -> Params:
    """NumPy parameters: matrices N(0, 0.02^2), vectors near the 0 and 1 that they start from.

    Drawn by NumPy, so that a process which uses the processor and one which uses a GPU get the same bits.
    """
    generator, weights = np.random.default_rng(seed), {}
    for path, leaf in traverse_util.flatten_dict(net.shapes, sep=".").items():
        middle = 1.0 if path.endswith("scale") else 0.0
        draws = generator.standard_normal(math.prod(leaf.shape), np.float32).reshape(leaf.shape)
        weights[path] = middle + np.float32(0.02) * draws
    return traverse_util.unflatten_dict(weights, sep=".")


def draw_prompts(vocabulary: int, batch: int, length: int) -> list[list[int]]:
    """Random ids, the same for every side."""
    return np.random.default_rng(1).integers(0, vocabulary, (batch, length)).tolist()
