"""Faults of relative positions: the wrong bucket, the wrong place, a table that the layers do not share."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from torch import Tensor

from jax_tformer.model import embedding
from jax_tformer.model.embedding import RelativePositions
from parity_tests.faults import code_fault
from torch_ref import blocks


def later_edges(right):
    """A bucket of several distances begins one too late."""
    return lambda buckets, furthest: right(buckets, furthest) + (np.arange(buckets) > buckets // 2).astype(np.int32)


def both_directions(right):
    return lambda relative, buckets, furthest, causal: right(relative, buckets, furthest, False)


def turned(right):
    """In an encoder, the two halves of the table are exchanged."""
    return lambda relative, buckets, furthest, causal: right(
        relative if causal else -relative, buckets, furthest, causal
    )


def from_the_start(right):
    """From a cache, new tokens stand at the beginning."""
    return lambda self, mask, length, slots: right(self, replace(mask, first=jnp.zeros((), jnp.int32)), length, slots)


def in_the_first_layer(change):
    """Every layer after the first gets another bias."""

    def wrong(right):
        given: list[Tensor | None] = []

        def forward(self, x, mask, places, memory, across, bias):
            again = any(bias is earlier for earlier in given)
            given.append(bias)
            return right(self, x, mask, places, memory, across, change(bias) if again and bias is not None else bias)

        return forward

    return wrong


LIBRARY = (
    code_fault("relative positions: a bucket begins one too late", embedding, "first_distances", later_edges),
    code_fault("relative positions: a decoder's in both directions", embedding, "relative_buckets", both_directions),
    code_fault("relative positions: earlier and later exchanged", embedding, "relative_buckets", turned),
)
"""Gate 1."""
_BLOCK = (blocks.Block, "forward")
REFERENCE = (
    code_fault("relative positions: in the first layer alone", *_BLOCK, in_the_first_layer(lambda bias: None)),
    code_fault("relative positions: only the first layer trains them", *_BLOCK, in_the_first_layer(Tensor.detach)),
)
"""Gates 1 and 2."""
CACHED = code_fault("cache: relative positions from the wrong place", RelativePositions, "__call__", from_the_start)
"""Gate 8."""
