"""How the layers of a stack are run: one compiled layer for all, or one by one, and what their backward pass keeps."""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Primitive
from jaxtyping import Array, Key

from jax_tformer.config import ComputeConfig, Remat
from jax_tformer.model.parameters import split_over_mesh

Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")
Window = int | None
PROJECTION = "projection"
"""The name of the result of a Linear, bias included, by which `rematerialize` makes the backward pass keep it."""
ATTENTION_OUTPUT = "attention output"
"""The name of the result of attention, by which `rematerialize` makes the backward pass keep it."""


Layer = Callable[[Any, Array, Window, Array | None, Any], tuple[Any, ...]]
"""(module, residual stream, window, dropout key, its part of the cache) -> (residual stream, captured, part)."""


def scan_layers(
    layer: Layer,
    blocks: nnx.Module,
    x: Array,
    windows: Sequence[Window],
    keys: Key[Array, " L"] | None,
    how: ComputeConfig,
) -> tuple[Array, Any]:
    """Runs stacked layers with `jax.lax.scan`; returns the residual stream and what was captured, stacked along L.

    The layers take the `windows` by turns. One turn over the whole pattern is compiled, and `how.unroll` turns make one
    iteration, so that compile time does not grow with depth unless all are unrolled.
    """
    graph, parameters = nnx.split(blocks, nnx.Param)
    count, period = len(jax.tree.leaves(parameters)[0]), len(windows)
    whole = count // period
    unroll = min(how.unroll or 1, whole)
    # Otherwise there is no loop, or some layers stand outside of it.
    looped = unroll < whole and whole % unroll == 0

    def body(window: Window, in_loop: bool) -> Callable[[Array, Any], tuple[Array, Any]]:
        def run(x: Array, own: Any) -> tuple[Array, Any]:
            x, captured, _ = layer(nnx.merge(graph, own[0]), split_over_mesh(x), window, own[1], None)
            return x, captured

        return rematerialize(run, how.remat, in_loop=in_loop)

    def turn(x: Array, pattern: Any, in_loop: bool = looped) -> tuple[Array, Any]:
        results = []
        for number in range(len(jax.tree.leaves(pattern)[0])):
            own = jax.tree.map(lambda leaf, number=number: leaf[number], pattern)
            x, result = body(windows[number], in_loop)(x, own)
            results.append(result)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *results)

    layers = (parameters, keys)
    if period == 1:
        return jax.lax.scan(body(windows[0], looped), x, layers, unroll=unroll)
    split = jax.tree.map(lambda leaf: leaf[: whole * period].reshape(whole, period, *leaf.shape[1:]), layers)
    x, results = jax.lax.scan(turn, x, split, unroll=unroll)
    results = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)
    if count > whole * period:
        x, rest = turn(x, jax.tree.map(lambda leaf: leaf[whole * period :], layers), in_loop=False)
        results = jax.tree.map(lambda first, last: jnp.concatenate([first, last]), results, rest)
    return x, results


def loop_layers(
    layer: Layer,
    blocks: nnx.Module,
    x: Array,
    windows: Sequence[Window],
    keys: Key[Array, " L"] | None,
    caches: Sequence[Any],
) -> tuple[Array, Any, tuple[Any, ...]]:
    """Runs stacked layers one by one, each with its cache; returns also the new caches.

    A scan would copy each layer's weights before reading them, which is most of the cost of a token.
    """
    graph, parameters = nnx.split(blocks, nnx.Param)
    captured = []
    remembered = []
    for number, cache in enumerate(caches):
        own = jax.tree.map(lambda x, number=number: x[number], parameters, is_leaf=lambda x: isinstance(x, tuple))
        key = None if keys is None else keys[number]
        x, weights, cache = layer(nnx.merge(graph, own), x, windows[number % len(windows)], key, cache)
        captured.append(weights)
        remembered.append(cache)
    return x, jax.tree.map(lambda *each: jnp.stack(each), *captured), tuple(remembered)


def rematerialize(layer: Callable[Inputs, Output], remat: Remat, *, in_loop: bool) -> Callable[Inputs, Output]:
    """Returns `layer` with a backward pass that recomputes what `remat` does not keep (see ComputeConfig.remat).

    The compiler merges equal computations, and so would keep everything after all, unless the forward and the backward
    pass are loops of their own (`in_loop`) or are kept apart.

    "auto" means "dots" here, the fastest on CPU and far smaller than keeping all; train.py chooses by memory. Keeps
    projections with their bias: in bfloat16 the compiler may leave out the rounding between the two in the forward
    pass, and a ReLU would then be recomputed on the other side of its kink.
    """
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names(PROJECTION, ATTENTION_OUTPUT)
    policy = None if remat == "full" else policies.save_from_both_policies(named, _is_cudnn_attention)
    return jax.checkpoint(layer, prevent_cse=not in_loop, policy=policy)


def _is_cudnn_attention(primitive: Primitive, *_: object, **__: object) -> bool:
    """Whether to keep a result: those of cuDNN's forward pass, including the softmax's statistics.

    The Pallas kernel runs again instead: it writes its statistics 128 times over, nearly as much as all else that is
    kept of a layer.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"
