"""Dropout (paper, section 5.4), with the key as an argument: no key, no dropout."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key


def dropout(x: Array, rate: float, key: Key[Array, ""] | None) -> Array:
    """x with each element zeroed with probability `rate` and the others divided by 1 - rate."""
    if key is None or rate == 0:
        return x
    # Drawn flat, then reshaped: XLA on CPU takes six times as long to compile a generator of four axes.
    keep = jax.random.bernoulli(key, 1 - rate, (x.size,)).reshape(x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def split_key(key: Key[Array, ""] | None, count: int) -> list[Key[Array, ""] | None]:
    """`count` independent keys, or as many None where there is no key."""
    return [None] * count if key is None else list(jax.random.split(key, count))
