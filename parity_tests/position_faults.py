"""Faults of relative positions: the wrong bucket, the wrong place, a table that the layers do not share."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from torch import Tensor

from jax_tformer.model import embedding
from jax_tformer.model.embedding import RelativePositions
from parity_tests.faults import call_fault, code_fault
from torch_ref import blocks


def later_edges(right, buckets, furthest):
    """A bucket of several distances begins one too late."""
    return right(buckets, furthest) + (np.arange(buckets) > buckets // 2).astype(np.int32)


def turned(right, relative, buckets, furthest, causal):
    """In an encoder, the two halves of the table are exchanged."""
    return right(relative if causal else -relative, buckets, furthest, causal)


def from_the_start(right, self, mask, length, slots):
    """From a cache, new tokens stand at the beginning."""
    return right(self, replace(mask, first=jnp.zeros((), jnp.int32)), length, slots)


def in_the_first_layer(change):
    """Every layer after the first gets another bias."""

    def wrong(right):
        given = []

        def forward(self, x, mask, places, memory, across, bias):
            again = any(bias is earlier for earlier in given)
            given.append(bias)
            return right(self, x, mask, places, memory, across, change(bias) if again and bias is not None else bias)

        return forward

    return wrong


LIBRARY = (
    call_fault("relative positions: a bucket begins one too late", embedding, "first_distances", later_edges),
    call_fault(
        "relative positions: a decoder's in both directions",
        embedding,
        "relative_buckets",
        lambda right, relative, buckets, furthest, causal: right(relative, buckets, furthest, False),
    ),
    call_fault("relative positions: earlier and later exchanged", embedding, "relative_buckets", turned),
)
"""Gate 1."""
_BLOCK = (blocks.Block, "forward")
REFERENCE = (
    code_fault("relative positions: in the first layer alone", *_BLOCK, in_the_first_layer(lambda bias: None)),
    code_fault("relative positions: only the first layer trains them", *_BLOCK, in_the_first_layer(Tensor.detach)),
)
"""Gates 1 and 2."""
CACHED = call_fault("cache: relative positions from the wrong place", RelativePositions, "__call__", from_the_start)
"""Gate 8."""
