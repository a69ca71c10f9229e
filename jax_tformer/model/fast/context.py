"""Attention over rows whose positions are split over devices: each has its part of the queries, and all keys."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from jax_tformer.model.masks import Mask
from jax_tformer.model.parameters import accumulator, context_parts

Attend = Callable[..., tuple[Array, Any]]
"""A function with the arguments of `attend` and its result, but for the weights, which may be None."""


def share_queries(compute: Attend) -> Attend:
    """Splits attention over the context axis of the mesh that is set; without one, returns `compute` itself.

    The compiler gathers keys and values, and adds up their gradients. If the mask hides keys by their distance, device
    i of n takes the queries at places i, i + n ... (Brandon et al., "Striped attention", 2023): all then see equally
    many keys, and skip the same ones. Otherwise each takes those that it holds.
    """
    parts = context_parts()

    def shared(
        query: Float[Array, "N T H C"],
        key: Float[Array, "B S K C"],
        value: Float[Array, "B S K C"],
        mask: Mask,
        scale: float,
        dropout_rate: float = 0.0,
        keep: Bool[Array, "N H T S"] | None = None,
    ) -> tuple[Float[Array, "N T H C"], Any]:
        if query.shape[1] % parts or not isinstance(mask.first, int):
            # Decoding: few queries, or keys of a cache.
            return compute(query, key, value, mask, scale, dropout_rate, keep)
        striped = mask.causal or mask.window is not None
        # T becomes T/n places apart and n devices, or n devices and T/n places.
        sizes, devices = ((-1, parts), 1) if striped else ((parts, -1), 0)

        def split(x: Array | None, axis: int) -> Array | None:
            """Makes `[n, ..., T/n, ...]` of `[..., T, ...]`."""
            if x is None:
                return None
            free = PartitionSpec.UNCONSTRAINED
            x = jax.lax.with_sharding_constraint(x, PartitionSpec(*[free] * axis, "context"))
            return jnp.moveaxis(x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :]), axis + devices, 0)

        nothing = None, None
        segments, prefix = mask.segments or nothing, mask.prefix or nothing
        asking = *(split(x, 1) for x in (query, segments[0], prefix[0])), split(keep, 2), split(mask.bias, 2)
        answering = key, value, segments[1], prefix[1], mask.is_token

        def attend_to_all(asking: Any, answering: Any) -> Array:
            query, of_queries, in_prefix, keep, bias = jax.tree.map(lambda x: x[0], asking)
            key, value, of_keys, key_in_prefix, is_token = answering
            # Where gradients of keys and values are added up over devices: once, and not for each block of queries, and
            # in at least float32.
            key, value = (
                jax.lax.pcast(x.astype(accumulator(x.dtype)), "context", to="varying").astype(x.dtype)
                for x in (key, value)
            )
            seen = replace(
                mask,
                is_token=is_token,
                segments=None if of_queries is None else (of_queries, of_keys),
                prefix=None if in_prefix is None else (in_prefix, key_in_prefix),
                bias=bias,
                stripe=(jax.lax.axis_index("context"), parts) if striped else (0, 1),
            )
            return compute(query, key, value, seen, scale, dropout_rate, keep)[0][None]

        one, all_keys = PartitionSpec("context"), PartitionSpec()
        on_devices = jax.shard_map(attend_to_all, in_specs=(one, all_keys), out_specs=one, axis_names={"context"})
        found = on_devices(asking, answering)
        return jnp.moveaxis(found, 0, 1 + devices).reshape(query.shape), None

    return compute if parts == 1 else shared
