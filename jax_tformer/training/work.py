"""How much work a training step is, and how fast this machine does such work: model FLOPs utilisation (MFU)."""

import math
import time
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.functional import transformer

_SECONDS = 0.5


class Flops(NamedTuple):
    """Floating-point operations of one training step; a multiplication and an addition are two."""

    projections: int
    """Products of activations with parameters, the head included; looking up embeddings is none."""
    attention: int
    """Products of queries with keys and of weights with values; where causal, the half that must be computed."""

    @property
    def needed(self) -> int:
        """What counts as work."""
        return self.projections + self.attention


@cache
def training_flops(config: TransformerConfig, batch: int, length: int, source: int = 0) -> Flops:
    """Counts the operations of a step on `batch` rows of `length` tokens (of a target), with `source` tokens before.

    Every product is computed once forward and twice backward, once for each of its factors: 6 operations for each
    parameter and token, and for self-attention 12 L H C T S in a row (two products of 2 H C T S forward). What
    softmax, norms, activations and the optimizer take is left out: it does not grow with the widths squared.
    """
    encoder, decoder = config.encoder, config.decoder
    read = source if decoder is not None else length
    projections = attention = 0
    for path, leaf in parameter_shapes(config).items():
        if path.endswith(".kernel"):
            of_source = path.startswith("encoder.") or made_of_source(path)
            projections += 6 * math.prod(leaf.shape) * (read if of_source else length)
    if config.tied_head:
        projections += 6 * (config.vocab_size or 0) * config.d_model * length
    if encoder is not None:
        attention += _attention(config, encoder, read, read)
    if decoder is not None:
        attention += _attention(config, decoder, length, length) // 2
        if encoder is not None:
            attention += _attention(config, decoder, length, source)
    return Flops(batch * projections, batch * attention)


def _attention(config: TransformerConfig, stack: StackConfig, queries: int, keys: int) -> int:
    return 12 * stack.num_layers * stack.num_heads * config.head_width(stack) * queries * keys


def parameter_shapes(config: TransformerConfig) -> dict[str, Any]:
    """Returns every parameter's shape and type, by its path with dots."""
    return dict(traverse_util.flatten_dict(transformer(config).shapes, sep="."))


def made_of_source(path: str) -> bool:
    """Whether a parameter makes keys or values of the encoder's output."""
    return ".cross_attention.key." in path or ".cross_attention.value." in path


def product_rate(dtype: str) -> float:
    """Measures the operations a second of one large product of matrices, the fastest of half a second of them.

    On the first device of this process, times the number of its accelerators; on a CPU, which all cores share.
    """
    devices = jax.local_devices()
    size = 1024 if devices[0].platform == "cpu" else 8192
    matrix = jax.device_put(jax.random.normal(jax.random.key(0), (size, size), dtype), devices[0])
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(matrix, matrix))
    fastest, ends = math.inf, time.perf_counter() + _SECONDS
    while (began := time.perf_counter()) < ends:
        jax.block_until_ready(multiply(matrix, matrix))
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * size**3 / fastest * (1 if devices[0].platform == "cpu" else len(devices))
