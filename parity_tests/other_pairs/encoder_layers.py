"""`torch.nn.TransformerEncoderLayer`, one that normalises first and one that normalises last, in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from parity import Weight
from parity_tests.other_pairs.pair import OtherPair, numbers, prepared

WIDTH, HEADS, INNER = 32, 4, 48


class Encoder(nn.Module):
    """Two layers of unlike placement; their query, key and value are one fused matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.TransformerEncoderLayer(
            WIDTH, HEADS, INNER, dropout=0.1, activation="gelu", norm_first=True, batch_first=True
        )
        self.last = nn.TransformerEncoderLayer(
            WIDTH, HEADS, INNER, dropout=0.1, activation="relu", norm_first=False, batch_first=True
        )

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = self.first(x, src_key_padding_mask=padding)
        return self.last(x, src_key_padding_mask=padding)


def encoder(params: Any, x: jax.Array, padding: jax.Array) -> jax.Array:
    """`[B, T, D]`, from `[B, T, D]`; `padding`, `[B, T]`, is True where there is nothing to attend to."""
    p = params["first"]
    x = x + attention(p["attention"], layer_norm(p["norm1"], x), padding)
    x = x + feed_forward(p, layer_norm(p["norm2"], x), exact_gelu)
    p = params["last"]
    x = layer_norm(p["norm1"], x + attention(p["attention"], x, padding))
    x = layer_norm(p["norm2"], x + feed_forward(p, x, jax.nn.relu))
    return x


def attention(p: Any, x: jax.Array, padding: jax.Array) -> jax.Array:
    query = jnp.einsum("btd,hcd->bhtc", x, p["query"]["kernel"]) + p["query"]["bias"][:, None]
    key = jnp.einsum("btd,hcd->bhtc", x, p["key"]["kernel"]) + p["key"]["bias"][:, None]
    value = jnp.einsum("btd,hcd->bhtc", x, p["value"]["kernel"]) + p["value"]["bias"][:, None]
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    scores = jnp.where(padding[:, None, None], -jnp.inf, scores)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = (weights @ value).swapaxes(1, 2).reshape(x.shape)
    return mixed @ p["output"]["kernel"] + p["output"]["bias"]


def feed_forward(p: Any, x: jax.Array, activation: Any) -> jax.Array:
    hidden = activation(x @ p["up"]["kernel"] + p["up"]["bias"])
    return hidden @ p["down"]["kernel"] + p["down"]["bias"]


def exact_gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def layer_norm(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred / jnp.sqrt(variance + 1e-5) * p["scale"] + p["bias"]


def fused(layer: str, number: int) -> dict[str, Weight]:
    """One of query, key and value, as kernel and bias."""
    sizes, part = {"part": 3, "h": HEADS}, {"part": number}
    return {
        "kernel": Weight(f"{layer}.self_attn.in_proj_weight", "(part h c) d -> part h c d", sizes, part),
        "bias": Weight(f"{layer}.self_attn.in_proj_bias", "(part h c) -> part h c", sizes, part),
    }


WEIGHTS = {
    f"{layer}.attention.{name}.{leaf}": row
    for layer in ("first", "last")
    for number, name in enumerate(("query", "key", "value"))
    for leaf, row in fused(layer, number).items()
} | {
    f"{layer}.{ours}.{leaf}": row
    for layer in ("first", "last")
    for ours, theirs in {"attention.output": "self_attn.out_proj", "up": "linear1", "down": "linear2"}.items()
    for leaf, row in {
        "kernel": (f"{layer}.{theirs}.weight", "o i -> i o"),
        "bias": f"{layer}.{theirs}.bias",
    }.items()
}
WEIGHTS |= {
    f"{layer}.{norm}.{ours}": f"{layer}.{norm}.{theirs}"
    for layer in ("first", "last")
    for norm in ("norm1", "norm2")
    for ours, theirs in {"scale": "weight", "bias": "bias"}.items()
}


def pair() -> OtherPair:
    """Rows of 9 positions; the second ends in padding, the third begins with it."""
    padding = np.zeros((3, 9), bool)
    padding[1, 6:] = padding[2, :2] = True
    return OtherPair(encoder, prepared(Encoder()), WEIGHTS, (numbers(3, 9, WIDTH), padding))
