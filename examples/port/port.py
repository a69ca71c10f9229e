"""The port: the same in JAX, and which of the module's weights each parameter is."""

from typing import Any

import jax
import jax.numpy as jnp

WEIGHTS = {
    "scale": "norm.weight",
    "shift": "norm.bias",
    "up.kernel": ("up.weight", "o i -> i o"),
    "up.bias": "up.bias",
    "down.kernel": ("down.weight", "o i -> i o"),
    "down.bias": "down.bias",
}


def block(params: Any, x: jax.Array) -> jax.Array:
    """A feed-forward block: `[B, D]` to `[B, D]`."""
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    hidden = (normal * params["scale"] + params["shift"]) @ params["up"]["kernel"] + params["up"]["bias"]
    return x + jax.nn.gelu(hidden, approximate=False) @ params["down"]["kernel"] + params["down"]["bias"]
