"""The JAX library as a side that trains: the step of train.py, and how long it takes to compile."""

import time

import jax
import jax.numpy as jnp

from benchmarks.harness import forget_peak
from benchmarks.training_sides import OPTIMIZER, STEPS, BatchShape, draw_batch
from benchmarks.weights import parameters
from jax_tformer.config import TransformerConfig
from jax_tformer.experiment import MeshConfig
from jax_tformer.model.functional import transformer
from jax_tformer.run.preparing import fit_to_devices
from jax_tformer.run.startup import compiler_options
from jax_tformer.sharding import make_mesh
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import StepMetrics, TrainState, init_state, train_step
from jax_tformer_comparison.machine import peak_memory


class Ours:
    """One model on one device, with its optimizer and one batch."""

    def __init__(self, config: TransformerConfig, shape: BatchShape, seed: int, device: str) -> None:
        batch = draw_batch(config, shape, seed)
        net = transformer(fit_to_devices(config, batch, make_mesh(MeshConfig(data=1), shape.rows), 1))
        tx = optimizer(OPTIMIZER, STEPS)
        self._device = jax.local_devices(backend=device)[0]
        forget_peak()
        self._libraries = peak_memory()
        self._metrics: StepMetrics | None = None
        with jax.default_device(self._device):
            # Copies: arrays that NumPy still owns cannot be donated.
            weights = jax.tree.map(jnp.array, parameters(net, seed))
            # As init_state makes it, without drawing and compiling for weights that are replaced.
            key = jax.random.key_data(jax.random.key(seed))
            state = TrainState(weights, tx.init(weights), jnp.zeros((), jnp.int32), key)
            self._state = jax.block_until_ready(state)
            self._batch = {name: jnp.array(ids) for name, ids in batch.items()}
            self._step = jax.jit(train_step(net, tx), donate_argnums=0, compiler_options=compiler_options())

    def steps(self, count: int) -> list[float]:
        """Each update is waited for, as the other sides' are."""
        seconds = []
        with jax.default_device(self._device):
            for _ in range(count):
                began = time.perf_counter()
                self._state, self._metrics = jax.block_until_ready(self._step(self._state, self._batch))
                seconds.append(time.perf_counter() - began)
        return seconds

    def loss(self) -> float:
        """Of the last step."""
        assert self._metrics is not None
        return float(self._metrics.loss)

    def libraries_memory(self) -> int:
        """With JAX's device at hand."""
        return self._libraries

    def forget_peak(self) -> None:
        """Of the process; JAX's allocator on an accelerator keeps its own."""
        forget_peak()

    def device_memory(self) -> int | None:
        """As JAX's allocator counts it."""
        statistics = self._device.memory_stats() if self._device.platform != "cpu" else None
        return None if statistics is None else statistics["peak_bytes_in_use"]


class Compilation:
    """How long the step takes to be traced and compiled, without any numbers."""

    def __init__(self, device: str) -> None:
        self._device = jax.local_devices(backend=device)[0]

    def seconds(self, config: TransformerConfig, shape: BatchShape) -> float:
        """Cold: a new function, so that nothing of an earlier call is reused."""
        net, tx = transformer(config), optimizer(OPTIMIZER, STEPS)
        with jax.default_device(self._device):
            state = jax.eval_shape(lambda: init_state(net, tx, jax.random.key(0)))
            batch = {
                name: jax.ShapeDtypeStruct(ids.shape, ids.dtype) for name, ids in draw_batch(config, shape, 0).items()
            }
            began = time.perf_counter()
            jax.jit(train_step(net, tx), donate_argnums=0, compiler_options=compiler_options()).lower(
                state, batch
            ).compile()
            return time.perf_counter() - began
