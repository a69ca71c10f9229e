"""A JAX function by itself: its outputs, and the gradients of a fixed random projection of them."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity.differ.values import Values as Followed
from parity.gates.measure import ParityError, failure
from parity.gates.projection import Inputs, Values, projected, rounded
from parity.gates.pytrees import Tensors, is_array, is_floating, paths, replaced

Arrays = dict[str, jax.Array]
FLOAT64: dict[str, dict[str, Any]] = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}
"""Compiler options by platform: XLA's fusions for YNNPACK were seen to read memory that nobody wrote."""


def exact_options(dtype: str) -> dict[str, Any]:
    """What float64, in which the truth is computed, has to be compiled with on this machine."""
    return FLOAT64.get(jax.default_backend(), {}) if dtype == "float64" else {}


@contextmanager
def exactly() -> Iterator[None]:
    """float64 on for JAX, and products in full precision on every platform."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


class JaxSide:
    """`function(params, *inputs)`, whose parameters are any pytree of arrays."""

    framework = "jax"

    def __init__(self, function: Callable[..., Any], params: Any, inputs: Inputs) -> None:
        """Raises ParityError for parameters of which none can be differentiated."""
        self._function, self._inputs, self._params = function, inputs, params
        self.weights: Tensors = {path: np.asarray(leaf) for path, leaf in paths(params).items() if is_array(leaf)}
        self.buffers: tuple[str, ...] = ()
        self.trained = {path for path, array in self.weights.items() if is_floating(array)}
        """What has a gradient."""
        self.left_out: set[str] = set()
        """Outputs that are no arrays."""
        self._compiled: dict[str, Any] = {}
        self._names: list[str] = []
        if not self.trained:
            raise ParityError("params hold no floating-point array, so that there is nothing to differentiate")

    def exactly(self) -> AbstractContextManager[None]:
        """What has to be switched on around `run`."""
        return exactly()

    def run(
        self,
        weights: Tensors,
        dtype: str = "float64",
        held_by: str | None = None,
        known: Tensors | None = None,
        of: Collection[str] | None = None,
    ) -> Values:
        """Forward and backward in `dtype`, on inputs that `held_by` can hold; compiled once for each.

        `known` are projections by the outputs' names, `of` the weights whose gradients are wanted: by default all that
        are trained, of none forward alone. Call it within `exactly`.
        """
        if dtype not in self._compiled:
            options = exact_options(dtype)
            self._compiled[dtype] = jax.jit(jax.value_and_grad(self._loss, has_aux=True), compiler_options=options)
        wanted = self.trained if of is None else of
        narrow = rounded(weights, dtype, dtype)
        moving = {path: array for path, array in narrow.items() if path in wanted}
        fixed = {path: array for path, array in narrow.items() if path not in wanted}
        inputs = self._inputs.rounded(held_by or dtype, dtype)
        given = jax.device_put((moving, fixed, inputs.arrays, known or {}))
        (loss, outputs), gradients = self._compiled[dtype](*given)
        # In the order of the function: jax.jit sorts names.
        ordered = {name: np.asarray(outputs[name]) for name in self._names}
        return Values(ordered, {path: np.asarray(gradients[path]) for path in moving}, np.asarray(loss))

    def followed(self, weights: Tensors) -> Followed:
        """Every value of the way forward, in float64 also where the program casts. Call it within `exactly`."""
        from parity.differ.jax_values import values_of_jax

        inputs = self._inputs.rounded("float64", "float64")
        given = jax.device_put([rounded(weights, "float64", "float64"), inputs.arrays])
        names: Any = [("parameter", path) for path in sorted(weights)]
        names += [("input", name) for name in sorted(inputs.arrays)]
        return values_of_jax(lambda *given: self._loss(given[0], {}, given[1], {})[1], lambda: given, names, widen=())

    def _loss(
        self,
        moving: Arrays,
        fixed: Arrays,
        arrays: Arrays,
        known: Arrays,
    ) -> tuple[jax.Array, Arrays]:
        """(the projection of all outputs, the outputs) of parameters by path: those that are trained, and others."""

        def like(numbers: Any, output: jax.Array) -> jax.Array:
            return jnp.asarray(numbers, output.dtype)

        params = replaced(self._params, moving | fixed)
        try:
            output = self._inputs.call(self._function, params, arrays=arrays)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            shapes = {path: list(np.shape(leaf)) for path, leaf in paths(params).items()}
            given = [list(array.shape) for array in arrays.values()]
            raise failure("ours", error, f"params {shapes} and inputs {given}") from error
        loss, outputs = projected(output, "ours", jax.Array, self.left_out, known, like)
        self._names = list(outputs)
        return loss, outputs
