"""The JAX library as a side: `generate` and `stream`, the step of train.py, and how long that takes to compile."""

import itertools
import time
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.sides import Decoded, Training, draw_weights
from benchmarks.training_cases import OPTIMIZER, START_ID, TRAINING, BatchShape, draw_batch
from jax_tformer.config import TransformerConfig
from jax_tformer.decoding.fast import layers_apart
from jax_tformer.decoding.generation import generate, stream
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.experiment import MeshConfig
from jax_tformer.model.functional import AnyTransformer, Params, transformer
from jax_tformer.run.preparing import fit_to_devices
from jax_tformer.run.startup import compiler_options
from jax_tformer.sharding import make_mesh
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import init_state, train_step
from jax_tformer.weights.names import from_reference, reference_shape, slots
from jax_tformer_comparison.jax_side import JaxSide, device_memory
from jax_tformer_comparison.machine import forget_peak


def training(config: TransformerConfig, shape: BatchShape, device: str) -> Training:
    """Makes the side that trains as train.py does, on one device."""
    fitted = fit_to_devices(config, draw_batch(config, shape), make_mesh(MeshConfig(data=1), shape.rows), 1)
    return Training(JaxSide(fitted, OPTIMIZER, TRAINING, device), config, shape)


class Compilation:
    """How long the step takes to be traced and compiled, without any numbers."""

    def __init__(self, device: str) -> None:
        self._device = jax.local_devices(backend=device)[0]

    def seconds(self, config: TransformerConfig, shape: BatchShape) -> float:
        """Cold: a new function, so that nothing of an earlier call is reused."""
        net, tx = transformer(config), optimizer(OPTIMIZER, TRAINING.steps)
        batch = {name: jax.ShapeDtypeStruct(ids.shape, ids.dtype) for name, ids in draw_batch(config, shape).items()}
        with jax.default_device(self._device):
            state = jax.eval_shape(lambda: init_state(net, tx, jax.random.key(0)))
            began = time.perf_counter()
            step = jax.jit(train_step(net, tx), donate_argnums=0, compiler_options=compiler_options())
            step.lower(state, batch).compile()
            return time.perf_counter() - began


def arranged(net: AnyTransformer, device: jax.Device) -> Params:
    """Draws the weights that all sides get, laid out as decoding reads them fastest."""
    drawn = draw_weights({name: reference_shape(slot) for name, slot in slots(net.shapes).items()})
    with jax.default_device(device):
        weights = jax.device_put(from_reference(drawn, net.shapes), device)
        return jax.block_until_ready(layers_apart(weights))


class Decoding:
    """One model on one device, with the layers of its parameters apart."""

    def __init__(self, config: TransformerConfig, device: str) -> None:
        self._net, self._device = transformer(config), jax.local_devices(backend=device)[0]
        self._start_id = None if config.encoder is None else START_ID
        self._params = arranged(self._net, self._device)
        forget_peak()

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int, room: int, beams: int) -> Decoded:
        """The cache has as many slots as these tokens need; `room` is for others."""
        decoding = DecodingConfig(max_new_tokens=new_tokens, num_beams=beams)
        with jax.default_device(self._device):
            began = time.perf_counter()
            generated = generate(self._net, self._params, prompts, decoding, start_id=self._start_id)
            seconds = time.perf_counter() - began
        return Decoded(seconds, generated.tokens[:, 0])

    def intervals(self, prompt: Sequence[int], count: int, room: int) -> list[float]:
        """Token by token through `stream`, so that the calls from Python are counted too."""
        with jax.default_device(self._device):
            tokens = stream(self._net, self._params, [prompt], DecodingConfig(max_new_tokens=room))
            times = [time.perf_counter() for _ in itertools.islice(tokens, count + 1)]
        return np.diff(times).tolist()

    def device_memory(self) -> int | None:
        """As JAX's allocator counts it."""
        return device_memory(self._device)
