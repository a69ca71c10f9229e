"""The JAX library as a side of the comparison and of the benchmarks."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from jax_tformer.functional import AnyTransformer, Params, transformer
from jax_tformer.hub.names import from_reference, reference_shape, slots, to_reference
from jax_tformer.lora import trained, without_adapters
from jax_tformer.startup import compiler_options as training_options
from jax_tformer.startup import set_up_jax
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import TrainState, init_state, train_step
from twin.dropout import masks_of_step
from twin.sides import Masks, Setting, Shapes, StepFigures, Tensors, seconds_of, step_figures


class JaxSide:
    """The jitted training step of train.py, on one device."""

    name = "JAX"

    def __init__(
        self,
        setting: Setting,
        initial: Tensors | None = None,
        compiler_options: dict[str, Any] | None = None,
    ) -> None:
        """`initial` are the weights of a checkpoint. XLA compiles as for train.py, but with `compiler_options`."""
        model, optimization, training, device = setting
        self.net, self._compute = transformer(model), model.compute
        self._device = jax.local_devices(backend=device)[0]
        self._tx = optimizer(optimization, training.steps)
        accumulation = training.accumulation
        step = train_step(self.net, self._tx, accumulation=accumulation, loss=training.loss)
        if compiler_options is None:
            compiler_options = training_options(model.compute.dtype)
        self._step = jax.jit(step, donate_argnums=0, compiler_options=compiler_options)
        self._record = jax.jit(masks_of_step(self.net, accumulation=accumulation))
        self._initial = initial
        self._state: TrainState

    def shapes(self) -> Shapes:
        """Returns the shape of every parameter, by the names of `torch_ref`."""
        return reference_shapes(self.net)

    def numbers_that_train(self) -> int:
        """Returns how many numbers train: those of all parameters, or of the adapters."""
        return sum(leaf.size for leaf in jax.tree.leaves(trained(self.net.shapes)))

    def start(self, seed: int, weights: Tensors | None) -> None:
        """Resets the training to `weights`, or to those that train.py would begin with for this seed."""
        with jax.default_device(self._device):
            key = jax.random.key(seed)
            if weights is None:
                given = None
                if self._initial is not None:
                    given = self._params(self._initial, transformer(without_adapters(self.net.config)).shapes)
                state = jax.jit(lambda key, given: init_state(self.net, self._tx, key, given))(key, given)
            else:
                params, zero = self._params(weights, self.net.shapes), jnp.zeros((), jnp.int32)
                state = TrainState(params, self._tx.init(trained(params)), zero, jax.random.key_data(key))
        # Placed explicitly, like every later state; otherwise the second step would be compiled again.
        self._state = jax.block_until_ready(jax.device_put(state, self._device))

    def _params(self, weights: Tensors, shapes: Params) -> Params:
        """Copies, because NumPy's memory cannot be donated."""
        typed = {name: x.astype(jnp.dtype(self._compute.parameter_dtype)) for name, x in weights.items()}
        return jax.tree.map(jnp.array, from_reference(typed, shapes))

    def masks(self, batch: Tensors) -> Masks:
        """Returns the dropout masks that the next step will draw for this batch."""
        return jax.device_get(self._record(self._state, self._placed(batch)))

    def step(self, batch: Tensors, masks: Masks | None) -> StepFigures:
        """Makes one update; JAX draws the masks itself, the same that `masks` returned."""
        placed = jax.block_until_ready(self._placed(batch))
        started = time.perf_counter()
        self._state, metrics = jax.block_until_ready(self._step(self._state, placed))
        seconds = time.perf_counter() - started
        return step_figures(self.name, metrics, self._compute.dtype, seconds)

    def parameters(self) -> Tensors:
        """Returns the current parameters, by the names of `torch_ref`."""
        return to_reference(self._state.params)

    def device_memory(self) -> int | None:
        """Returns the peak bytes that JAX has used on its device; None on a CPU."""
        return device_memory(self._device)

    def product_rate(self, size: int) -> float:
        """Measures one product of square matrices, in floating-point operations per second."""
        matrix = jax.device_put(jnp.ones((size, size), self._compute.dtype), self._device)
        multiply = jax.jit(lambda x: x @ x)
        return 2 * size**3 / seconds_of(lambda: jax.block_until_ready(multiply(matrix)))

    def _placed(self, batch: Tensors) -> dict[str, jax.Array]:
        return {name: jax.device_put(array, self._device) for name, array in batch.items()}


def reference_shapes(net: AnyTransformer) -> Shapes:
    """Returns the shape of every parameter of `net`, by the names of `torch_ref`."""
    return {name: reference_shape(slot) for name, slot in slots(net.shapes).items()}


def full_precision() -> None:
    """Computes matrix products in the full precision of their type: no TF32 and no bfloat16 passes for float32."""
    jax.config.update("jax_default_matmul_precision", "highest")


def alone(setting: Setting) -> JaxSide:
    """Makes the side in a process of its own, and sets up JAX there."""
    set_up_jax(setting.model)
    full_precision()
    return JaxSide(setting)


def device_memory(device: jax.Device) -> int | None:
    """Returns the peak bytes of JAX's allocator on an accelerator; None on a CPU."""
    return None if device.platform == "cpu" else (device.memory_stats() or {}).get("peak_bytes_in_use")
