"""A pair: a function in JAX and a module in PyTorch that hold the same weights, run forward and backward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from ml_dtypes import bfloat16
from torch import nn

from parity.gates.jax_side import exact_options
from parity.gates.measure import ParityError
from parity.gates.projection import Values
from parity.gates.pytrees import Tensors, is_floating
from parity.gates.torch_side import backward, from_torch, load, to_tensors, to_torch

__all__ = ["Bridge", "Dtype", "Tensors", "Values", "from_torch", "to_torch"]

Dtype = Literal["float64", "float32", "bfloat16"]
"""The types that gates compute in."""


@dataclass(eq=False)
class Bridge:
    """A JAX function and a PyTorch module that hold the same weights."""

    ours: Callable[..., Any]
    """Called with the parameters and a batch, it returns (loss, outputs by name)."""
    theirs: Callable[..., Any]
    """The same, called with the module and a batch."""
    module: nn.Module
    into: Callable[[Tensors], Any]
    """Turns the module's weights, by name, into the JAX parameters."""
    back: Callable[[Any], Tensors]
    """The reverse, of parameters and of gradients."""
    dtype: Any
    """By name or as NumPy's; NumPy's when it has been made."""
    holds: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """Path of each of our parameters -> the module's weights in each of its layers."""
    compiler_options: dict[str, Any] | None = None
    """XLA's; by default those of `exact_options`."""

    def __post_init__(self) -> None:
        self.dtype = np.dtype(bfloat16 if self.dtype == "bfloat16" else self.dtype)

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

    def run_jax(self, batch: Tensors) -> Values:
        """Forward and backward in JAX."""
        (loss, outputs), gradients = self._jax(self.params, jax.device_put(batch))
        return Values(
            {name: np.asarray(array) for name, array in outputs.items()}, self.back(gradients), np.asarray(loss)
        )

    def run_torch(self, batch: Tensors) -> Values:
        """Forward and backward in PyTorch."""
        given = to_tensors(batch, self.module)
        return Values(*backward(dict(self.module.named_parameters()), lambda: self.theirs(self.module, given)))

    @cached_property
    def _jax(self) -> Any:
        gradients = jax.value_and_grad(self.ours, has_aux=True, allow_int=True)
        options = exact_options(self.dtype.name) if self.compiler_options is None else self.compiler_options
        return jax.jit(gradients, compiler_options=options)
