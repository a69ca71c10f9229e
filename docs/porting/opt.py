"""OPT in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

HEADS, PADDING = 4, 1


def opt(params: Any, tokens: jax.Array) -> jax.Array:
    """`[B, T, V]`, from `[B, T]`."""
    table = params["tokens"]
    # The module's padding_idx: the row of padding is read, and learns nothing from that.
    read = table.at[PADDING].set(jax.lax.stop_gradient(table[PADDING]))
    x = read[tokens] + params["positions"][2 : 2 + tokens.shape[1]]
    for layer in params["layers"].values():
        x = x + attention(layer["attention"], layer_norm(layer["norm1"], x))
        x = x + feed_forward(layer, layer_norm(layer["norm2"], x))
    return layer_norm(params["norm"], x) @ table.T


def attention(p: Any, x: jax.Array) -> jax.Array:
    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)

    query, key, value = (heads(linear(p[name], x)) for name in ("query", "key", "value"))
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    mixed = (weights @ value).swapaxes(1, 2).reshape(x.shape)
    return linear(p["output"], mixed)


def feed_forward(p: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(linear(p["up"], x))
    return linear(p["down"], hidden)


def linear(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["kernel"] + p["bias"]


def layer_norm(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred / jnp.sqrt(variance + 1e-5) * p["scale"] + p["bias"]


def linear_rows(ours: str, theirs: str) -> dict[str, Any]:
    """PyTorch keeps a matrix as (outputs, inputs), we as (inputs, outputs)."""
    return {f"{ours}.kernel": (f"{theirs}.weight", "o i -> i o"), f"{ours}.bias": f"{theirs}.bias"}


def norm_rows(ours: str, theirs: str) -> dict[str, Any]:
    return {f"{ours}.scale": f"{theirs}.weight", f"{ours}.bias": f"{theirs}.bias"}


DECODER = "model.model.decoder"
WEIGHTS: dict[str, Any] = {
    "tokens": f"{DECODER}.embed_tokens.weight",
    "positions": f"{DECODER}.embed_positions.weight",
    **norm_rows("norm", f"{DECODER}.final_layer_norm"),
}
for number in (0, 1):
    ours, theirs = f"layers.{number}", f"{DECODER}.layers.{number}"
    WEIGHTS |= linear_rows(f"{ours}.attention.query", f"{theirs}.self_attn.q_proj")
    WEIGHTS |= linear_rows(f"{ours}.attention.key", f"{theirs}.self_attn.k_proj")
    WEIGHTS |= linear_rows(f"{ours}.attention.value", f"{theirs}.self_attn.v_proj")
    WEIGHTS |= linear_rows(f"{ours}.attention.output", f"{theirs}.self_attn.out_proj")
    WEIGHTS |= linear_rows(f"{ours}.up", f"{theirs}.fc1") | linear_rows(f"{ours}.down", f"{theirs}.fc2")
    WEIGHTS |= norm_rows(f"{ours}.norm1", f"{theirs}.self_attn_layer_norm")
    WEIGHTS |= norm_rows(f"{ours}.norm2", f"{theirs}.final_layer_norm")
# A key's bias adds one number to all scores of a query, which the softmax takes out again.
KEY_BIASES = [f"{DECODER}.layers.{number}.self_attn.k_proj.bias" for number in (0, 1)]
