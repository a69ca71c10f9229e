"""How parameters are declared and how they start.

A module declares each parameter with its shape and its Start; `draw` makes all of them from one key. Drawing outside
of the modules lets parameters of one size share one compiled generator, which is most of what an init costs.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from jax_tformer.config import TransformerConfig
from jax_tformer.nn.arrays import dtype_of


@dataclass(frozen=True)
class Start:
    """The distribution of a fresh parameter: `constant` everywhere, N(0, size^2), or U(-size, size)."""

    kind: Literal["constant", "normal", "uniform"]
    size: float


ZEROS, ONES = Start("constant", 0.0), Start("constant", 1.0)


class Declared(NamedTuple):
    """A parameter without its numbers."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    start: Start


def parameter(shape: tuple[int, ...], config: TransformerConfig, start: Start) -> nnx.Param:
    """A parameter of this shape that will begin as `start` says; until `draw` fills it, it holds zeros."""
    return nnx.Param(jnp.zeros(shape, dtype_of(config.compute.parameter_dtype)), start=start)


def projection_start(config: TransformerConfig, fan_in: int, fan_out: int, scale: float = 1.0) -> Start:
    """How a projection starts: normal with the config's deviation, or Glorot & Bengio's (2010) uniform."""
    if config.initializer == "normal":
        return Start("normal", scale * config.initializer_std)
    return Start("uniform", scale * (6 / (fan_in + fan_out)) ** 0.5)


def draw(key: Key[Array, ""], declared: Mapping[str, Declared]) -> dict[str, Array]:
    """Fresh parameters by path. A parameter's numbers depend on the key, its path, shape and start, on nothing else."""
    drawn = {}
    groups: dict[tuple[int, jnp.dtype, str], list[str]] = {}
    for path, (shape, dtype, start) in declared.items():
        if start.kind == "constant":
            drawn[path] = jnp.full(shape, start.size, dtype)
        else:
            groups.setdefault((math.prod(shape), dtype, start.kind), []).append(path)
    for (size, dtype, kind), paths in groups.items():
        seeds = jnp.array([zlib.crc32(path.encode()) for path in paths], jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, seeds)
        # Flat, then reshaped: XLA on CPU takes six times as long to compile a generator of four axes.
        numbers = jax.vmap(partial(_standard, kind=kind, size=size, dtype=dtype))(keys)
        for row, path in enumerate(paths):
            shape, dtype, start = declared[path]
            drawn[path] = (numbers[row] * jnp.asarray(start.size, dtype)).reshape(shape)
    return drawn


def _standard(key: Key[Array, ""], *, kind: str, size: int, dtype: jnp.dtype) -> Array:
    if kind == "normal":
        return jax.random.normal(key, (size,), dtype)
    return jax.random.uniform(key, (size,), dtype, -1, 1)
