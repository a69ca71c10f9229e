"""A layer, and the stack of them (paper, section 3.1), the same as in torch_ref/blocks.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_tformer.cache import Cache, LayerCache
from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.model.attention import Attention
from jax_tformer.model.embedding import RelativePositions, Rotation, rotary_angles
from jax_tformer.model.layers import FeedForward, Norm, identity
from jax_tformer.model.masks import Mask
from jax_tformer.model.parameters import (
    Count,
    Dropout,
    DropoutKey,
    Ids,
    Marks,
    Memory,
    Numbers,
    Positions,
    Stream,
    layer_keys,
)
from jax_tformer.scan import loop_layers, scan_layers

Masks = dict[int | None, Mask]
"""Window -> who sees whom in the layers with this window."""


class Captured(NamedTuple):
    """What `capture=True` returns from one layer, or from all layers, stacked along L."""

    hidden: Float[Array, "*L B T D"]
    """The residual stream after the layer."""
    self_attention: Float[Array, "*L B H T S"]
    """Weights of self-attention, before dropout."""
    cross_attention: Float[Array, "*L B H T S"] | None
    """Weights of attention to the encoder's output, before dropout."""


class Block(nnx.Module):
    """One layer: post-norm as in the paper, norm(x + f(x)), pre-norm, x + f(norm(x)), or x + norm'(f(norm(x)))."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, cross: bool) -> None:
        sandwich = stack.norm_placement == "sandwich"
        branches = stack.num_layers * (3 if cross else 2)
        self.self_attention = Attention(config, stack, residual_branches=branches)
        self.self_attention_norm = Norm(config, stack)
        self.self_attention_output_norm = Norm(config, stack) if sandwich else identity
        self.self_attention_residual_dropout = Dropout(config.dropout.of_attention_output)
        self.cross_attention = Attention(config, stack, residual_branches=branches) if cross else None
        self.cross_attention_norm = Norm(config, stack) if cross else identity
        self.cross_attention_output_norm = Norm(config, stack) if cross and sandwich else identity
        self.cross_attention_residual_dropout = Dropout(config.dropout.of_attention_output)
        self.feedforward = FeedForward(config, stack, residual_branches=branches)
        self.feedforward_norm = Norm(config, stack)
        self.feedforward_output_norm = Norm(config, stack) if sandwich else identity
        self.feedforward_residual_dropout = Dropout(config.dropout.residual)
        self.placement = stack.norm_placement
        self.parallel = stack.parallel

    def __call__(
        self,
        x: Stream,
        mask: Mask,
        rotation: Rotation | None = None,
        memory: Memory = None,
        memory_mask: Mask | None = None,
        dropout_key: DropoutKey = None,
        cache: LayerCache | None = None,
        capture: bool = False,
    ) -> tuple[Stream, Captured | None, LayerCache | None]:
        """Returns the residual stream after the layer, what `capture` asks for, and the cache with x in it.

        `memory` is the encoder's output. If it is None, a cache provides its keys and values.
        """
        entering = x
        own, cross = cache or (None, None)
        cross_weights = None
        h = self._before(x, self.self_attention_norm)
        h, weights, own = self.self_attention(h, h, mask, rotation, dropout_key, own, capture)
        h = self.self_attention_residual_dropout(self.self_attention_output_norm(h), dropout_key)
        x = self._add(x, h, self.self_attention_norm)
        if self.cross_attention is not None and memory_mask is not None:
            h = self._before(x, self.cross_attention_norm)
            h, cross_weights, cross = self.cross_attention(h, memory, memory_mask, None, dropout_key, cross, capture)
            h = self.cross_attention_residual_dropout(self.cross_attention_output_norm(h), dropout_key)
            x = self._add(x, h, self.cross_attention_norm)
        h = self._before(entering if self.parallel else x, self.feedforward_norm)
        h = self.feedforward(h, dropout_key)
        h = self.feedforward_residual_dropout(self.feedforward_output_norm(h), dropout_key)
        x = self._add(x, h, self.feedforward_norm)
        captured = None if weights is None else Captured(x, weights, cross_weights)
        return x, captured, None if own is None else LayerCache(own, cross)

    def _before(self, x: Array, norm: Callable[[Array], Array]) -> Array:
        return x if self.placement == "post" else norm(x)

    def _add(self, x: Array, h: Array, norm: Callable[[Array], Array]) -> Array:
        return norm(x + h) if self.placement == "post" else x + h


class Stack(nnx.Module):
    """num_layers blocks, then the final norm if there is one.

    The layers share arrays with a leading L axis, and in training one compiled layer (`scan_layers`).
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, causal: bool, cross: bool = False) -> None:
        self.blocks = nnx.vmap(lambda: Block(config, stack, cross=cross), axis_size=stack.num_layers)()
        self.relative_positions = RelativePositions(config, stack) if stack.positions == "relative" else None
        self.final_norm = Norm(config, stack) if stack.final_norm else identity
        self.final_dropout = Dropout(config.dropout.final)
        self.config = config
        self.stack = stack
        self.causal = causal

    def __call__(
        self,
        x: Stream,
        masks: Masks,
        positions: Positions,
        memory: Memory = None,
        memory_mask: Mask | None = None,
        dropout_key: DropoutKey = None,
        cache: Cache | None = None,
        capture: bool = False,
    ) -> tuple[Stream, Captured | None, Cache | None]:
        """Runs all layers; returns the residual stream, what `capture` asks for, and the cache with x in it.

        `masks` are those of self-attention.
        """
        rotations = {window: rotary_angles(self.config, self.stack, positions, window) for window in masks}

        def layer(block: Block, x: Array, window: int | None, key: Array | None, cache: LayerCache | None) -> Any:
            return block(x, masks[window], rotations[window], memory, memory_mask, key, cache, capture)

        keys = layer_keys(dropout_key, self.stack.num_layers)
        windows = self.stack.windows
        if cache is None:
            x, captured = scan_layers(layer, self.blocks, x, windows, keys, self.config.compute)
        else:
            x, captured, layers = loop_layers(layer, self.blocks, x, windows, keys, cache.layers)
            cache = cache._replace(layers=layers)
        return self.final_dropout(self.final_norm(x), dropout_key), captured, cache

    def masks(
        self,
        tokens: Ids,
        is_token: Marks = None,
        segments: Numbers = None,
        prefix: Marks = None,
        cache: Cache | None = None,
    ) -> Masks:
        """Says who sees whom among `tokens`, for each window of the layers.

        With a cache, in which `tokens` have their slots already, they see also those before them.
        """
        first: Count | int = 0
        slots = length = tokens.shape[1]
        prefixes = None if prefix is None else (prefix, prefix)
        if cache is not None:
            # `place_tokens` has given `tokens` their slots and counted them as filled: the first is that many before.
            is_token = cache.is_token
            slots = cache.is_token.shape[1]
            first = cache.filled - length
            if prefix is not None:
                nothing = jnp.zeros_like(is_token)
                prefixes = prefix, jax.lax.dynamic_update_slice_in_dim(nothing, prefix, first, axis=1)
        numbers = None if segments is None else (segments, segments)
        mask = Mask(
            causal=self.causal,
            is_token=is_token,
            segments=numbers,
            prefix=prefixes,
            first=first,
            cap=self.stack.score_cap,
        )
        if self.relative_positions is not None:
            mask = replace(mask, bias=self.relative_positions(mask, length, slots))
        return {window: replace(mask, window=window) for window in self.stack.windows}
