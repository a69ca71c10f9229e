"""A pair: a function in JAX and a module in PyTorch that hold the same weights, run forward and backward."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from ml_dtypes import bfloat16
from torch import nn

from parity.gates.jax_side import exact_options
from parity.gates.measure import ParityError
from parity.gates.projection import Tensors
from parity.gates.pytrees import is_floating
from parity.gates.torch_side import backward, from_torch, load, to_tensors, to_torch

__all__ = ["Bridge", "Dtype", "Result", "Tensors", "from_torch", "to_torch"]

Dtype = Literal["float64", "float32", "bfloat16"]
"""The types that gates compute in."""


@dataclass(frozen=True)
class Result:
    """What one framework computed from one batch, by name, as NumPy arrays of the type that it was computed in."""

    activations: Tensors = field(default_factory=dict)
    """What the pair returns: logits, hidden states, attention weights, losses."""
    gradients: Tensors = field(default_factory=dict)
    """Of the loss, by the module's parameter names."""


class Bridge:
    """A JAX function and a PyTorch module that hold the same weights.

    `ours(params, batch)` and `theirs(module, batch)` return (loss, activations by name); `into` turns the module's
    weights, by name, into the JAX parameters, and `back` does the reverse (it serves the gradients too).
    `compiler_options` are XLA's; by default those of `exact_options`.
    """

    def __init__(
        self,
        ours: Callable[..., Any],
        theirs: Callable[..., Any],
        module: nn.Module,
        *,
        into: Callable[[Tensors], Any],
        back: Callable[[Any], Tensors],
        dtype: Dtype,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.ours, self.theirs, self.module, self.into, self.back = ours, theirs, module, into, back
        self.dtype = np.dtype(bfloat16 if dtype == "bfloat16" else dtype)
        self._compiler_options = exact_options(dtype) if compiler_options is None else dict(compiler_options)

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Gives both sides these weights, by the module's names, in their type; what has been compiled stays.

        Buffers may be among them, and whole numbers, which keep their type.
        """
        rounded = {name: array.astype(self.dtype) if is_floating(array) else array for name, array in weights.items()}
        self.params: Any = jax.device_put(self.into(rounded))
        parameters, buffers = (
            dict(kind).keys() for kind in (self.module.named_parameters(), self.module.named_buffers())
        )
        missing, unknown = parameters - rounded.keys(), rounded.keys() - parameters - buffers
        if missing or unknown:
            raise ParityError(
                f"only the module has the parameters {sorted(missing)}, only the weights have {sorted(unknown)}"
            )
        load(self.module, rounded)

    def run_jax(self, batch: Tensors) -> Result:
        """Forward and backward in JAX."""
        (_, activations), gradients = self._jax(self.params, jax.device_put(batch))
        return Result({name: np.asarray(array) for name, array in activations.items()}, self.back(gradients))

    def run_torch(self, batch: Tensors) -> Result:
        """Forward and backward in PyTorch."""
        given = to_tensors(batch, self.module)
        outputs, gradients, _ = backward(dict(self.module.named_parameters()), lambda: self.theirs(self.module, given))
        return Result(outputs, gradients)

    @cached_property
    def _jax(self) -> Any:
        gradients = jax.value_and_grad(self.ours, has_aux=True, allow_int=True)
        return jax.jit(gradients, compiler_options=self._compiler_options)
