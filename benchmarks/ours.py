"""The JAX library as a side: `generate` and `stream` on parameters with their layers apart."""

import itertools
import time
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.harness import forget_peak
from benchmarks.sides import START_ID, Decoded
from benchmarks.weights import parameters
from jax_tformer.config import TransformerConfig
from jax_tformer.decoding.fast import layers_apart
from jax_tformer.decoding.generation import generate, stream
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.model.functional import Params, transformer


class Ours:
    """One model on one device."""

    def __init__(self, config: TransformerConfig, seed: int, device: str) -> None:
        self._net, self._seed = transformer(config), seed
        self._device = jax.local_devices(backend=device)[0]
        self._start_id = None if config.encoder is None else START_ID
        self._arrange(single=True)

    def _arrange(self, *, single: bool) -> None:
        """Weights as one row alone, or several, are decoded with; of one form at a time."""
        self._single, self._params = single, Params()
        with jax.default_device(self._device):
            weights = jax.device_put(parameters(self._net, self._seed), self._device)
            self._params = jax.block_until_ready(layers_apart(weights, single=single))
        del weights
        forget_peak()

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int, room: int, beams: int) -> Decoded:
        """The cache has as many slots as these tokens need; `room` is for others."""
        decoding, single = DecodingConfig(max_new_tokens=new_tokens, num_beams=beams), len(prompts) == beams == 1
        if single != self._single:
            self._arrange(single=single)
        with jax.default_device(self._device):
            began = time.perf_counter()
            generated = generate(self._net, self._params, prompts, decoding, start_id=self._start_id)
            seconds = time.perf_counter() - began
        return Decoded(seconds, generated.tokens[:, 0])

    def intervals(self, prompt: Sequence[int], count: int, room: int) -> list[float]:
        """Token by token through `stream`, so that the calls from Python are counted too."""
        if not self._single:
            self._arrange(single=True)
        with jax.default_device(self._device):
            tokens = stream(self._net, self._params, [prompt], DecodingConfig(max_new_tokens=room))
            times = [time.perf_counter() for _ in itertools.islice(tokens, count + 1)]
        return np.diff(times).tolist()

    def device_memory(self) -> int | None:
        """As JAX's allocator counts it."""
        statistics = self._device.memory_stats() if self._device.platform != "cpu" else None
        return None if statistics is None else statistics["peak_bytes_in_use"]
