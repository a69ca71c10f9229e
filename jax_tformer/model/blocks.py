"""A layer, and the stack of them (paper, section 3.1), the same as in torch_ref/blocks.py."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.model.attention import Attention, Cache, Captured, LayerCache, rematerialized
from jax_tformer.model.embedding import RelativePositions, Rotation, rotary_angles
from jax_tformer.model.layers import Dropout, FeedForward, Norm, site_key
from jax_tformer.model.masks import Mask

Body = Callable[[Array, Any], tuple[Array, Any]]
"""(residual stream, parameters and key of a layer) -> (residual stream, what was captured)."""


class Block(nnx.Module):
    """One layer: post-norm as in the paper, norm(x + f(x)), pre-norm, x + f(norm(x)), or x + norm'(f(norm(x)))."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, cross: bool) -> None:
        sandwich = stack.norm_placement == "sandwich"
        branches = stack.num_layers * (3 if cross else 2)
        self.self_attention = Attention(config, stack, residual_branches=branches)
        self.self_attention_norm = Norm(config, stack)
        self.self_attention_output_norm = Norm(config, stack) if sandwich else None
        self.cross_attention = Attention(config, stack, residual_branches=branches) if cross else None
        self.cross_attention_norm = Norm(config, stack) if cross else None
        self.cross_attention_output_norm = Norm(config, stack) if cross and sandwich else None
        self.feedforward = FeedForward(config, stack, residual_branches=branches)
        self.feedforward_norm = Norm(config, stack)
        self.feedforward_output_norm = Norm(config, stack) if sandwich else None
        self.attention_residual_dropout = Dropout(config.dropout.of_attention_output)
        self.feedforward_residual_dropout = Dropout(config.dropout.residual)
        self.post, self.parallel = stack.norm_placement == "post", stack.parallel

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        rotation: Rotation | None = None,
        memory: Float[Array, "B S D"] | None = None,
        memory_mask: Mask | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
        cache: LayerCache | None = None,
        capture: bool = False,
    ) -> tuple[Float[Array, "B T D"], Captured | None, LayerCache | None]:
        """Returns the residual stream after the layer, what `capture` asks for, and the cache with x in it.

        `memory` is the encoder's output. If it is None, a cache provides its keys and values.
        """
        key, cross_weights, entering = partial(site_key, dropout_key), None, x
        own, cross = (None, None) if cache is None else cache
        h = x if self.post else self.self_attention_norm(x)
        h, self_weights, own = self.self_attention(
            h, h, mask, rotation, dropout_key=key("self_attention"), cache=own, capture=capture
        )
        norms = self.self_attention_norm, self.self_attention_output_norm
        dropout = self.attention_residual_dropout
        x = self._add(x, h, *norms, dropout, key("self_attention_residual_dropout"))
        if self.cross_attention is not None and self.cross_attention_norm is not None and memory_mask is not None:
            h = x if self.post else self.cross_attention_norm(x)
            h, cross_weights, cross = self.cross_attention(
                h, memory, memory_mask, dropout_key=key("cross_attention"), cache=cross, capture=capture
            )
            norms = self.cross_attention_norm, self.cross_attention_output_norm
            x = self._add(x, h, *norms, dropout, key("cross_attention_residual_dropout"))
        h = entering if self.parallel else x
        h = self.feedforward(h if self.post else self.feedforward_norm(h), key("feedforward"))
        norms = self.feedforward_norm, self.feedforward_output_norm
        x = self._add(x, h, *norms, self.feedforward_residual_dropout, key("feedforward_residual_dropout"))
        captured = None if self_weights is None else Captured(x, self_weights, cross_weights)
        return x, captured, None if own is None else LayerCache(own, cross)

    def _add(
        self, x: Array, h: Array, norm: Norm, output_norm: Norm | None, dropout: Dropout, key: Array | None
    ) -> Array:
        h = dropout(h if output_norm is None else output_norm(h), key)
        return norm(x + h) if self.post else x + h


