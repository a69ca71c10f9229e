"""Scaled dot-product attention, and the projections around it (paper, section 3.2)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.nn.arrays import accumulator
from jax_tformer.nn.cache import KeyValue, NewTokens
from jax_tformer.nn.dropout import dropout
from jax_tformer.nn.linear import Linear
from jax_tformer.nn.positions import Rotation, rotate


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
    weights = masked_softmax(scores.reshape(batch, heads, length, -1), mask)
    dropped = dropout(weights, dropout_rate, keep).astype(value.dtype)
    dropped = dropped.reshape(batch, key.shape[2], groups, length, -1)
    output = jnp.einsum("bkgts,bskc->btkgc", dropped, value)
    return output.reshape(query.shape), weights


def masked_softmax(scores: Float[Array, "B H T S"], mask: Bool[Array, "#B 1 #T S"] | None) -> Float[Array, "B H T S"]:
    """Attention weights; 0 where the mask is False, and 0 all along a row that may attend to nothing."""
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.where(mask, weights, jnp.zeros((), scores.dtype))


def attend_flat(
    query: Float[Array, "N T H C"],
    key: Float[Array, "R S C"],
    value: Float[Array, "R S C"],
    mask: Bool[Array, "#B 1 #T S"] | None,
    *,
    key_value_heads: int,
    scale: float,
) -> Float[Array, "N T H C"]:
    """`attend` where keys and values are as a cache keeps them, R = B * K; for N = B sequences, or a multiple.

    In the second case N/B neighbours attend to the same keys, all under one mask (its third axis is 1).
    """
    batch, heads, width = key.shape[0] // key_value_heads, query.shape[2], query.shape[3]
    apart = query.reshape(batch, -1, key_value_heads, heads // key_value_heads, width).transpose(0, 2, 3, 1, 4)
    scores = jnp.einsum(
        "rtc,rsc->rts", apart.reshape(len(key), -1, width), key, preferred_element_type=accumulator(query.dtype)
    )
    weights = masked_softmax((scores * scale).reshape(batch, heads, -1, key.shape[1]), mask)
    output = jnp.einsum("rts,rsc->rtc", weights.reshape(scores.shape).astype(value.dtype), value)
    return output.reshape(apart.shape).transpose(0, 3, 1, 2, 4).reshape(query.shape)


class Attention(nnx.Module):
    """Multi-head attention: queries from one sequence, keys and values from another (or the same)."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, residual_branches: int):
        width = config.head_width(stack)
        model, heads = (config.d_model,), (stack.num_heads, width)
        self.key_value_heads = stack.key_value_heads or stack.num_heads
        shared = (self.key_value_heads, width)
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

    def remember(self, memory: Float[Array, "B S D"], *, rotation: Rotation | None = None) -> KeyValue:
        """What a cache keeps of `memory`."""
        key, value = self.key(memory), self.value(memory)
        if rotation is not None:
            key = rotate(key, rotation.cosine, rotation.sine)
        return KeyValue(flat(key), flat(value))

    def extend(
        self, x: Float[Array, "B T D"], cached: KeyValue, new: NewTokens
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Self-attention of tokens that come after those in the cache: the output, and the cache with them in it."""
        query = self.query(x)
        if new.rotation is not None:
            query = rotate(query, new.rotation.cosine, new.rotation.sine)
        cached = cached.write(self.remember(x, rotation=new.rotation), new.slot)
        return self._output(query, cached, new.self_mask), cached

    def recall(
        self, x: Float[Array, "N T D"], cached: KeyValue, mask: Bool[Array, "B 1 1 S"] | None
    ) -> Float[Array, "N T D"]:
        """Cross-attention to what `remember` kept of a memory."""
        return self._output(self.query(x), cached, mask)

    def _output(self, query: Array, cached: KeyValue, mask: Array | None) -> Array:
        heads = self.key_value_heads
        return self.output(attend_flat(query, *cached, mask, key_value_heads=heads, scale=self.scale))


def flat(x: Float[Array, "B T K C"]) -> Float[Array, "R T C"]:
    """A row for each head of each sequence, R = B * K."""
    return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])
