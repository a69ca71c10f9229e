"""Runs a JAX function and a torch module on the same weights, by a proposed weight map, in float64."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parity.gates.jax_side import JaxSide
from parity.gates.measure import compared
from parity.gates.projection import Inputs, Values, common_outputs, floating, projection
from parity.gates.pytrees import Tensors, is_promised
from parity.gates.torch_side import TorchSide
from parity.gates.weight_map import Row
from parity.match.candidates import Proposal
from parity.match.weight_match import as_weights

SHOWN = 1e-9
"""A weight whose gradient is smaller than this, relative to the largest, is one that the outputs do not depend on."""


class Runs:
    """Both sides in float64, to be run on any weights; neither is changed. Call its methods within `exactly`."""

    def __init__(
        self, ours: Callable[..., Any], params: Any, module: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]
    ) -> None:
        given = Inputs.read(inputs)
        numbers = jax.tree.map(lambda leaf: np.broadcast_to(0.0, leaf.shape) if is_promised(leaf) else leaf, params)
        self.jax, self.torch = JaxSide(ours, numbers, given), TorchSide(module, given)
        self._left_out: set[str] = set()
        self._projections: Sequence[Tensors] = ()
        """Of the outputs of either side: the same of those that are compared, and zero of others."""

    @property
    def left_out(self) -> set[str]:
        """Outputs that are not compared: those of one side alone, and what is no floating-point array."""
        return self._left_out | self.jax.left_out | self.torch.left_out

    def run(
        self, proposals: Sequence[Proposal], weights: Tensors, *, backward: bool = False
    ) -> tuple[float, Tensors, Tensors]:
        """(gate 1's figure where ours hold the module's `weights` by these rows, the gradients of both sides).

        They are those of one projection of the outputs that an earlier run has compared, by ours and by what the rows
        take; none unless they are asked for.
        """
        known = self._projections if backward else ({}, {})
        ours = self.jax.run(converted(proposals, weights), known=known[0], of=None if backward else ())
        theirs = self._theirs(weights, known=known[1], of=weights.keys() if backward else ())
        return self._error(ours, theirs), ours.gradients, theirs.gradients

    def depends_on(self, names: Collection[str], weights: Tensors) -> Tensors:
        """Where in each of these tensors a number changes what the module returns: True and False in its shape."""
        gradients = self._theirs(weights, of=names).gradients
        largest = max((float(np.abs(array).max()) for array in gradients.values() if array.size), default=0.0)
        return {name: np.abs(array) > SHOWN * largest for name, array in gradients.items()}

    def shaken(self, names: Iterable[str]) -> Tensors:
        """Tensors of the module, each moved off its value, so that no two of them are the same by chance."""
        return {name: _shaken(name, self.torch.weights[name]) for name in dict.fromkeys(names)}

    def _theirs(self, weights: Tensors, *, known: Tensors | None = None, of: Collection[str] = ()) -> Values:
        """The module with these weights; those that are not named are its own."""
        with _Formulas():
            return self.torch.run(self.torch.weights | weights, known=known, of=of)

    def _error(self, ours: Values, theirs: Values) -> float:
        """The largest relative error of any output; raises ParityError for what cannot be compared."""
        every = ours.outputs, theirs.outputs
        # Whole numbers and truth values show no weight.
        here, there = map(floating, every)
        self._left_out |= every[0].keys() - here.keys() | every[1].keys() - there.keys()
        names = common_outputs(here, there, self._left_out)
        self._projections = [
            {name: np.zeros(array.shape, np.float32) for name, array in side.items()}
            | {both[place]: projection(name, side[both[place]].shape) for name, both in names.items()}
            for place, side in enumerate((here, there))
        ]
        found = {name: here[own] for name, (own, _) in names.items()}
        return float(compared("1 activations", found, {name: there[own] for name, (_, own) in names.items()}).worst)


class _Formulas(TorchFunctionMode):
    """Norms by running statistics as formulas, since PyTorch's own have no derivative by these."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("input", "running_mean", "running_var"), args, strict=False)) | (kwargs or {})
        if func not in (F.batch_norm, F.instance_norm) or given.get("training", given.get("use_input_stats")):
            return func(*args, **(kwargs or {}))
        x = given["input"]
        mean, variance, weight, bias = (
            None if given[name] is None else given[name].view(-1, *[1] * (x.ndim - 2))
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        normal = (x - mean) / (variance + given["eps"]).sqrt()
        return normal if weight is None else normal * weight + bias


def converted(proposals: Sequence[Proposal], weights: Tensors) -> Tensors:
    """Our parameters by path, made of the module's by these rows."""
    made = {}
    for one in proposals:
        shapes = {name: weights[name].shape for name in one.chosen.tensor.members}
        for path, numbers in one.chosen.ours.each_layer():
            made[path] = Row(path, as_weights(one.chosen, numbers), shapes).ours(weights)
    return made


def _shaken(name: str, array: np.ndarray) -> np.ndarray:
    # A module that nobody has given weights yet holds what was in memory.
    array = np.where(np.abs(array) < 1e3, array, 0.0).astype(np.float64)
    noise, fan = projection(name, array.shape), array.size / max(array.shape, default=1)
    moved: np.ndarray = array + noise * min(0.2, fan ** (-0.5))
    return np.abs(array) * np.exp(0.2 * noise) if name.endswith("var") else moved
