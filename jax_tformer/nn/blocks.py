"""One layer: attention, cross-attention in a decoder that has an encoder, feed-forward, each in a residual branch."""

from collections.abc import Callable
from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.nn.attention import Attention
from jax_tformer.nn.cache import LayerCache, NewTokens
from jax_tformer.nn.dropout import draw_mask, dropout, split_key
from jax_tformer.nn.feedforward import FeedForward
from jax_tformer.nn.norms import Norm
from jax_tformer.nn.positions import Rotation


class Context(NamedTuple):
    """What all layers of a stack see alike in one forward pass."""

    causal: bool
    """Position t sees positions 0 .. t."""
    self_mask: Bool[Array, "B 1 1 T"] | None = None
    """True at tokens."""
    memory: Float[Array, "B S D"] | None = None
    cross_mask: Bool[Array, "B 1 1 S"] | None = None
    """True at the memory's tokens."""
    rotation: Rotation | None = None


class DropoutMasks(NamedTuple):
    """What one layer keeps, or stacked along L all of them; None where nothing is dropped."""

    self_attention: Bool[Array, "*L B H T T"] | None = None
    """Of the attention weights."""
    self_attention_residual: Bool[Array, "*L B T D"] | None = None
    """Of the sublayer's output."""
    cross_attention: Bool[Array, "*L B H T S"] | None = None
    cross_attention_residual: Bool[Array, "*L B T D"] | None = None
    feedforward: Bool[Array, "*L B T F"] | None = None
    """Of the activations inside."""
    feedforward_residual: Bool[Array, "*L B T D"] | None = None


class Captured(NamedTuple):
    """What `capture=True` brings back from one layer, or stacked along L from all of them."""

    hidden: Float[Array, "*L B T D"]
    """The residual stream after the layer."""
    self_attention: Float[Array, "*L B H T T"] | None
    """Attention weights, before dropout."""
    cross_attention: Float[Array, "*L B H T S"] | None
    """Attention weights over the encoder's output."""
    dropout: DropoutMasks


class Block(nnx.Module):
    """x + attention(norm(x)), x + feedforward(norm(x)) (pre), or norm(x + attention(x)) ... (post; the paper)."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, cross: bool):
        branches = stack.num_layers * (3 if cross else 2)
        self.self_attention = Attention(config, stack, residual_branches=branches)
        self.self_attention_norm = Norm(config, stack)
        self.cross_attention = Attention(config, stack, residual_branches=branches) if cross else None
        self.cross_attention_norm = Norm(config, stack) if cross else None
        self.feedforward = FeedForward(config, stack, residual_branches=branches)
        self.feedforward_norm = Norm(config, stack)
        self.pre = stack.norm_placement == "pre"
        self.config, self.stack = config, stack

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        *,
        dropout_key: Key[Array, ""] | None = None,
        capture: bool = False,
    ) -> tuple[Float[Array, "B T D"], Captured]:
        """The layer applied to x, and what it computed on the way; attention weights only with `capture`."""
        masks = self._draw_masks(dropout_key, x, context.memory)
        self_weights = cross_weights = None

        def self_attention(x: Array) -> Array:
            nonlocal self_weights
            output, self_weights = self.self_attention(
                x,
                x,
                context.self_mask,
                causal=context.causal,
                rotation=context.rotation,
                keep=masks.self_attention,
                capture=capture,
            )
            return output

        def cross_attention(x: Array) -> Array:
            nonlocal cross_weights
            assert self.cross_attention is not None
            assert context.memory is not None
            output, cross_weights = self.cross_attention(
                x, context.memory, context.cross_mask, causal=False, keep=masks.cross_attention, capture=capture
            )
            return output

        def feedforward(x: Array) -> Array:
            return self.feedforward(x, keep=masks.feedforward)

        x = self._residual(x, self_attention, self.self_attention_norm, masks.self_attention_residual)
        if self.cross_attention_norm is not None:
            x = self._residual(x, cross_attention, self.cross_attention_norm, masks.cross_attention_residual)
        x = self._residual(x, feedforward, self.feedforward_norm, masks.feedforward_residual)
        return x, Captured(x, self_weights, cross_weights, masks)

    def extend(
        self, x: Float[Array, "N T D"], cache: LayerCache, new: NewTokens
    ) -> tuple[Float[Array, "N T D"], LayerCache]:
        """The layer applied to tokens that come after those in the cache, and the cache with them in it."""
        remembered = cache.self_attention

        def self_attention(x: Array) -> Array:
            nonlocal remembered
            output, remembered = self.self_attention.extend(x, remembered, new)
            return output

        def cross_attention(x: Array) -> Array:
            assert self.cross_attention is not None
            assert cache.cross_attention is not None
            return self.cross_attention.recall(x, cache.cross_attention, new.cross_mask)

        x = self._residual(x, self_attention, self.self_attention_norm)
        if self.cross_attention_norm is not None:
            x = self._residual(x, cross_attention, self.cross_attention_norm)
        x = self._residual(x, self.feedforward, self.feedforward_norm)
        return x, cache._replace(self_attention=remembered)

    def _residual(self, x: Array, branch: Callable[[Array], Array], norm: Norm, keep: Array | None = None) -> Array:
        rate = self.config.dropout.residual
        if self.pre:
            return x + dropout(branch(norm(x)), rate, keep)
        return norm(x + dropout(branch(x), rate, keep))

    def _draw_masks(self, key: Array | None, x: Array, memory: Array | None) -> DropoutMasks:
        (batch, length, _), heads, rates = x.shape, self.stack.num_heads, self.config.dropout
        keys = split_key(key, 6)
        if self.cross_attention is None or memory is None:
            cross = cross_residual = None
        else:
            cross = draw_mask(keys[2], rates.attention, (batch, heads, length, memory.shape[1]))
            cross_residual = draw_mask(keys[3], rates.residual, x.shape)
        return DropoutMasks(
            draw_mask(keys[0], rates.attention, (batch, heads, length, length)),
            draw_mask(keys[1], rates.residual, x.shape),
            cross,
            cross_residual,
            draw_mask(keys[4], rates.feedforward, (batch, length, self.stack.feedforward_width)),
            draw_mask(keys[5], rates.residual, x.shape),
        )
