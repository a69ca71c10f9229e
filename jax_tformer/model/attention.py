"""Scaled dot-product attention with its projections (paper, section 3.2), the same as in torch_ref/attention.py."""

import math
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.config import AttentionImplementation, Remat, StackConfig, TransformerConfig
from jax_tformer.errors import require
from jax_tformer.model.embedding import Rotation, rotate
from jax_tformer.model.kernels import attend_in_rows, choose_implementation, flat, is_kernel, kernel
from jax_tformer.model.layers import (
    PROJECTION,
    Dropout,
    Linear,
    Norm,
    accumulator,
    dropout,
    dtype_of,
    site_key,
)
from jax_tformer.model.masks import Mask, position_ids

Given = ParamSpec("Given")
Made = TypeVar("Made")
ATTENTION_OUTPUT = "attention output"
"""The name of the result of `attend`, by which `rematerialized` makes the backward pass keep it."""


def attend(
    query: Float[Array, "B T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Mask,
    *,
    scale: float,
    dropout_rate: float = 0.0,
    keep: Bool[Array, "B H T S"] | None = None,
    implementation: AttentionImplementation = "auto",
) -> Float[Array, "B T H C"]:
    """Computes softmax(scale * Q K^T) V (paper, section 3.2.1); H/K query heads share a key/value head.

    The softmax runs in at least float32. A query that may attend to nothing gets zeros, with zero gradients. `keep` is
    the dropout mask of the weights. For "auto", `choose_implementation` chooses. Raises InputError if the given
    implementation cannot compute this.
    """
    if implementation == "auto":
        platform, drops = jax.default_backend(), keep is not None
        implementation = choose_implementation(platform, query.dtype, query.shape, key.shape, mask, drops=drops)
    if implementation == "einsum":
        weights = dropout(attention_weights(query, key, mask, scale=scale), dropout_rate, keep).astype(value.dtype)
        grouped = weights.reshape(len(query), value.shape[2], -1, query.shape[1], value.shape[1])
        output = jnp.einsum("bkgts,bskc->btkgc", grouped, value).reshape(query.shape)
    elif implementation == "blocks":
        heads = key.shape[2]
        output = attend_in_rows(
            query, flat(key), flat(value), mask, scale=scale, dropout_rate=dropout_rate, keep=keep, heads=heads
        )
    else:
        output = kernel(implementation, query, key, value, mask, scale=scale, drops=keep is not None)
    # Named for `rematerialized`, which keeps it, so that the backward pass need not multiply weights by values again.
    # (The policy keeps all results of cuDNN's kernel: see is_kernel.)
    return output if implementation == "cudnn" else checkpoint_name(output, ATTENTION_OUTPUT)


def attention_weights(
    query: Float[Array, "B T H C"], key: Float[Array, "B S K C"], mask: Mask, *, scale: float
) -> Float[Array, "B H T S"]:
    """Computes softmax(scale * Q K^T), before dropout."""
    batch, length, heads, width = query.shape
    grouped = query.reshape(batch, length, key.shape[2], heads // key.shape[2], width)
    high = accumulator(query.dtype)
    scores = jnp.einsum("btkgc,bskc->bkgts", grouped, key, preferred_element_type=high) * scale
    return mask.softmax(scores.reshape(batch, heads, length, -1), length, key.shape[1])


class KeyValue(NamedTuple):
    """Cached keys and values, `[R, S, C]` with R = B * K: a row for each head of each sequence.

    With two leading axes, that of a single sequence would have size one, and XLA on CPU would copy the whole cache
    several times per token.
    """

    key: Float[Array, "R S C"]
    value: Float[Array, "R S C"]

    def write(
        self, key: Float[Array, "B T K C"], value: Float[Array, "B T K C"], place: Int[Array, ""] | int
    ) -> "KeyValue":
        """Returns the cache with these keys and values in the slots from `place` on."""
        update = jax.lax.dynamic_update_slice_in_dim
        return KeyValue(update(self.key, flat(key), place, axis=1), update(self.value, flat(value), place, axis=1))

    def keys(self, heads: int) -> Float[Array, "B S K C"]:
        """Returns the keys in the layout of `attend`, for this many key/value heads."""
        _, slots, width = self.key.shape
        return self.key.reshape(-1, heads, slots, width).transpose(0, 2, 1, 3)


class Attention(nnx.Module):
    """softmax(scale * Q K^T) V over heads; queries come from x, keys and values from memory."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, residual_branches: int) -> None:
        width = config.head_width(stack)
        model, heads = (config.d_model,), (stack.num_heads, width)
        self.key_value_heads = stack.key_value_heads or stack.num_heads
        shared = (self.key_value_heads, width)
        self.query = Linear(model, heads, config, bias=stack.query_bias, target="query")
        self.key = Linear(model, shared, config, bias=stack.key_bias, target="key")
        self.value = Linear(model, shared, config, bias=stack.value_bias, target="value")
        self.output = Linear(
            heads, model, config, bias=stack.output_bias, residual_branches=residual_branches, target="output"
        )
        self.query_norm = Norm(config, stack, width=width) if stack.query_key_norm else None
        self.key_norm = Norm(config, stack, width=width) if stack.query_key_norm else None
        self.scale = 1 / math.sqrt(config.scale_width(stack))
        self.dropout = Dropout(config.dropout.attention)
        self.implementation = config.compute.attention

    def __call__(
        self,
        x: Float[Array, "N T D"],
        memory: Float[Array, "N S D"] | None,
        mask: Mask,
        rotation: Rotation | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
        cache: KeyValue | None = None,
        capture: bool = False,
    ) -> tuple[Float[Array, "N T D"], Float[Array, "N H T S"] | None, KeyValue | None]:
        """Returns the output, the weights before dropout (with `capture`), and the cache with the memory in it.

        With a cache, writes memory's keys and values to it from slot `mask.first` on (None: writes nothing), and x
        attends to all that it then holds. If the cache has fewer sequences than x, neighbours in x share one.
        """
        query = self._placed(self.query(x, dropout_key), self.query_norm, rotation)
        if memory is not None:
            key = self._placed(self.key(memory, dropout_key), self.key_norm, rotation)
            value = self.value(memory, dropout_key)
            cache = None if cache is None else cache.write(key, value, mask.first)
        slots = key.shape[1] if cache is None else cache.key.shape[1]
        shape = (len(x), query.shape[2], x.shape[1], slots)
        keep = self.dropout.keep(site_key(dropout_key, "dropout"), shape)
        if cache is None:
            output = attend(
                query,
                key,
                value,
                mask,
                scale=self.scale,
                dropout_rate=self.dropout.rate,
                keep=keep,
                implementation=self.implementation,
            )
        else:
            key = cache.keys(self.key_value_heads)
            output = attend_in_rows(
                query, *cache, mask, scale=self.scale, dropout_rate=self.dropout.rate, keep=keep, heads=key.shape[2]
            )
        # Computed separately, because the fast implementations never hold all weights at once.
        weights = attention_weights(query, key, mask, scale=self.scale) if capture else None
        return self.output(output, dropout_key), weights, cache

    def _placed(self, heads: Array, norm: Norm | None, rotation: Rotation | None) -> Array:
        """Normalises queries or keys, where the stack does, and then turns them by their positions."""
        heads = heads if norm is None else norm(heads)
        return heads if rotation is None else rotate(heads, rotation)


class Captured(NamedTuple):
    """What `capture=True` returns from one layer, or from all layers, stacked along L."""

    hidden: Float[Array, "*L B T D"]
    """The residual stream after the layer."""
    self_attention: Float[Array, "*L B H T S"]
    """Weights of self-attention, before dropout."""
    cross_attention: Float[Array, "*L B H T S"] | None
    """Weights of attention to the encoder's output, before dropout."""


class LayerCache(NamedTuple):
    """The keys and values that one decoder layer keeps between tokens."""

    self_attention: KeyValue
    cross_attention: KeyValue | None
    """Keys and values of the encoder's output. Sequences with the same source may share rows."""


class Cache(NamedTuple):
    """What a decoder keeps between tokens: an argument of the forward pass, and part of its result."""

    layers: tuple[LayerCache, ...]
    is_token: Bool[Array, "B S"]
    """Which slots hold a token; the others are padding, or still empty."""
    filled: Int[Array, ""] | int
    """The number of used slots, padding included; the next token goes there."""
    source_is_token: Bool[Array, "b S"] | None = None
    """Which positions of the encoder's output are tokens; None: all."""

    def place(self, new: Bool[Array, "B T"]) -> tuple["Cache", Int[Array, "B T"]]:
        """Takes the next T slots (`new`: True at tokens); returns the cache and their positions, counting only tokens.

        Raises InputError if fewer than T slots are free. Compiled code cannot check that and overwrites the last ones.
        """
        used, available, length = self.filled, self.is_token.shape[1], new.shape[1]
        if not isinstance(used, jax.core.Tracer):
            message = f"the cache has {available} slots and {used} are used; expected {length} free"
            require(int(used) + length <= available, message)
        positions = jnp.maximum(self.is_token.sum(1, keepdims=True) + jnp.cumsum(new, axis=1) - 1, 0)
        is_token = jax.lax.dynamic_update_slice_in_dim(self.is_token, new, used, axis=1)
        return self._replace(is_token=is_token, filled=used + length), positions


def empty_cache(
    config: TransformerConfig, stack: StackConfig, batch: int, slots: int, source_slots: int | None = None
) -> Cache:
    """Makes a cache for `slots` tokens of `batch` sequences, and for an encoder's output of `source_slots`."""
    rows = batch * (stack.key_value_heads or stack.num_heads)
    width, dtype = config.head_width(stack), dtype_of(config.compute.dtype)

    def room(slots: int) -> KeyValue:
        return KeyValue(jnp.zeros((rows, slots, width), dtype), jnp.zeros((rows, slots, width), dtype))

    layer = LayerCache(room(slots), None if source_slots is None else room(source_slots))
    return Cache((layer,) * stack.num_layers, jnp.zeros((batch, slots), bool), 0)


def within(
    stack: StackConfig,
    ids: Int[Array, "B T"],
    mask: Bool[Array, "B T"] | None,
    segments: Int[Array, "B T"] | None = None,
    prefix: Bool[Array, "B T"] | None = None,
    cache: Cache | None = None,
    *,
    causal: bool,
) -> tuple[Int[Array, "#B T"], Mask, Cache | None]:
    """Returns the positions of a sequence's tokens, the mask of their self-attention, and the cache with their slots.

    With a cache, the tokens come after those that it holds, and see those too.
    """
    first: Int[Array, ""] | int = 0
    length, is_token, prefixes = ids.shape[1], mask, None if prefix is None else (prefix, prefix)
    if cache is None:
        positions = position_ids(length, mask, segments)
    else:
        require(segments is None, "there are segments and a cache, which holds one text a row; expected one of them")
        first = cache.filled
        cache, positions = cache.place(jnp.ones(ids.shape, bool) if mask is None else mask)
        is_token = cache.is_token
        if prefix is not None:
            prefixes = prefix, jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(is_token), prefix, first, axis=1)
    numbers = None if segments is None else (segments, segments)
    return positions, Mask(causal, stack.window, is_token, numbers, prefixes, first, cap=stack.score_cap), cache


def rematerialized(layer: Callable[Given, Made], remat: Remat) -> Callable[Given, Made]:
    """Returns `layer` with a backward pass that recomputes what `remat` does not keep (see ComputeConfig.remat).

    "auto" means "dots" here, the fastest on CPU and far smaller than keeping all; train.py chooses by memory. Keeps
    projections with their bias: in bfloat16 the compiler may leave out the rounding between the two in the forward
    pass, and a ReLU would then be recomputed on the other side of its kink.
    """
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    products = policies.save_from_both_policies(policies.save_only_these_names(PROJECTION, ATTENTION_OUTPUT), is_kernel)
    # prevent_cse would keep the compiler from merging both computations, which the loop of the scan already does.
    policy = None if remat == "full" else products
    again: Callable[Given, Made] = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    return again
