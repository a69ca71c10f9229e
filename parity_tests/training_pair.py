"""Both frameworks on the same path: the same weights, batches and optimizer, step by step."""

from typing import NamedTuple

import numpy as np

from parity.gates.bridge import Tensors
from parity.gates.measure import compared
from twin.cases import weights_for
from twin.jax_side import JaxSide
from twin.pair import known_zeros, parity_options
from twin.sides import Setting
from twin.torch_side import TorchSide


class Path(NamedTuple):
    """Where training went."""

    losses: np.ndarray
    """Of every step, before its update."""
    gradient_norms: np.ndarray
    """Of every step, before clipping."""
    tokens: np.ndarray
    """That every step read, as floating point."""
    parameters: Tensors
    """After the last step, by the reference's names."""

    def tensors(self):
        """Everything, by name."""
        path = {"loss of each step": self.losses, "gradient norm of each step": self.gradient_norms}
        return path | {"tokens of each step": self.tokens} | self.parameters


def same_path(gate, config, ours, theirs):
    """Gate 5, 6 or 7: every loss, every gradient norm, every parameter at the end.

    A key bias, whose gradient is zero but for rounding, which AdamW divides by its own size, is measured against all
    parameters together.
    """
    return compared(gate, ours.tensors(), theirs.tensors(), zero=known_zeros(config, theirs.parameters))


class TrainingPair:
    """A model, its optimizer and its schedule in both frameworks; every path starts from the same random weights.

    Other `weights`, by the reference's names, may be put in their place; what has been compiled stays.
    """

    def __init__(self, config, std, optimizer, training, dtype="float64", *, optimised=False):
        self.config, self.dtype, self.weights = config.with_dtype(dtype), dtype, weights_for(config, std)
        self._setting = Setting(self.config, optimizer, training, "cpu")
        self._jax = JaxSide(self._setting, compiler_options=parity_options(dtype, optimised=optimised))
        self._seed = training.seed

    def follow_jax(self, batches):
        """The path over these batches, and the dropout masks that were drawn: one list a step, one dict a part."""
        masks = []
        self._jax.start(self._seed, self.weights)

        def step(batch):
            if self.config.drops:
                masks.append(self._jax.masks(batch))
            return self._jax.step(batch, None)

        return self._path(map(step, batches), self._jax), masks

    def follow_torch(self, batches, masks):
        """The reference's path over these batches, with these dropout masks."""
        side = TorchSide("PyTorch", self._setting)
        side.start(self._seed, self.weights)
        return self._path(map(side.step, batches, masks or [None] * len(batches)), side)

    def follow(self, gate, batches):
        """(our path over these batches, the gate that says whether the reference takes it too)."""
        ours, masks = self.follow_jax(batches)
        return ours, same_path(gate, self.config, ours, self.follow_torch(batches, masks))

    def _path(self, steps, side):
        losses, norms, tokens, _ = np.array([*steps]).T
        return Path(losses.astype(self.dtype), norms.astype(self.dtype), tokens, side.parameters())
