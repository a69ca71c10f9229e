"""The JAX library as a side: `generate`, and the step of train.py."""

import time

import jax

from benchmarks.sides import Decoded, Prompts, Training, draw_weights
from benchmarks.training_cases import OPTIMIZER, START_ID, TRAINING, BatchShape, draw_batch
from jax_tformer.config import TransformerConfig
from jax_tformer.config.experiment import DecodingConfig, MeshConfig
from jax_tformer.decoding.generate import generate
from jax_tformer.decoding.loop import layers_apart
from jax_tformer.functional import transformer
from jax_tformer.hub.names import from_reference
from jax_tformer.training.prepare import fit_to_devices
from jax_tformer.training.sharding import make_mesh
from twin.jax_side import JaxSide, device_memory, reference_shapes
from twin.machine import forget_peak
from twin.sides import Setting


def training(config: TransformerConfig, shape: BatchShape, device: str) -> Training:
    """Makes the side that trains as train.py does, on one device."""
    fitted = fit_to_devices(config, draw_batch(config, shape), make_mesh(MeshConfig(data=1), shape.rows), 1)
    return Training(JaxSide(Setting(fitted, OPTIMIZER, TRAINING, device)), config, shape)


class Decoding:
    """One model on one device, with the layers of its parameters apart."""

    def __init__(self, config: TransformerConfig, device: str) -> None:
        self._net, self._device = transformer(config), jax.local_devices(backend=device)[0]
        self._start_id = None if config.encoder is None else START_ID
        weights = from_reference(draw_weights(reference_shapes(self._net)), self._net.shapes)
        with jax.default_device(self._device):
            self._params = jax.block_until_ready(layers_apart(jax.device_put(weights, self._device)))
        forget_peak()

    def decode(self, prompts: Prompts, new_tokens: int, room: int, beams: int) -> Decoded:
        """The cache has as many slots as these tokens need; `room` is for others."""
        decoding = DecodingConfig(max_new_tokens=new_tokens, num_beams=beams)
        with jax.default_device(self._device):
            began = time.perf_counter()
            generated = generate(self._net, self._params, prompts, decoding, start_id=self._start_id)
            seconds = time.perf_counter() - began
        return Decoded(seconds, generated.tokens[:, 0])

    def device_memory(self) -> int | None:
        """As JAX's allocator counts it."""
        return device_memory(self._device)
