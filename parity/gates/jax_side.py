"""A JAX function by itself: its outputs, and the gradients of a fixed random projection of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity.differ.values import Values as Followed
from parity.gates.measure import ParityError, failure
from parity.gates.projection import (
    Inputs,
    Tensors,
    Values,
    is_floating,
    known_or_made,
    named_outputs,
    rounded,
)
from parity.gates.pytrees import is_array, paths, replaced

FLOAT64: dict[str, dict[str, Any]] = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}
"""Compiler options by platform: XLA's fusions for YNNPACK were seen to read memory that nobody wrote."""


def exact_options(dtype: str) -> dict[str, Any]:
    """What float64, in which the truth is computed, has to be compiled with on this machine."""
    return FLOAT64.get(jax.default_backend(), {}) if dtype == "float64" else {}


def jax_loss(output: Any, left_out: set[str], known: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(the projection of all floating outputs, the outputs by name); raises what `named_outputs` raises."""
    outputs = named_outputs(output, "ours", jax.Array, left_out, floating=False)
    terms = [
        (array * jnp.asarray(known_or_made(name, array.shape, known), array.dtype)).sum()
        for name, array in outputs.items()
        if jnp.issubdtype(array.dtype, jnp.floating)
    ]
    return sum(terms[1:], terms[0]), outputs


def called(function: Callable[..., Any], params: Any, inputs: Inputs, arrays: Mapping[str, jax.Array]) -> Any:
    """`function(params, *arrays)`; raises ParityError, which shows the shapes, where the arguments do not fit."""
    try:
        return inputs.call(function, params, arrays=arrays)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        shapes = {path: list(np.shape(leaf)) for path, leaf in paths(params).items()}
        given = [list(array.shape) for array in arrays.values()]
        raise failure("ours", error, f"params {shapes} and inputs {given}") from error


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.extended))


class JaxSide:
    """`function(params, *inputs)`, whose parameters are any pytree of arrays."""

    framework = "jax"

    def __init__(self, function: Callable[..., Any], params: Any, inputs: Inputs) -> None:
        """Raises ParityError for parameters of which none can be differentiated."""
        self._function, self._inputs, self._params = function, inputs, params
        arrays = {path: leaf for path, leaf in paths(params).items() if is_array(leaf) and not _is_key(leaf)}
        self.weights: Tensors = {path: np.asarray(leaf) for path, leaf in arrays.items()}
        self.buffers: tuple[str, ...] = ()
        self.trained = {path for path, array in self.weights.items() if is_floating(array.dtype)}
        """What has a gradient."""
        self.left_out: set[str] = set()
        """Outputs that are no arrays."""
        self._compiled: dict[str, Any] = {}
        self._names: list[str] = []
        if not self.trained:
            raise ParityError("params hold no floating-point array, so that there is nothing to differentiate")

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """float64 on, and products in full precision on every platform."""
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            yield

    def run(self, weights: Tensors, inputs: Inputs, dtype: str, known: Tensors | None = None) -> Values:
        """Forward and backward in `dtype`, on inputs of that type and weights that it can hold; compiled once for each.

        `known` are projections by the outputs' names. Call it within `exactly`.
        """
        if dtype not in self._compiled:
            options = exact_options(dtype)
            self._compiled[dtype] = jax.jit(jax.value_and_grad(self.loss, has_aux=True), compiler_options=options)
        moving = {path: array for path, array in rounded(weights, dtype, dtype).items() if path in self.trained}
        fixed = {path: array for path, array in weights.items() if path not in self.trained}
        given = jax.device_put((moving, fixed, inputs.arrays, known or {}))
        (loss, outputs), gradients = self._compiled[dtype](*given)
        # In the order of the function: jax.jit sorts names.
        ordered = {name: np.asarray(outputs[name]) for name in self._names}
        return Values(ordered, {path: np.asarray(gradients[path]) for path in moving}, np.asarray(loss))

    def followed(self, weights: Tensors, inputs: Inputs) -> Followed:
        """Every value of the way forward, in float64 also where the program casts. Call it within `exactly`."""
        from parity.differ.jax_values import values_of_jax

        given = jax.device_put([rounded(weights, "float64", "float64"), inputs.arrays])
        names: Any = [("parameter", path) for path in sorted(weights)]
        names += [("input", name) for name in sorted(inputs.arrays)]
        return values_of_jax(lambda *given: self.loss(given[0], {}, given[1], {})[1], lambda: given, names, widen=())

    def loss(
        self,
        moving: dict[str, jax.Array],
        fixed: dict[str, jax.Array],
        arrays: dict[str, jax.Array],
        known: dict[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(the projection of all outputs, the outputs) of parameters by path: those that are trained, and others."""
        params = replaced(self._params, moving | fixed)
        output = called(self._function, params, self._inputs, arrays)
        loss, outputs = jax_loss(output, self.left_out, known)
        self._names = list(outputs)
        return loss, outputs
