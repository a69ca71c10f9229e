"""How fast this machine multiplies matrices: several shapes, by JAX and by PyTorch, of which the fastest counts."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

_WARM_SECONDS = 0.15
"""For so long a product is called before it counts."""
Shape = tuple[int, int, int]
"""m, k, n of a product [m, k] x [k, n]."""


class Products:
    """The same products in both libraries, with all cores or with the accelerator."""

    def __init__(self, device: str, shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> None:
        """`dtypes` are names that both libraries know: "float32", "bfloat16"."""
        self._calls = 3 if device == "cpu" else 20
        self._ways: dict[str, tuple[int, Callable[[], Any], Callable[[Any], Any]]] = {}
        after: dict[str, tuple[int, Callable[[], Any], Callable[[Any], Any]]] = {}
        kind = "cuda" if device == "gpu" else device

        def wait(result: Any) -> None:
            if kind == "cuda":
                torch.cuda.synchronize()

        product = jax.jit(jnp.matmul)
        with jax.default_device(jax.local_devices(backend=device)[0]):
            for m, k, n in shapes:
                for dtype in dtypes:
                    drawn = [np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((m, k), (k, n))]
                    ours = [jnp.array(x, dtype) for x in drawn]
                    theirs = [torch.tensor(x, dtype=getattr(torch, dtype), device=kind) for x in drawn]
                    shape, work = f"{m} x {k} x {n}", 2 * m * k * n
                    self._ways[way("jax", dtype, shape)] = (work, _call(product, ours), jax.block_until_ready)
                    after[way("torch", dtype, shape)] = (work, _call(torch.matmul, theirs), wait)
        # One library after the other: threads of the one that wait for work disturb the other.
        self._ways |= after

    def measure(self, repeats: int) -> dict[str, list[float]]:
        """Operations a second of every way, by turns, each warm: it has been called for a while before."""
        found: dict[str, list[float]] = {name: [] for name in self._ways}
        for _ in range(repeats):
            for name, (work, multiply, wait) in self._ways.items():
                warm = time.perf_counter() + _WARM_SECONDS
                while time.perf_counter() < warm:
                    wait(multiply())
                began = time.perf_counter()
                for _ in range(self._calls):
                    result = multiply()
                wait(result)
                found[name].append(self._calls * work / (time.perf_counter() - began))
        return found


def way(library: str, dtype: str, shape: str) -> str:
    """The name of one product."""
    return f"{library} {dtype} {shape}"


def of_type(found: dict[str, list[float]], dtype: str) -> dict[str, list[float]]:
    """Those of the ways that compute in `dtype`."""
    return {name: rates for name, rates in found.items() if name.split()[1] == dtype}


def _call(function: Callable[..., Any], factors: list[Any]) -> Callable[[], Any]:
    return lambda: function(*factors)
