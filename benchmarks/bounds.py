"""What no implementation can beat: the least work of a step, over how fast this machine was seen to do such work."""

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jax_tformer.config import StackConfig, TransformerConfig

_WARM_SECONDS = 0.15
"""For so long a product is called before it counts."""
Shape = tuple[int, int, int]
"""m, k, n of a product [m, k] x [k, n]."""


class Flops(NamedTuple):
    """Floating-point operations of one training step; a multiplication and an addition are two."""

    projections: int
    """Products of activations with parameters, the head included; looking up embeddings is none."""
    attention: int
    """Products of queries with keys and of weights with values; where causal, the half that must be computed."""
    hidden: int
    """The other half of causal attention, which an implementation computes for nothing, or skips."""

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
    translates = config.encoder is not None and config.decoder is not None
    projections = attention = hidden = 0
    for path, leaf in _shapes(config).items():
        if path.endswith(".kernel"):
            of_source = translates and (path.startswith("encoder.") or _made_of_source(path))
            projections += 6 * math.prod(leaf.shape) * batch * (source if of_source else length)
    if config.tied_head:
        projections += 6 * (config.vocab_size or 0) * config.d_model * batch * length
    if config.encoder is not None:
        attention += batch * _attention(config, config.encoder, *2 * (source if config.decoder else length,))
    if config.decoder is not None:
        causal = batch * _attention(config, config.decoder, length, length)
        hidden = causal // 2
        attention += causal - hidden
        if config.encoder is not None:
            attention += batch * _attention(config, config.decoder, length, source)
    return Flops(projections, attention, hidden)


def _attention(config: TransformerConfig, stack: StackConfig, queries: int, keys: int) -> int:
    return 12 * stack.num_layers * stack.num_heads * config.head_width(stack) * queries * keys


def weight_bytes(config: TransformerConfig) -> int:
    """Counts the bytes of parameters that a step of decoding reads: the decoder's and the head's.

    The head may be the token table. Of other tables a step reads a row; keys and values of a source are in the cache.
    """
    shapes = _shapes(config)
    # The decoder's is declared last, or is the only one.
    table = [path for path in shapes if path.endswith("tokens.embedding")][-1]
    read = 0
    for path, leaf in shapes.items():
        head = path.startswith("head.") or (config.tied_head and path == table)
        if (path.startswith("decoder.") and not _made_of_source(path)) or head:
            read += math.prod(leaf.shape) * leaf.dtype.itemsize
    return read


def cache_bytes(config: TransformerConfig, batch: int, prompt: int, new_tokens: int, beams: int) -> int:
    """Counts the bytes of keys and values that a step reads, on average over a generation.

    These are of the tokens so far, and of the sources.

    The beams of a source share its keys and values. A decoder alone has the prompt in the cache.
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


def best_way(found: dict[str, list[float]]) -> tuple[str, float]:
    """Picks the way with the largest median; returns its name and that median."""
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    name = max(medians, key=medians.__getitem__)
    return name, medians[name]


class Bandwidth:
    """Several ways of reading a large float32 array with all cores, or with the accelerator."""

    def __init__(self, device: str, megabytes: int, threads: int) -> None:
        """All ways read the same numbers; those on the processor have a copy for each library."""
        import jax
        import jax.numpy as jnp
        import torch

        from twin.torch_side import torch_device

        count = megabytes * 2**20 // 4
        self._bytes, self._calls = 4 * count, 1 if device == "cpu" else 20
        with jax.default_device(jax.local_devices(backend=device)[0]):
            for_jax = jnp.ones(count, jnp.float32)
        for_torch = torch.ones(count, device=torch_device(device))
        total = jax.jit(jnp.sum)
        self._ways: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "sum of jax": (lambda: total(for_jax), jax.block_until_ready),
            "sum of torch": (for_torch.sum, _wait_for_torch),
        }
        if device == "cpu":
            parts, pool = np.array_split(np.ones(count, np.float32), threads), ThreadPoolExecutor(threads)
            self._ways["sum of numpy, a thread a core"] = (lambda: list(pool.map(np.sum, parts)), bool)
            self._ways["dot of numpy, a thread a core"] = (lambda: list(pool.map(_square, parts)), bool)

    def measure(self) -> dict[str, list[float]]:
        """Bytes a second of every way, warm: it has been called once before."""
        return {
            name: [self._calls * self._bytes / _seconds(read, wait, self._calls)]
            for warm in (True, False)
            for name, (read, wait) in self._ways.items()
        }


class Products:
    """The same products of matrices in both libraries, with all cores or with the accelerator."""

    def __init__(self, device: str, shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> None:
        """`dtypes` are names that both libraries know: "float32", "bfloat16"."""
        import jax
        import jax.numpy as jnp
        import torch

        from twin.torch_side import torch_device

        self._calls = 3 if device == "cpu" else 20
        ours: dict[str, tuple[int, Callable[[], Any], Callable[[Any], Any]]] = {}
        theirs: dict[str, tuple[int, Callable[[], Any], Callable[[Any], Any]]] = {}
        product = jax.jit(jnp.matmul)
        for m, k, n in shapes:
            drawn = [np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((m, k), (k, n))]
            for dtype in dtypes:
                name, work = f"{dtype} {m} x {k} x {n}", 2 * m * k * n
                with jax.default_device(jax.local_devices(backend=device)[0]):
                    a, b = (jnp.array(x, dtype) for x in drawn)
                c, d = (torch.tensor(x, dtype=getattr(torch, dtype), device=torch_device(device)) for x in drawn)
                ours[f"jax {name}"] = (work, partial(product, a, b), jax.block_until_ready)
                theirs[f"torch {name}"] = (work, partial(torch.matmul, c, d), _wait_for_torch)
        # One library after the other: threads of the one that wait for work disturb the other.
        self._ways = ours | theirs

    def measure(self) -> dict[str, list[float]]:
        """Operations a second of every way, each warm: it has been called for a while before."""
        found = {}
        for name, (work, multiply, wait) in self._ways.items():
            warm = time.perf_counter() + _WARM_SECONDS
            while time.perf_counter() < warm:
                wait(multiply())
            found[name] = [self._calls * work / _seconds(multiply, wait, self._calls)]
        return found


def _square(part: np.ndarray) -> float:
    return float(np.dot(part, part))


def of_type(found: dict[str, list[float]], dtype: str) -> dict[str, list[float]]:
    """Picks the products that were computed in `dtype`."""
    return {name: rates for name, rates in found.items() if name.split()[1] == dtype}


def of_library(found: dict[str, list[float]], library: str) -> dict[str, list[float]]:
    """Picks the products that `library`, "jax" or "torch", has computed."""
    return {name: rates for name, rates in found.items() if name.split()[0] == library}


def _seconds(call: Callable[[], Any], wait: Callable[[Any], Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        result = call()
    wait(result)
    return time.perf_counter() - began


def _wait_for_torch(result: Any) -> None:
    if result.is_cuda:
        import torch

        torch.cuda.synchronize()
