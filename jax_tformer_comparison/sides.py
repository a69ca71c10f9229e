"""What a framework is to the comparison: it starts from weights, steps on batches, and shows its weights."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jax_tformer.errors import TrainingFailed
from parity_tests.measure import ParityError

Tensors = Mapping[str, np.ndarray]
"""Arrays by name: a batch, or parameters under the names of `torch_ref`."""
Masks = Sequence[Tensors]
"""Dropout masks (bool, True = kept) by site, for each part of a batch."""


class StepFigures(NamedTuple):
    """What one side measured in one step."""

    loss: float
    """Mean cross-entropy of the batch before the update, in nats a token."""
    gradient_norm: float
    """Global norm before clipping."""
    tokens: int
    """Tokens read, without padding."""
    seconds: float
    """From a batch that lies on the device to updated parameters and metrics."""


class Side(Protocol):
    """One framework with one model, optimizer and type of arithmetic."""

    name: str
    """As people call it."""

    def start(self, seed: int, weights: Tensors | None) -> None:
        """Step 0 of a training from `weights`, or from fresh ones where it can draw them; what is compiled stays."""

    def step(self, batch: Tensors, masks: Masks | None) -> StepFigures:
        """One update; `masks` are applied where this side does not draw its own."""

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters as they are now, by the names of `torch_ref`, in this side's type."""

    def device_memory(self) -> int | None:
        """The most bytes of device memory in use so far; None where the device is the processor."""


def require_loss_type(side: str, found: str, dtype: str) -> None:
    """Raises ParityError unless a loss is of the type that a training in `dtype` has: float32 at least."""
    expected = "float64" if dtype == "float64" else "float32"
    if found != expected:
        raise ParityError(f"{side} gives the loss in {found}; expected {expected} in a comparison in {dtype}")


def require_same_step(number: int, ours: StepFigures, theirs: StepFigures) -> None:
    """Raises ParityError where the sides read different tokens or only one's loss or gradient is finite.

    Where neither is finite there is nothing left to compare: raises TrainingFailed.
    """
    if ours.tokens != theirs.tokens:
        raise ParityError(f"step {number}: JAX read {ours.tokens} tokens, PyTorch {theirs.tokens}")
    for what, a, b in (
        ("loss", ours.loss, theirs.loss),
        ("gradient norm", ours.gradient_norm, theirs.gradient_norm),
    ):
        if math.isfinite(a) != math.isfinite(b):
            raise ParityError(f"the {what} of step {number} is {a} in JAX and {b} in PyTorch")
        if not math.isfinite(a):
            raise TrainingFailed(
                f"the {what} of step {number} is {a} in JAX and {b} in PyTorch; try a lower --optimizer.learning-rate "
                "or a longer --optimizer.warmup-steps"
            )
