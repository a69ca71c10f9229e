"""Scaled dot-product attention, and the projections around it (paper, section 3.2)."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.nn.arrays import accumulator
from jax_tformer.nn.dropout import dropout
from jax_tformer.nn.linear import Linear
from jax_tformer.nn.positions import rotate


def attend(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Bool[Array, "#B 1 #T S"] | None,
    *,
    scale: float,
    dropout_rate: float = 0.0,
    keep: Bool[Array, "B H T S"] | None = None,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B H T S"]]:
    """softmax(scale * Q K^T) V, and the weights (before dropout); H/K query heads share a key/value head.

    The softmax runs in at least float32. A row that may attend to nothing gets zero weights and a zero output, with
    zero gradients.
    """
    batch, length, heads, width = query.shape
    groups = heads // key.shape[2]
    grouped = query.reshape(batch, length, key.shape[2], groups, width)
    high = accumulator(query.dtype)
    scores = jnp.einsum("btkgc,bskc->bkgts", grouped, key, preferred_element_type=high) * scale
    scores = scores.reshape(batch, heads, length, -1)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(high).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if mask is not None:
        weights = jnp.where(mask, weights, jnp.zeros((), high))
    dropped = dropout(weights, dropout_rate, keep).astype(value.dtype)
    dropped = dropped.reshape(batch, key.shape[2], groups, length, -1)
    output = jnp.einsum("bkgts,bskc->btkgc", dropped, value)
    return output.reshape(query.shape), weights


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the rotary angles `[#B, T, C/2]` of the positions in one forward pass."""

    cosine: Float[Array, "#B T c"]
    sine: Float[Array, "#B T c"]


class Attention(nnx.Module):
    """Multi-head attention: queries from one sequence, keys and values from another (or the same)."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, residual_branches: int):
        width = config.head_width(stack)
        model, heads = (config.d_model,), (stack.num_heads, width)
        shared = (stack.key_value_heads or stack.num_heads, width)
        self.query = Linear(model, heads, config, bias=stack.query_bias)
        self.key = Linear(model, shared, config, bias=stack.key_bias)
        self.value = Linear(model, shared, config, bias=stack.value_bias)
        self.output = Linear(heads, model, config, bias=stack.output_bias, residual_branches=residual_branches)
        self.scale = {"head_width": 1 / math.sqrt(width), "model_width": 1 / math.sqrt(config.d_model), "none": 1.0}[
            stack.attention_scale
        ]
        self.dropout_rate = config.dropout.attention

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "#B 1 #T S"] | None,
        *,
        rotation: Rotation | None = None,
        keep: Bool[Array, "B H T S"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B H T S"]]:
        """Position t of x asks, the positions of memory answer. Returns the output and the attention weights.

        `keep` is the dropout mask of the weights.
        """
        query, key, value = self.query(x), self.key(memory), self.value(memory)
        if rotation is not None:
            query = rotate(query, rotation.cosine, rotation.sine)
            key = rotate(key, rotation.cosine, rotation.sine)
        output, weights = attend(query, key, value, mask, scale=self.scale, dropout_rate=self.dropout_rate, keep=keep)
        return self.output(output), weights
