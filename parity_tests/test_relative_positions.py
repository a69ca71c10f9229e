"""Relative positions: every bucket against transformers' T5, gates 1, 2 and 8, and faults that these see."""

from dataclasses import replace
from functools import cache, partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.model import embedding
from jax_tformer.model.embedding import RelativePositions, first_distances, relative_buckets
from parity_tests.faults import call_fault, code_fault
from parity_tests.pairs import random_pair
from parity_tests.test_decoding import model_of, of_cache, reader
from torch_ref import blocks
from torch_ref.embedding import bucket
from twin.cases import VOCABULARY, Lengths, batch_for

# Distances reach all buckets, and far beyond the last; the decoder's and the encoder's differ.
STACK = StackConfig(
    num_layers=2,
    num_heads=4,
    key_value_heads=2,
    feedforward_width=12,
    attention_scale="none",
    positions="relative",
    relative_buckets=12,
    relative_max_distance=8,
)
PAIRS = TransformerConfig(
    vocab_size=VOCABULARY,
    d_model=8,
    encoder=STACK,
    decoder=replace(STACK, relative_buckets=7, relative_max_distance=9, window=12),
)
LENGTHS = Lengths(batch=3, source=15, target=14)
pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "buckets, furthest", [(32, 128), (4, 3), (6, 10), (12, 27), (32, 17), (64, 1000), (32, 2048), (64, 5000)]
)
def test_buckets_are_those_of_transformers(buckets, furthest, causal):
    """Whose logarithms are in float32: at every distance up to several thousand, in both directions."""
    relative = torch.arange(-6000, 6001)
    theirs = T5Attention._relative_position_bucket(relative, not causal, buckets, furthest)
    assert torch.equal(bucket(relative, buckets, furthest, causal), theirs)
    ours = relative_buckets(jnp.asarray(relative.numpy(), jnp.int32), buckets, furthest, causal)
    np.testing.assert_array_equal(np.asarray(ours), theirs.numpy())


def test_an_edge_that_a_logarithm_in_float32_misses():
    """84 = 18 (392 / 18)^(1/2) exactly, so the 10th of 18 buckets begins there; in float32, the product is below 9."""
    assert 84**18 * 18**9 == 392**9 * 18**18
    assert first_distances(36, 392)[18 + 9] == 84
    distance = torch.tensor([84])
    assert bucket(-distance, 36, 392, True).item() == 27
    assert T5Attention._relative_position_bucket(-distance, False, 36, 392).item() == 26


models = cache(partial(random_pair, PAIRS))
batch = partial(batch_for, PAIRS, "right segments", 1, LENGTHS)


def test_gates_1_and_2(hold):
    hold("relative positions", models(), batch())


def gate_8():
    """The decoder's logits token by token, from a cache, and at once; compiled anew."""
    net, params = model_of(PAIRS)
    return of_cache(*reader(net)(params, batch_for(PAIRS, "left", lengths=LENGTHS), first=3))


def test_from_a_cache(record):
    record("relative positions", gate_8())


# Faults, which test_faults.py plants.


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


IN_LIBRARY = (
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
IN_REFERENCE = (
    code_fault("relative positions: in the first layer alone", *_BLOCK, in_the_first_layer(lambda bias: None)),
    code_fault("relative positions: only the first layer trains them", *_BLOCK, in_the_first_layer(Tensor.detach)),
)
"""Gates 1 and 2."""
IN_CACHE = call_fault("cache: relative positions from the wrong place", RelativePositions, "__call__", from_the_start)
"""Gate 8."""
