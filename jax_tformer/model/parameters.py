"""How a parameter is declared and drawn, and the types in which it and the activations are computed."""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from jax_tformer.config import TransformerConfig


def dtype_of(name: str) -> jnp.dtype:
    """Returns the dtype called `name`; raises ValueError for float64 if JAX would silently use float32."""
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError('float64 needs jax.config.update("jax_enable_x64", True) before anything is traced')
    return jnp.dtype(name)


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Returns the type in which norms, softmax and losses of `dtype` are computed, at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


@dataclass(frozen=True)
class Start:
    """The distribution of a fresh parameter: `constant` everywhere, N(0, size^2), or U(-size, size)."""

    kind: Literal["constant", "normal", "uniform"]
    size: float


ZEROS, ONES = Start("constant", 0.0), Start("constant", 1.0)


def parameter(shape: tuple[int, ...], config: TransformerConfig, start: Start) -> nnx.Param[Array]:
    """Declares a parameter that starts as `start`; it is zero until `draw` fills it."""
    return nnx.Param(jnp.zeros(shape, dtype_of(config.compute.parameter_dtype)), start=start)


def projection_start(config: TransformerConfig, fan_in: int, fan_out: int, scale: float = 1.0) -> Start:
    """Returns the start of a projection: normal with the config's deviation, or uniform by Glorot & Bengio (2010)."""
    if config.initializer == "normal":
        return Start("normal", scale * config.initializer_std)
    return Start("uniform", scale * (6 / (fan_in + fan_out)) ** 0.5)


class Declared(NamedTuple):
    """The declaration of a parameter."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    start: Start


def draw(key: Key[Array, ""], declared: Mapping[str, Declared]) -> dict[str, Array]:
    """Draws parameters by path. Each one depends only on the key and on its path, shape and start.

    Drawing outside the modules lets parameters of one size share a compiled generator, which is most of the cost of
    an init.
    """
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
        numbers = jax.vmap(partial(_draw_standard, kind=kind, size=size, dtype=dtype))(keys)
        for row, path in enumerate(paths):
            shape, dtype, start = declared[path]
            drawn[path] = (numbers[row] * jnp.asarray(start.size, dtype)).reshape(shape)
    return drawn


def _draw_standard(key: Key[Array, ""], *, kind: str, size: int, dtype: jnp.dtype) -> Array:
    if kind == "normal":
        return jax.random.normal(key, (size,), dtype)
    return jax.random.uniform(key, (size,), dtype, -1, 1)
