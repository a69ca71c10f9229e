"""What no implementation can beat: the least work of a step, over how fast this machine was seen to do such work."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jax_tformer.config import TransformerConfig
from twin.sides import seconds_of


def weight_bytes(config: TransformerConfig) -> int:
    """Counts the bytes of parameters that a step of decoding reads: the decoder's and the head's.

    The head may be the token table. Of other tables a step reads a row; keys and values of a source are in the cache.
    """
    # Imported here, so that PyTorch is measured in a process without JAX.
    from jax_tformer.training.prepare import made_of_source, parameter_shapes

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
