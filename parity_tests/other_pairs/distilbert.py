"""Hugging Face's DistilBERT, an encoder, in Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn
from transformers.models.distilbert import DistilBertConfig
from transformers.models.distilbert import modeling_distilbert as source

from parity_tests.other_pairs.pair import OtherPair, ids, prepared

VOCABULARY, WIDTH, HEADS, INNER, LAYERS, POSITIONS = 43, 32, 4, 56, 2, 16


class Encoder(nn.Module):
    """Hugging Face's model; of what it returns, the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        config = DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=WIDTH,
            n_heads=HEADS,
            hidden_dim=INNER,
            n_layers=LAYERS,
            max_position_embeddings=POSITIONS,
            # As the padding_idx of the table it would take that token its gradient.
            pad_token_id=None,
            attn_implementation="eager",
        )
        self.model = source.DistilBertModel(config)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, attention_mask=mask).last_hidden_state


class Port(nnx.Module):
    """`[B, T]` -> `[B, T, D]`; `mask`, `[B, T]`, is 1 where there is a token."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        # Unless it is told, this layer rounds to the type in which it was made.
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.float64, rngs=rngs)
        self.positions = nnx.Embed(POSITIONS, WIDTH, dtype=jnp.float64, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, use_fast_variance=False, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = Attention(rngs)
        self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-12, use_fast_variance=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, INNER, rngs=rngs)
        self.down = nnx.Linear(INNER, WIDTH, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-12, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.norm1(x + self.attention(x, mask))
        hidden = nnx.gelu(self.up(x), approximate=False)
        return self.norm2(x + self.down(hidden))


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.value = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.output = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query = self.query(x).reshape(heads)
        key = self.key(x).reshape(heads)
        value = self.value(x).reshape(heads)
        scores = jnp.einsum("bthc,bshc->bhts", query, key) * heads[-1] ** -0.5
        scores = jnp.where(mask[:, None, None, :] != 0, scores, jnp.finfo(x.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhts,bshc->bthc", weights, value)
        return self.output(mixed.reshape(x.shape))


GRAPH, STATE = nnx.split(nnx.eval_shape(lambda: Port(nnx.Rngs(0))))


def encoder(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """`[B, T, D]`, from ids and mask, `[B, T]`; `params` are the state as nested dicts."""
    return nnx.merge(GRAPH, nnx.State(params))(tokens, mask)


LINEAR = {
    "attention.query": "attention.q_lin",
    "attention.key": "attention.k_lin",
    "attention.value": "attention.v_lin",
    "attention.output": "attention.out_lin",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
}
NORMS = {"norm1": "sa_layer_norm", "norm2": "output_layer_norm"}
WEIGHTS: dict[str, str | tuple[str, str]] = {
    "tokens.embedding": "model.embeddings.word_embeddings.weight",
    "positions.embedding": "model.embeddings.position_embeddings.weight",
    "norm.scale": "model.embeddings.LayerNorm.weight",
    "norm.bias": "model.embeddings.LayerNorm.bias",
}
for layer in range(LAYERS):
    there = f"model.transformer.layer.{layer}"
    for ours, theirs in LINEAR.items():
        WEIGHTS[f"blocks.{layer}.{ours}.kernel"] = (f"{there}.{theirs}.weight", "o i -> i o")
        WEIGHTS[f"blocks.{layer}.{ours}.bias"] = f"{there}.{theirs}.bias"
    for ours, theirs in NORMS.items():
        WEIGHTS[f"blocks.{layer}.{ours}.scale"] = f"{there}.{theirs}.weight"
        WEIGHTS[f"blocks.{layer}.{ours}.bias"] = f"{there}.{theirs}.bias"


def pair() -> OtherPair:
    """Three rows of 9 tokens; two of them end in padding."""
    mask = (np.arange(9)[None] < np.array([9, 6, 4])[:, None]).astype(np.int64)
    keys = tuple(f"model.transformer.layer.{layer}.attention.k_lin.bias" for layer in range(LAYERS))
    return OtherPair(
        encoder,
        prepared(Encoder()),
        WEIGHTS,
        (ids(VOCABULARY, 3, 9), mask),
        like=nnx.to_pure_dict(STATE),
        zero_gradients=keys,
    )
