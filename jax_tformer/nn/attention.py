"""Scaled dot-product attention, and the projections around it (paper, section 3.2)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jax_tformer.config import AttentionImplementation, StackConfig, TransformerConfig
from jax_tformer.nn.arrays import accumulator
from jax_tformer.nn.attention_blocks import attend_in_blocks
from jax_tformer.nn.cache import KeyValue, NewTokens
from jax_tformer.nn.dropout import dropout
from jax_tformer.nn.fused_attention import FUSED, choose_implementation, require_no_dropout
from jax_tformer.nn.linear import Linear
from jax_tformer.nn.masks import both, causal_mask, masked_softmax
from jax_tformer.nn.positions import Rotation, rotate

ATTENTION_OUTPUT = "attention output"
"""What `stacks.rematerialized` knows the result of `attend` by."""


def attend(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Bool[Array, "B 1 1 S"] | None,
    *,
    causal: bool,
    scale: float,
    dropout_rate: float = 0.0,
    keep: Bool[Array, "B H T S"] | None = None,
    implementation: AttentionImplementation = "auto",
) -> Float[Array, "B T H C"]:
    """softmax(scale * Q K^T) V (paper, section 3.2.1); H/K query heads share a key/value head.

    `mask` is True at the keys that are tokens; where `causal`, position t sees 0 .. t of them. The softmax runs in at
    least float32. A row that may attend to nothing gets a zero output, with zero gradients. `keep` is the dropout mask
    of the weights. "auto" takes what `choose_implementation` names. Raises InputError where the implementation asked
    for cannot compute this.
    """
    if implementation == "auto":
        platform = jax.default_backend()
        implementation = choose_implementation(platform, query.dtype, query.shape, key.shape, drops=keep is not None)
    if implementation in FUSED:
        require_no_dropout(implementation, keep)
        output = FUSED[implementation](query, key, value, mask, causal=causal, scale=scale)
    else:
        compute = attend_in_blocks if implementation == "blocks" else attend_at_once
        output = compute(query, key, value, mask, causal=causal, scale=scale, dropout_rate=dropout_rate, keep=keep)
    # A name for the policy of rematerialisation: kept, so that the backward pass multiplies no weights with values.
    # (Of cuDNN's kernel the policy keeps all results: see is_kernel.)
    return output if implementation == "cudnn" else checkpoint_name(output, ATTENTION_OUTPUT)


def attend_at_once(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Bool[Array, "B 1 1 S"] | None,
    *,
    causal: bool,
    scale: float,
    dropout_rate: float,
    keep: Bool[Array, "B H T S"] | None,
) -> Float[Array, "B T H C"]:
    """`attend` as the paper writes it, all weights at once: the implementation "einsum"."""
    weights = attention_weights(query, key, mask, causal=causal, scale=scale)
    batch, _, length, _ = weights.shape
    dropped = dropout(weights, dropout_rate, keep).astype(value.dtype)
    dropped = dropped.reshape(batch, value.shape[2], -1, length, value.shape[1])
    return jnp.einsum("bkgts,bskc->btkgc", dropped, value).reshape(query.shape)


def attention_weights(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    mask: Bool[Array, "B 1 1 S"] | None,
    *,
    causal: bool,
    scale: float,
) -> Float[Array, "B H T S"]:
    """softmax(scale * Q K^T), before dropout."""
    batch, length, heads, width = query.shape
    grouped = query.reshape(batch, length, key.shape[2], heads // key.shape[2], width)
    high = accumulator(query.dtype)
    scores = jnp.einsum("btkgc,bskc->bkgts", grouped, key, preferred_element_type=high) * scale
    seen = both(causal_mask(length) if causal else None, mask)
    return masked_softmax(scores.reshape(batch, heads, length, -1), seen)


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
        self.implementation = config.compute.attention

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "B 1 1 S"] | None,
        *,
        causal: bool,
        rotation: Rotation | None = None,
        keep: Bool[Array, "B H T S"] | None = None,
        capture: bool = False,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B H T S"] | None]:
        """Position t of x asks, the positions of memory answer. Returns the output, and with `capture` the weights.

        `keep` is the dropout mask of the weights. Those that are returned are computed beside the output, which has
        them in the form that is fastest, or not at all.
        """
        query, key, value = self.query(x), self.key(memory), self.value(memory)
        if rotation is not None:
            query = rotate(query, rotation.cosine, rotation.sine)
            key = rotate(key, rotation.cosine, rotation.sine)
        output = attend(
            query,
            key,
            value,
            mask,
            causal=causal,
            scale=self.scale,
            dropout_rate=self.dropout_rate,
            keep=keep,
            implementation=self.implementation,
        )
        weights = attention_weights(query, key, mask, causal=causal, scale=self.scale) if capture else None
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
