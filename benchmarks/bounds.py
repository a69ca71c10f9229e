"""What no implementation can beat: the least work of a step, over how fast this machine was seen to do such work."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jax_tformer.config import TransformerConfig

_WARM_SECONDS = 0.15
"""For so long a way is called before it counts."""
Shape = tuple[int, int, int]
"""m, k, n of a product [m, k] x [k, n]."""


def weight_bytes(config: TransformerConfig) -> int:
    """Counts the bytes of parameters that a step of decoding reads: the decoder's and the head's.

    The head may be the token table. Of other tables a step reads a row; keys and values of a source are in the cache.
    """
    # Imported here, so that PyTorch is measured in a process without JAX.
    from jax_tformer.training.work import made_of_source, parameter_shapes

    shapes = parameter_shapes(config)
    read = [path for path in shapes if path.startswith(("decoder.", "head.")) and not made_of_source(path)]
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


class Way(NamedTuple):
    """The fastest way that was found of doing some work."""

    name: str
    rate: float
    """Its median, in work a second."""


def fastest(turns: list[dict[str, float]], *words: str) -> Way:
    """Picks the way with the largest median over several turns, of those whose names have all `words`."""
    names = [name for name in turns[0] if set(words) <= set(name.split())]
    return max((Way(name, statistics.median(turn[name] for turn in turns)) for name in names), key=lambda way: way.rate)


class Ways:
    """Several ways of doing work in both libraries, with all cores or with the accelerator."""

    def __init__(self, device: str) -> None:
        import jax
        import torch

        self.calls = 3 if device == "cpu" else 20
        self.jax_device = jax.default_device(jax.local_devices(backend=device)[0])
        self.torch_device = torch.device("cuda" if device == "gpu" else device)
        self.ways: dict[str, tuple[float, Callable[[], Any]]] = {}
        """Name -> (work, what does it)."""

    def measure(self) -> dict[str, float]:
        """Work a second of every way, each warm: it has been called for a while before."""
        found = {}
        for name, (work, call) in self.ways.items():
            warm = time.perf_counter() + _WARM_SECONDS
            while time.perf_counter() < warm:
                _wait(call())
            began = time.perf_counter()
            for _ in range(self.calls):
                result = call()
            _wait(result)
            found[name] = self.calls * work / (time.perf_counter() - began)
        return found


class Bandwidth(Ways):
    """Reads a large float32 array: work is bytes."""

    def __init__(self, device: str, megabytes: int, threads: int) -> None:
        """All ways read the same numbers; those on the processor have a copy for each library."""
        import jax
        import jax.numpy as jnp
        import torch

        super().__init__(device)
        size = megabytes * 2**20
        with self.jax_device:
            ours = jnp.ones(size // 4, jnp.float32)
        self.ways["sum of jax"] = size, partial(jax.jit(jnp.sum), ours)
        self.ways["sum of torch"] = size, torch.ones(size // 4, device=self.torch_device).sum
        if device == "cpu":
            parts, pool = np.array_split(np.ones(size // 4, np.float32), threads), ThreadPoolExecutor(threads)
            for name, read in {"sum": np.sum, "dot": lambda part: np.dot(part, part)}.items():
                call = partial(lambda read: list(pool.map(read, parts)), read)
                self.ways[f"{name} of numpy, a thread a core"] = size, call


class Products(Ways):
    """Multiplies matrices: work is floating-point operations."""

    def __init__(self, device: str, shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> None:
        """`dtypes` are names that both libraries know: "float32", "bfloat16"."""
        import jax
        import jax.numpy as jnp
        import torch

        super().__init__(device)
        product, theirs = jax.jit(jnp.matmul), {}
        for (m, k, n), dtype in itertools.product(shapes, dtypes):
            drawn = [np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((m, k), (k, n))]
            name, work = f"{dtype} {m} x {k} x {n}", 2 * m * k * n
            with self.jax_device:
                self.ways[f"jax {name}"] = work, partial(product, *(jnp.array(x, dtype) for x in drawn))
            given = (torch.tensor(x, dtype=getattr(torch, dtype), device=self.torch_device) for x in drawn)
            theirs[f"torch {name}"] = work, partial(torch.matmul, *given)
        # One library after the other: threads of the one that wait for work disturb the other.
        self.ways |= theirs


def _wait(result: Any) -> None:
    """Waits for an array of either library; those of NumPy are there already."""
    if getattr(result, "is_cuda", False):
        import torch

        torch.cuda.synchronize()
    elif hasattr(result, "block_until_ready"):
        result.block_until_ready()
