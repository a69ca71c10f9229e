"""The JAX library as a side of the comparison."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from jax_tformer.experiment import ExperimentConfig
from jax_tformer.models.transformer import transformer
from jax_tformer.run.startup import compiler_options
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import TrainState, init_state, recorded_dropout, train_step
from jax_tformer.weights.names import from_reference, to_reference
from jax_tformer_comparison.sides import Masks, StepFigures, Tensors, require_loss_type


def full_precision() -> None:
    """Products in the precision of their type: no TF32 and no bfloat16 passes for float32."""
    jax.config.update("jax_default_matmul_precision", "highest")


class JaxSide:
    """The jitted training step of train.py, on one device."""

    name = "JAX"

    def __init__(self, experiment: ExperimentConfig) -> None:
        """`experiment.model` has its vocabulary size; startup.set_up_jax has been called for it."""
        training = experiment.training
        self.net = transformer(experiment.model)
        self._dtype = experiment.model.compute.dtype
        self._tx = optimizer(experiment.optimizer, training.steps)
        accumulation = training.accumulation
        step = train_step(self.net, self._tx, accumulation=accumulation, label_smoothing=training.label_smoothing)
        self._step = jax.jit(step, donate_argnums=0, compiler_options=compiler_options(self._dtype))
        self._record = jax.jit(recorded_dropout(self.net, accumulation=accumulation))
        self._state: TrainState

    def start(self, seed: int, weights: Tensors | None) -> None:
        """Without weights: those of a training run with this seed, drawn as train.py draws them."""
        state = jax.jit(lambda key: init_state(self.net, self._tx, key))(jax.random.key(seed))
        if weights is not None:
            typed = {name: array.astype(jnp.dtype(self._dtype)) for name, array in weights.items()}
            params = jax.tree.map(jnp.asarray, from_reference(typed, self.net.shapes))
            state = state._replace(params=params)
        # On its device by name, as every later state is: the second step would otherwise be compiled once more.
        self._state = jax.device_put(state, jax.local_devices()[0])

    def masks(self, batch: Tensors) -> list[dict[str, np.ndarray]]:
        """The dropout masks that the next step will draw for this batch."""
        return jax.device_get(self._record(self._state, _placed(batch)))

    def step(self, batch: Tensors, masks: Masks | None) -> StepFigures:
        """One update; JAX draws its own masks, the same that `masks` has returned."""
        placed = jax.block_until_ready(_placed(batch))
        started = time.perf_counter()
        self._state, metrics = jax.block_until_ready(self._step(self._state, placed))
        seconds = time.perf_counter() - started
        require_loss_type(self.name, str(metrics.loss.dtype), self._dtype)
        return StepFigures(float(metrics.loss), float(metrics.gradient_norm), int(metrics.tokens), seconds)

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters as they are now, by the names of `torch_ref`."""
        return to_reference(self._state.params)

    def device_memory(self) -> int | None:
        """The most bytes that JAX has had in use on its device."""
        statistics = jax.local_devices()[0].memory_stats() or {}
        return statistics.get("peak_bytes_in_use")


def _placed(batch: Tensors) -> dict[str, jax.Array]:
    device = jax.local_devices()[0]
    return {name: jax.device_put(array, device) for name, array in batch.items()}
