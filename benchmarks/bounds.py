"""What no implementation can beat: the least work of a step, over how fast this machine was seen to do such work."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jax_tformer.config import StackConfig, TransformerConfig
from twin.sides import seconds_of


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


def training_flops(config: TransformerConfig, batch: int, length: int, source: int = 0) -> Flops:
    """Counts the operations of a step on `batch` rows of `length` tokens (of a target), with `source` tokens before.

    Every product is computed once forward and twice backward, once for each of its factors: 6 operations for each
    parameter and token, and for self-attention 12 L H C T S in a row (two products of 2 H C T S forward). What
    softmax, norms, activations and the optimizer take is left out: it does not grow with the widths squared.
    """
    encoder, decoder = config.encoder, config.decoder
    read = source if decoder is not None else length
    projections = attention = 0
    for path, leaf in _shapes(config).items():
        if path.endswith(".kernel"):
            of_source = path.startswith("encoder.") or _made_of_source(path)
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


def weight_bytes(config: TransformerConfig) -> int:
    """Counts the bytes of parameters that a step of decoding reads: the decoder's and the head's.

    The head may be the token table. Of other tables a step reads a row; keys and values of a source are in the cache.
    """
    shapes = _shapes(config)
    read = [path for path in shapes if path.startswith(("decoder.", "head.")) and not _made_of_source(path)]
    if config.tied_head:
        # The decoder's table is declared last, or is the only one.
        read.append([path for path in shapes if path.endswith("tokens.embedding")][-1])
    return sum(math.prod(shapes[path].shape) * shapes[path].dtype.itemsize for path in read)


def cache_bytes(config: TransformerConfig, batch: int, prompt: int, new_tokens: int, beams: int) -> int:
    """Counts the bytes of keys and values that a step reads, on average over a generation.

    These are of the tokens so far, and of the sources. The beams of a source share its keys and values. A decoder alone
    has the prompt in the cache.
    """
    stack = config.output_stack
    of_token = 2 * stack.num_layers * (stack.key_value_heads or stack.num_heads) * config.head_width(stack)
    of_token *= np.dtype(config.compute.dtype).itemsize
    translates = config.encoder is not None
    tokens = new_tokens / 2 + (1 if translates else prompt)
    return int(of_token * (batch * beams * tokens + (batch * prompt if translates else 0)))


def _shapes(config: TransformerConfig) -> dict[str, Any]:
    """Every parameter's, by its path with dots."""
    from flax import traverse_util

    from jax_tformer.functional import transformer

    return traverse_util.flatten_dict(transformer(config).shapes, sep=".")


def _made_of_source(path: str) -> bool:
    # Keys and values of cross-attention are made of the encoder's output.
    return ".cross_attention.key." in path or ".cross_attention.value." in path


class Bandwidth:
    """Reads a large float32 array in several ways: with both libraries, and by NumPy with a thread a core."""

    def __init__(self, device: str, megabytes: int, threads: int) -> None:
        """All ways read the same numbers; those on the processor have a copy for each library."""
        import jax
        import jax.numpy as jnp
        import torch

        from twin.torch_side import torch_device

        self._size = megabytes * 2**20
        ours = jnp.ones(self._size // 4, jnp.float32, device=jax.local_devices(backend=device)[0])
        theirs = torch.ones(self._size // 4, device=torch_device(device))
        total = jax.jit(jnp.sum)
        self._ways: dict[str, Callable[[], Any]] = {
            "sum of jax": lambda: total(ours).block_until_ready(),
            "sum of torch": lambda: theirs.sum().item(),
        }
        if device == "cpu":
            parts, pool = np.array_split(np.ones(self._size // 4, np.float32), threads), ThreadPoolExecutor(threads)
            self._ways["dot of numpy, a thread a core"] = lambda: list(pool.map(np.dot, parts, parts))

    def measure(self) -> dict[str, float]:
        """Bytes a second of every way."""
        return {name: self._size / seconds_of(read) for name, read in self._ways.items()}
