"""Attention masks: boolean `[B, 1, T, S]`, True = may attend; None = all may. And the softmax that heeds them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_tformer.errors import InputError


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Position t may attend to positions 0 .. t (paper, section 3.2.3)."""
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def padding_mask(tokens: Bool[Array, "B S"] | None) -> Bool[Array, "B 1 1 S"] | None:
    """Every position may attend to the keys that are tokens (True) and not to padding."""
    return None if tokens is None else tokens[:, None, None, :]


def require_mask(name: str, mask: Any, shape: tuple[int, ...]) -> None:
    """Raises InputError unless the mask, if there is one, has the shape of the tokens that it marks."""
    if mask is not None and jnp.shape(mask) != shape:
        given = list(jnp.shape(mask))
        raise InputError(
            f"{name} has the shape {given}; expected {list(shape)}, that of its tokens: "
            "True at tokens, False at padding"
        )


def both(first: Bool[Array, "#B 1 #T #S"] | None, second: Bool[Array, "#B 1 #T #S"] | None) -> Array | None:
    """What both masks allow."""
    if first is None or second is None:
        return second if first is None else first
    return jnp.logical_and(first, second)


@jax.custom_jvp
def masked_softmax(scores: Float[Array, "B H T S"], mask: Bool[Array, "#B 1 #T S"] | None) -> Float[Array, "B H T S"]:
    """Attention weights; 0 where the mask is False, and 0 all along a row that may attend to nothing.

    The derivative is that of the whole function, arranged so that its transpose is w * (g - sum(w * g)). What JAX makes
    of `jax.nn.softmax` divides g by the sum of the exponentials first, and subtracts what that rounded: where the
    numbers g are nearly equal, queries and keys were seen to lose three times as much as PyTorch's.
    """
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.where(mask, weights, jnp.zeros((), scores.dtype))


@masked_softmax.defjvp
def _masked_softmax_jvp(primals: tuple[Array, Array | None], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    weights, (slope, _) = masked_softmax(*primals), tangents
    moved = weights * slope
    return weights, moved - weights * moved.sum(-1, keepdims=True)
