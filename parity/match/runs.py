"""Runs a JAX function and a torch module on the same weights, by a proposed weight map, in float64."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from parity.gates.jax_side import called, exact_options
from parity.gates.measure import compared, relative_error
from parity.gates.projection import Inputs, Tensors, common_outputs, named_outputs, projection
from parity.gates.pytrees import replaced
from parity.gates.torch_side import from_torch, to_torch
from parity.gates.weight_map import Row
from parity.islands import Float64
from parity.match.candidates import Candidate, Leaf, Proposal
from parity.match.weight_match import as_weights

SHOWN = 1e-9
"""A weight that changes the outputs by less than this, relative to them, is one that they do not depend on."""


class Runs:
    """Both sides in float64, to be run on any weights; neither is changed."""

    def __init__(
        self,
        ours: Callable[..., Any],
        params: Any,
        module: nn.Module,
        inputs: Sequence[Any] | Mapping[str, Any],
        arrays: Tensors,
    ) -> None:
        self.arrays = arrays
        self._inputs = Inputs.read(inputs).rounded("float64", "float64")
        self._module = deepcopy(module).double().eval()
        self._held = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        self._loaded: Tensors = {}
        self._shaken: Tensors = {}
        self._params, self._ours = params, ours
        self._jitted = jax.jit(self._call, compiler_options=exact_options("float64"))
        self.wide = False
        """Whether casts to float32 within the module are taken out."""
        self.left_out: set[str] = set()
        """Outputs that are not compared: those of one side alone, and what is no floating-point array."""

    def shaken(self, proposals: Sequence[Proposal]) -> Tensors:
        """The tensors that the rows take, each moved off its value, so that no two of them are the same by chance."""
        taken = dict.fromkeys(name for one in proposals for name in one.chosen.tensor.members)
        for name in taken.keys() - self._shaken.keys():
            self._shaken[name] = _shaken(name, self.arrays[name])
        return {name: self._shaken[name] for name in taken}

    def theirs(self, weights: Tensors) -> Tensors:
        """What the module returns with these weights; those that are not named stay its own."""
        return {name: from_torch(tensor).copy() for name, tensor in self._call_theirs(weights)}

    def _call_theirs(self, weights: Tensors, *, keep: bool = False) -> list[tuple[str, torch.Tensor]]:
        """The module's floating outputs by name; `keep` keeps what it takes to differentiate them."""
        with torch.set_grad_enabled(keep), Float64() if self.wide else nullcontext():
            with torch.no_grad():
                own = {name: self.arrays[name] for name in self._loaded}
                for name, array in (own | weights).items():
                    if self._loaded.get(name) is not array:
                        self._held[name].copy_(to_torch(array))
                        self._loaded[name] = array
            given = {name: to_torch(array) for name, array in self._inputs.arrays.items()}
            output = self._inputs.call(self._module, arrays=given)
            # Whole numbers and truth values show no weight.
            return list(named_outputs(output, "theirs", torch.Tensor, self.left_out).items())

    def ours(self, flat: Tensors) -> Tensors:
        """What our function returns with these parameters."""
        made = self._jitted(jax.device_put(flat), jax.device_put(self._inputs.arrays))
        return {name: np.asarray(array) for name, array in made.items()}

    def _call(self, flat: dict[str, jax.Array], arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        output = called(self._ours, replaced(self._params, flat), self._inputs, arrays)
        return named_outputs(output, "ours", jax.Array, self.left_out)

    def both(self, flat: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
        """The outputs that are compared, by the same names."""
        return self.paired(self.ours(flat), self.theirs(weights))

    def paired(self, ours: Tensors, theirs: Tensors) -> tuple[Tensors, Tensors]:
        """Of these outputs, or of those that are paired already, the ones that are compared, by the same names."""
        names = common_outputs(ours, theirs, self.left_out)
        return {name: ours[a] for name, (a, _) in names.items()}, {name: theirs[b] for name, (_, b) in names.items()}

    def depend_on(self, names: Sequence[str], weights: Tensors) -> dict[str, np.ndarray]:
        """Where in each of these tensors a number changes what the module returns: True and False in its shape."""
        parameters = dict(self._module.named_parameters())
        trained = {name: parameters[name].requires_grad_() for name in names if name in parameters}
        outputs = self._call_theirs(weights, keep=True)
        loss = sum((value * torch.from_numpy(projection(name, tuple(value.shape)))).sum() for name, value in outputs)
        gradients: dict[str, np.ndarray] = {}
        if trained and isinstance(loss, torch.Tensor) and loss.requires_grad:
            made = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            for (name, parameter), gradient in zip(trained.items(), made, strict=True):
                gradients[name] = np.zeros(parameter.shape) if gradient is None else np.abs(from_torch(gradient))
        largest = max((float(array.max()) for array in gradients.values() if array.size), default=0.0)
        found = {name: array > SHOWN * largest for name, array in gradients.items()}
        rest = [name for name in names if name not in found]
        return found | {name: np.full(self.arrays[name].shape, self._moves(name, weights)) for name in rest}

    def _moves(self, name: str, weights: Tensors) -> bool:
        before, rng = self.theirs(weights), np.random.default_rng(7)
        array = weights.get(name, self.arrays[name])
        after = self.theirs(weights | {name: array + 0.1 * np.abs(array).max() * rng.random(array.shape)})
        return any(relative_error(after[key], before[key]) > SHOWN for key in before)


def converted(proposals: Sequence[Proposal], weights: Tensors) -> Tensors:
    """Our parameters by path, made of the module's by these rows."""
    return {path: array for one in proposals for path, array in held(one.leaf, one.chosen, weights).items()}


def held(leaf: Leaf, candidate: Candidate, weights: Tensors) -> Tensors:
    """The parameters that a leaf stands for, by path, made of the module's."""
    shapes = {name: weights[name].shape for name in candidate.tensor.members}
    return {
        path: Row(path, as_weights(candidate, numbers), shapes).ours(weights)
        for path, numbers in zip(leaf.paths, np.ndindex(leaf.layers), strict=True)
    }


def _shaken(name: str, array: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng([len(name), *name.encode()])
    # A module that nobody has given weights yet holds what was in memory.
    array = np.where(np.abs(array) < 1e3, array, 0.0).astype(np.float64)
    noise, fan = rng.standard_normal(array.shape), array.size / max(array.shape, default=1)
    array = np.abs(array) * np.exp(0.2 * noise) if name.endswith("var") else array + noise * min(0.2, fan ** (-0.5))
    return array


def worst(ours: Tensors, theirs: Tensors) -> float:
    """Gate 1's figure: the largest relative error of any output; raises ParityError for what cannot be compared."""
    return float(compared("1 activations", ours, theirs).worst)


@contextmanager
def float64() -> Iterator[None]:
    """What gate 1 is run in."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield
