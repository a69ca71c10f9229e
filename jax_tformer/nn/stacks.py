"""A stack of layers whose parameters are stacked along a leading axis and run under one scan."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jax_tformer.config import Remat, StackConfig, TransformerConfig
from jax_tformer.nn.arrays import dtype_of
from jax_tformer.nn.attention import ATTENTION_OUTPUT
from jax_tformer.nn.blocks import Block, Captured, Context
from jax_tformer.nn.cache import KeyValue, LayerCache, NewTokens
from jax_tformer.nn.dropout import layer_keys
from jax_tformer.nn.fused_attention import is_kernel
from jax_tformer.nn.linear import PROJECTION
from jax_tformer.nn.norms import Norm
from jax_tformer.nn.positions import Rotation, angles


class Stack(nnx.Module):
    """num_layers blocks, then the final norm if the stack has one.

    Compile time does not grow with depth: `lax.scan` runs one compiled layer over the leading `L` axis.
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, cross: bool):
        self.blocks = nnx.vmap(lambda: Block(config, stack, cross=cross), axis_size=stack.num_layers)()
        self.final_norm = Norm(config, stack) if stack.final_norm else None
        self.config, self.stack = config, stack

    def rotation(self, positions: Int[Array, "#B T"]) -> Rotation | None:
        """The rotary angles of `positions`, computed once for all layers; None without rotary positions."""
        if self.stack.positions != "rotary":
            return None
        dtype = dtype_of(self.config.compute.dtype)
        angle = angles(positions, self.config.head_width(self.stack), self.stack.position_base, dtype)
        return Rotation(jnp.cos(angle), jnp.sin(angle))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        *,
        dropout_key: Key[Array, ""] | None = None,
        capture: bool = False,
    ) -> tuple[Float[Array, "B T D"], Captured | None]:
        """All layers in turn; with `capture`, also what each computed, stacked along L."""
        graph, layers = nnx.split(self.blocks, nnx.Param)
        # Where they lie apart (Transformer.unstacked), they are brought together again.
        layers = jax.tree.map(_together, layers, is_leaf=_apart)
        keys = layer_keys(dropout_key, self.stack.num_layers)

        def layer(x: Array, inputs: tuple[Any, Array | None]) -> tuple[Array, Captured | None]:
            parameters, key = inputs
            x, captured = nnx.merge(graph, parameters)(x, context, dropout_key=key, capture=capture)
            return x, captured if capture else None

        compute = self.config.compute
        body = rematerialized(layer, compute.remat)
        x, captured = jax.lax.scan(body, x, (layers, keys), unroll=min(compute.unroll, self.stack.num_layers))
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x, captured

    def extend(
        self, x: Float[Array, "N T D"], layers: tuple[LayerCache, ...], new: NewTokens
    ) -> tuple[Float[Array, "N T D"], tuple[LayerCache, ...]]:
        """All layers in turn, applied to tokens that come after those in the caches.

        Unrolled: a scan would copy the weights of each layer before it reads them, which is most of what a token
        costs.
        """
        caches = []
        for block, cache in zip(self._blocks(), layers, strict=True):
            x, cache = block.extend(x, cache, new)
            caches.append(cache)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x, tuple(caches)

    def empty_cache(
        self, batch: int, slots: int, memory: Float[Array, "B S D"] | None = None
    ) -> tuple[LayerCache, ...]:
        """Room for `slots` tokens in each layer, and what cross-attention needs of the encoder's output."""
        stack, compute = self.stack, self.config.compute
        rows = batch * (stack.key_value_heads or stack.num_heads)
        empty = jnp.zeros((rows, slots, self.config.head_width(stack)), dtype_of(compute.dtype))
        return tuple(
            LayerCache(
                KeyValue(empty, empty),
                None if memory is None or block.cross_attention is None else block.cross_attention.remember(memory),
            )
            for block in self._blocks()
        )

    def _blocks(self) -> Iterator[Block]:
        """The layers one by one; their parameters may lie in one array with a leading L axis, or apart in a tuple."""
        graph, stacked = nnx.split(self.blocks, nnx.Param)
        for number in range(self.stack.num_layers):
            yield nnx.merge(graph, jax.tree.map(itemgetter(number), stacked, is_leaf=_apart))


def _apart(leaf: object) -> bool:
    return isinstance(leaf, tuple)


def _together(leaf: Any) -> Any:
    return jax.tree.map(lambda *layers: jnp.stack(layers), *leaf) if _apart(leaf) else leaf


def rematerialized(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`layer`, with what its backward pass computes again instead of keeping (see ComputeConfig.remat).

    "auto" is "dots" here, the fastest on CPU and far smaller than keeping all; train.py chooses by memory. Projections
    are kept with their bias: in bfloat16 the compiler may leave the rounding between the two out of the forward pass,
    and a ReLU would then be recomputed on the other side of its kink.
    """
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    products = policies.save_from_both_policies(policies.save_only_these_names(PROJECTION, ATTENTION_OUTPUT), is_kernel)
    # Under scan the loop itself keeps the compiler from merging both computations, which is what prevent_cse is for.
    return jax.checkpoint(layer, prevent_cse=False, policy=None if remat == "full" else products)
