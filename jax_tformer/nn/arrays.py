"""The types that arrays have: dtypes by name, and which one accumulates."""

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
"""A plain nested dict of arrays; layers of a stack share one array with a leading L axis."""


def dtype_of(name: str) -> jnp.dtype:
    """The dtype called `name`; raises ValueError where float64 is asked for and JAX would silently give float32."""
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError('float64 needs jax.config.update("jax_enable_x64", True) before anything is traced')
    return jnp.dtype(name)


def accumulator(dtype: Any) -> jnp.dtype:
    """The type in which norms, softmax and losses of `dtype` are computed: never below float32."""
    return jnp.promote_types(dtype, jnp.float32)
