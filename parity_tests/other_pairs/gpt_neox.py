"""Hugging Face's GPT-NeoX, a decoder with a parallel residual, in plain JAX: a scan over stacked layers."""

import jax
import jax.numpy as jnp
from torch import nn
from transformers.models.gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox import modeling_gpt_neox as source

from parity import Weight
from parity.islands import Float64
from parity_tests.other_pairs.pair import OtherPair, ids, prepared

VOCABULARY, WIDTH, HEADS, INNER, LAYERS = 47, 32, 4, 72, 3
ROTATED = 4
"""Of the 8 numbers of a head, half are rotated."""


class Decoder(nn.Module):
    """Hugging Face's model, with a tied head; of what it returns, the logits."""

    def __init__(self):
        super().__init__()
        config = GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
        with Float64():
            self.model = source.GPTNeoXForCausalLM(config)

    def forward(self, tokens):
        # It rotates and takes its softmax in float32, whatever the type of the model.
        with Float64():
            return self.model(tokens, use_cache=False).logits


def decoder(params, tokens):
    """`[B, T, V]`, from `[B, T]`."""
    x = params["embedding"][tokens]
    cos, sin = angles(tokens.shape[1])
    visible = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))

    def layer(x, p):
        attended = attention(p["attention"], layer_norm(p["norm1"], x), cos, sin, visible)
        fed = feed_forward(p, layer_norm(p["norm2"], x))
        return x + attended + fed, None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = layer_norm(params["norm"], x)
    return x @ params["embedding"].T


def attention(p, x, cos, sin, visible):
    query = jnp.einsum("btd,dhc->bhtc", x, p["query"]["kernel"]) + p["query"]["bias"][:, None]
    key = jnp.einsum("btd,dhc->bhtc", x, p["key"]["kernel"]) + p["key"]["bias"][:, None]
    value = jnp.einsum("btd,dhc->bhtc", x, p["value"]["kernel"]) + p["value"]["bias"][:, None]
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = (weights @ value).swapaxes(1, 2).reshape(x.shape)
    return mixed @ p["output"]["kernel"] + p["output"]["bias"]


def angles(length):
    """Cosine and sine, `[T, C/2]`, of what a position turns each pair by."""
    frequencies = 10000.0 ** (-jnp.arange(0, ROTATED, 2) / ROTATED)
    turned = jnp.arange(length)[:, None] * jnp.tile(frequencies, 2)
    return jnp.cos(turned), jnp.sin(turned)


def rotate(x, cos, sin):
    """Turns the first numbers of each head, in halves, and leaves the rest."""
    turned, rest = x[..., :ROTATED], x[..., ROTATED:]
    first, second = jnp.split(turned, 2, axis=-1)
    turned = turned * cos + jnp.concatenate([-second, first], axis=-1) * sin
    return jnp.concatenate([turned, rest], axis=-1)


def feed_forward(p, x):
    hidden = jax.nn.gelu(x @ p["up"]["kernel"] + p["up"]["bias"], approximate=False)
    return hidden @ p["down"]["kernel"] + p["down"]["bias"]


def layer_norm(p, x):
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


LAYER = "model.gpt_neox.layers.{layer}"
WEIGHTS = {
    "embedding": "model.gpt_neox.embed_in.weight",
    "norm.scale": "model.gpt_neox.final_layer_norm.weight",
    "norm.bias": "model.gpt_neox.final_layer_norm.bias",
}
for number, name in enumerate(("query", "key", "value")):
    # Each head has its query, key and value beside one another.
    sizes, part = {"part": 3, "h": HEADS}, {"part": number}
    fused = f"{LAYER}.attention.query_key_value"
    WEIGHTS[f"layers.attention.{name}.kernel"] = Weight(f"{fused}.weight", "(h part c) d -> part d h c", sizes, part)
    WEIGHTS[f"layers.attention.{name}.bias"] = Weight(f"{fused}.bias", "(h part c) -> part h c", sizes, part)
for ours, theirs in {
    "attention.output": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}.items():
    WEIGHTS[f"layers.{ours}.kernel"] = Weight(f"{LAYER}.{theirs}.weight", "o i -> i o")
    WEIGHTS[f"layers.{ours}.bias"] = Weight(f"{LAYER}.{theirs}.bias")
for ours, theirs in {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}.items():
    WEIGHTS[f"layers.{ours}.scale"] = Weight(f"{LAYER}.{theirs}.weight")
    WEIGHTS[f"layers.{ours}.bias"] = Weight(f"{LAYER}.{theirs}.bias")


def pair():
    """Two rows of 10 tokens."""
    return OtherPair(decoder, prepared(Decoder()), WEIGHTS, (ids(VOCABULARY, 2, 10),))
