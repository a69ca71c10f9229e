"""How fast this machine reads its memory: measured in several ways, of which the fastest counts."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch


class Bandwidth:
    """Several ways of reading a large float32 array with all cores, or with the accelerator."""

    def __init__(self, device: str, megabytes: int, threads: int) -> None:
        """All ways read the same numbers; those on the processor have a copy for each library."""
        count = megabytes * 2**20 // 4
        self._bytes, self._calls = 4 * count, 1 if device == "cpu" else 20
        kind = "cuda" if device == "gpu" else device
        with jax.default_device(jax.local_devices(backend=device)[0]):
            for_jax = jnp.ones(count, jnp.float32)
        for_torch = torch.ones(count, device=kind)
        total = jax.jit(jnp.sum)

        def wait(result: Any) -> None:
            if kind == "cuda":
                torch.cuda.synchronize()

        self._ways: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "sum of jax": (lambda: total(for_jax), jax.block_until_ready),
            "sum of torch": (for_torch.sum, wait),
        }
        if device == "cpu":
            parts, pool = np.array_split(np.ones(count, np.float32), threads), ThreadPoolExecutor(threads)
            self._ways["sum of numpy, a thread a core"] = (lambda: list(pool.map(np.sum, parts)), wait)
            self._ways["dot of numpy, a thread a core"] = (lambda: list(pool.map(_square, parts)), wait)

    def measure(self, repeats: int) -> dict[str, list[float]]:
        """Bytes a second of every way, by turns."""
        found: dict[str, list[float]] = {name: [] for name in self._ways}
        for turn in range(-1, repeats):
            for name, (read, wait) in self._ways.items():
                began = time.perf_counter()
                for _ in range(self._calls):
                    result = read()
                wait(result)
                # The first turn compiles.
                if turn >= 0:
                    found[name].append(self._calls * self._bytes / (time.perf_counter() - began))
        return found


def _square(part: np.ndarray) -> float:
    return float(np.dot(part, part))