class Stack(nnx.Module):
    """num_layers blocks, then the final norm if there is one.

    The layers share arrays with a leading L axis. In training, `lax.scan` runs one compiled layer over that axis, so
    compile time does not grow with depth; if layers differ in their window, over one pattern of them at a time. With a
    cache, the layers run one by one, because a scan would copy each layer's weights before reading them, which is most
    of the cost of a token.
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, cross: bool = False) -> None:
        self.blocks = nnx.vmap(lambda: Block(config, stack, cross=cross), axis_size=stack.num_layers)()
        self.relative_positions = RelativePositions(config, stack) if stack.positions == "relative" else None
        self.final_norm = Norm(config, stack) if stack.final_norm else None
        self.final_dropout = Dropout(config.dropout.final)
        self.config, self.stack = config, stack

    def __call__(
        self,
        x: Float[Array, "N T D"],
        mask: Mask,
        positions: Int[Array, "#N T"],
        memory: Float[Array, "N S D"] | None = None,
        memory_mask: Mask | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
        cache: Cache | None = None,
        capture: bool = False,
    ) -> tuple[Float[Array, "N T D"], Captured | None, Cache | None]:
        """Runs all layers; returns the residual stream, what `capture` asks for, and the cache with x in it."""
        graph, layers = nnx.split(self.blocks, nnx.Param)
        blocks_key, windows = site_key(dropout_key, "blocks"), self.stack.windows
        placed = {window: rotary_angles(self.config, self.stack, positions, window) for window in set(windows)}
        if self.relative_positions is not None:
            slots = x.shape[1] if cache is None else cache.is_token.shape[1]
            mask = replace(mask, bias=self.relative_positions(mask, x.shape[1], slots))
        masks = {window: replace(mask, window=window) for window in placed}

        def layer(
            x: Array, parameters: Any, key: Array | None, cache: LayerCache | None, window: int | None
        ) -> tuple[Any, ...]:
            block = nnx.merge(graph, parameters)
            rotation, seen = placed[window], masks[window]
            return block(x, seen, rotation, memory, memory_mask, dropout_key=key, cache=cache, capture=capture)

        captured: Captured | None
        if cache is None:
            fold = jax.vmap(jax.random.fold_in, (None, 0))
            keys = None if blocks_key is None else fold(blocks_key, jnp.arange(self.stack.num_layers))
            compute = self.config.compute

            def trained(window: int | None) -> Body:
                return rematerialized(lambda x, own: layer(x, own[0], own[1], None, window)[:2], compute.remat)

            bodies = [trained(window) for window in windows]
            x, captured = scan_pattern(bodies, x, (layers, keys), unroll=compute.unroll)
        else:
            results = []
            for number, own in enumerate(cache.layers):
                window = windows[number % len(windows)]
                x, *rest = layer(x, _one(layers, number), site_key(blocks_key, number), own, window)
                results.append(rest)
            each_captured, remembered = zip(*results, strict=True)
            captured = jax.tree.map(lambda *each: jnp.stack(each), *each_captured)
            cache = cache._replace(layers=remembered)
        x = x if self.final_norm is None else self.final_norm(x)
        return self.final_dropout(x, site_key(dropout_key, "final_dropout")), captured, cache


def scan_pattern(bodies: Sequence[Body], x: Array, layers: Any, *, unroll: int) -> tuple[Array, Any]:
    """Runs `bodies` by turns over the leading L axis of `layers`, cut off at its end; stacks what they return.

    Like `jax.lax.scan`, of which each iteration runs one whole pattern, with `unroll` iterations at once.
    """
    period, count = len(bodies), len(jax.tree.leaves(layers)[0])
    whole = count // period

    def turn(x: Array, pattern: Any, length: int) -> tuple[Array, Any]:
        results = []
        for number, body in enumerate(bodies[:length]):
            x, result = body(x, jax.tree.map(lambda leaf, number=number: leaf[number], pattern))
            results.append(result)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *results)

    if period == 1:
        return jax.lax.scan(bodies[0], x, layers, unroll=min(unroll, count))
    split = jax.tree.map(lambda leaf: leaf[: whole * period].reshape(whole, period, *leaf.shape[1:]), layers)
    x, results = jax.lax.scan(lambda x, pattern: turn(x, pattern, period), x, split, unroll=min(unroll, whole))
    results = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)
    if count > whole * period:
        x, rest = turn(x, jax.tree.map(lambda leaf: leaf[whole * period :], layers), count - whole * period)
        results = jax.tree.map(lambda first, last: jnp.concatenate([first, last]), results, rest)
    return x, results


def _one(layers: Any, number: int) -> Any:
    """Returns the parameters of one layer."""
    return nnx.map_state(lambda _, parameter: parameter.replace(parameter.get_value()[number]), layers)
