"""The two sides of a pair, to be run step by step: forward, backward, and one step of an optimizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from parity.jax_values import values_of_jax
from parity.measure import ParityError
from parity.pairs import Tensors, from_torch, to_torch
from parity.torch_values import values_of_torch
from parity.values import Kind, Values
from parity.weight_maps import paths

Outputs = Mapping[str, Any]
_GRADIENT = "the gradient of "


class Sides:
    """A function of JAX and a module of PyTorch, in float64, with what stands for what in their weights.

    `ours(params, inputs)` and `theirs(module, inputs)` return (loss, outputs by name); `back` turns a tree like
    `params` into tensors by the module's names, or is None where nobody has said which weight is which.
    """

    def __init__(
        self,
        ours: Callable[[Any, dict[str, Any]], tuple[Any, Outputs]],
        theirs: Callable[[Any, dict[str, Any]], tuple[Any, Outputs]],
        module: nn.Module,
        params: Any,
        inputs: Tensors,
        back: Callable[[Any], Tensors] | None,
        *,
        holds: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """The module is in float64 already. `holds` are the module's weights by our paths, where that is known."""
        self.ours, self.theirs, self.back = ours, theirs, back
        self.module = module
        self.frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        self.inputs = {name: double(np.asarray(array)) for name, array in inputs.items()}
        leaves, tree = jax.tree.flatten(params)
        self._tree: Any = tree
        self._arrays = {n: in_double(leaf) for n, leaf in enumerate(leaves) if is_array(leaf)}
        self._rest = {n: leaf for n, leaf in enumerate(leaves) if n not in self._arrays}
        self.names = [path for n, path in enumerate(paths(params)) if n in self._arrays]
        self.weights: Tensors = {
            name: from_torch(tensor)
            for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]
            if tensor.is_floating_point()
        }
        self.held_by = self._tagged() if holds is None else _inverted(holds)
        """Name of the module's weight -> (path of ours, its row where layers are stacked, else None), by `back`."""

    def params(self, arrays: Any = None) -> Any:
        """The tree of our parameters, holding `arrays` in the place of its own."""
        arrays = list(self._arrays.values()) if arrays is None else arrays
        held = dict(zip(self._arrays, arrays, strict=True)) | self._rest
        return self._tree.unflatten([held[n] for n in range(len(held))])

    def _tagged(self) -> dict[str, list[tuple[str, int | None]]]:
        if self.back is None:
            return {}
        # Numbers that say of which leaf and row they are find their way through any mapping.
        tags = []
        for n, held in enumerate(self._arrays.values()):
            array = np.asarray(held)
            rows = np.arange(array.shape[0] if array.ndim else 1, dtype=np.float64)
            tag = n + 1 + (rows + 1) / 2.0**20
            tags.append(
                np.broadcast_to(tag.reshape(-1, *[1] * (array.ndim - 1)) if array.ndim else tag[0], array.shape)
            )
        try:
            named = self.back(self.params([np.array(tag) for tag in tags]))
        except (ParityError, ValueError, TypeError, KeyError):
            return {}
        found: dict[str, list[tuple[str, int | None]]] = {}
        for name, array in named.items():
            leaves = np.unique(np.floor(array)).astype(int)
            found[name] = []
            for leaf in leaves:
                rows = np.unique(array[np.floor(array) == leaf])
                row = round((float(rows[0]) - leaf) * 2**20) - 1 if len(rows) == 1 else None
                whole = list(self._arrays.values())[leaf - 1]
                one = row is None or whole.ndim < 2 or whole.shape[0] == 1
                found[name].append((self.names[leaf - 1], None if one else row))
        return found

    def run(self, *, backward: bool, keep: tuple[frozenset[int], frozenset[int]]) -> tuple[Values, Values]:
        """All values of both sides, with the numbers of those in `keep` (ours, theirs)."""
        return self.run_ours(backward, keep[0]), self.run_theirs(backward, keep[1])

    def run_ours(self, backward: bool, keep: frozenset[int] = frozenset()) -> Values:
        """Our values."""

        def forward(arrays: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
            loss, outputs = self.ours(self.params(arrays), inputs)
            return loss, dict(outputs)

        def both(arrays: Any, inputs: Any) -> dict[str, Any]:
            if not backward:
                return forward(arrays, inputs)[1]
            moving = [jnp.issubdtype(array.dtype, jnp.floating) for array in arrays]

            def loss(some: Any) -> tuple[Any, dict[str, Any]]:
                rest = iter(some)
                return forward([next(rest) if m else a for a, m in zip(arrays, moving, strict=True)], inputs)

            given = [array for array, m in zip(arrays, moving, strict=True) if m]
            (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(given)
            names = [name for name, m in zip(self.names, moving, strict=True) if m]
            named = {_GRADIENT + name: gradient for name, gradient in zip(names, gradients, strict=True)}
            return {**outputs, **named}

        inputs = {name: jnp.asarray(array) for name, array in sorted(self.inputs.items())}
        labels: list[tuple[Kind, str]] = [("parameter", name) for name in self.names]
        labels += [("input", name) for name in inputs]
        return values_of_jax(both, (list(self._arrays.values()), inputs), labels, keep=keep)

    def run_theirs(self, backward: bool, keep: frozenset[int] = frozenset()) -> Values:
        """Their values."""
        inputs = {name: to_torch(array.copy()) for name, array in self.inputs.items()}
        self.module.zero_grad(set_to_none=True)

        def run() -> dict[str, torch.Tensor]:
            loss, outputs = self.theirs(self.module, inputs)
            found = dict(outputs)
            if backward:
                if not loss.requires_grad:
                    raise ParityError(
                        "no gradient reaches a weight of theirs; backward=False compares what is returned alone"
                    )
                loss.backward()
                named = self.module.named_parameters()
                found |= {_GRADIENT + name: p.grad for name, p in named if p.grad is not None}
            return found

        constants = frozenset(
            name for name, _ in self.module.named_buffers() if self.held_by and name not in self.held_by
        )
        return values_of_torch(self.module, run, inputs, constants=constants, keep=keep)

    def gradients(self, ours: Values, theirs: Values) -> tuple[Tensors, Tensors]:
        """(ours, theirs) by the module's names; zero where none arrived. The arrays must have been kept."""
        assert self.back is not None
        arrays = []
        for name, array in zip(self.names, self._arrays.values(), strict=True):
            number = ours.outputs.get(_GRADIENT + name)
            arrays.append(np.zeros(array.shape) if number is None else ours.arrays[number])
        here = self.back(self.params(arrays))
        there = {}
        for name, p in self.module.named_parameters():
            number = theirs.outputs.get(_GRADIENT + name)
            there[name] = np.zeros(tuple(p.shape)) if number is None else theirs.arrays[number]
        return {name: here[name] for name in there if name in here}, there

    @staticmethod
    def gradient(name: str) -> str:
        """The output that is the gradient of a weight."""
        return _GRADIENT + name


def _inverted(holds: Mapping[str, Sequence[str]]) -> dict[str, list[tuple[str, int | None]]]:
    found: dict[str, list[tuple[str, int | None]]] = {}
    for path, names in holds.items():
        for row, name in enumerate(names):
            found.setdefault(name, []).append((path, row if len(names) > 1 else None))
    return found


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a tree of parameters holds numbers: not a function, and not a key of random numbers."""
    dtype = getattr(leaf, "dtype", None)
    return hasattr(leaf, "shape") and isinstance(dtype, np.dtype) and dtype.kind in "fiubV"


def in_double(leaf: Any) -> jax.Array:
    """A leaf of a tree of parameters as an array of JAX, in float64 what is floating."""
    same = isinstance(leaf, jax.Array) and (leaf.dtype == np.float64 or not jnp.issubdtype(leaf.dtype, jnp.floating))
    return leaf if same else jnp.asarray(double(np.asarray(leaf)))


def double(array: np.ndarray) -> np.ndarray:
    """In float64 what is floating, as it is what is not."""
    return array.astype(np.float64, copy=False) if array.dtype.kind in "fV" else array
