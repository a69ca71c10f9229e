"""What a benchmark asks of every implementation, and the weights that all of them get.

Neither this nor what it imports needs JAX: a side that computes with PyTorch shall hold no more than PyTorch does.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

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


def draw_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Weights under `torch_ref`'s names: matrices and biases N(0, 0.02^2), scales of norms N(1, 0.02^2).

    Drawn by NumPy, so that all processes get the same bits, with a GPU or without, with JAX or without.
    """
    generator, weights = np.random.default_rng(seed), {}
    for name in sorted(shapes):
        middle = 1.0 if len(shapes[name]) == 1 and name.endswith("weight") else 0.0
        weights[name] = middle + np.float32(0.02) * generator.standard_normal(shapes[name], np.float32)
    return weights


def draw_prompts(vocabulary: int, batch: int, length: int) -> list[list[int]]:
    """Random ids, the same for every side."""
    return np.random.default_rng(1).integers(0, vocabulary, (batch, length)).tolist()
