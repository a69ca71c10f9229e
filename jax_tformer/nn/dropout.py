"""Dropout (paper, section 5.4) in two steps, so that a caller can see what was dropped: draw a mask, apply it."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key


def draw_mask(key: Key[Array, ""] | None, rate: float, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
    """True, with probability 1 - rate, for each element that is kept; None where there is no key or nothing to drop."""
    if key is None or rate == 0:
        return None
    # Drawn flat, then reshaped: XLA on CPU takes six times as long to compile a generator of four axes.
    return jax.random.bernoulli(key, 1 - rate, (math.prod(shape),)).reshape(shape)


def dropout(x: Array, rate: float, keep: Bool[Array, "..."] | None) -> Array:
    """x with what `keep` does not keep zeroed and the rest divided by 1 - rate; None keeps x as it is."""
    return x if keep is None else jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def split_key(key: Key[Array, ""] | None, count: int) -> list[Key[Array, ""] | None]:
    """`count` independent keys, or as many None where there is no key."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def layer_keys(key: Key[Array, ""] | None, layers: int) -> Key[Array, " L"] | None:
    """An independent key for each of so many layers, along one axis; None where there is no key."""
    return None if key is None else jax.random.split(key, layers)
