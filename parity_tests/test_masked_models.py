"""Who sees whom, beyond padding: windows, several texts in a row, prefixes. Gates 1 to 4, and packed rows.

Gate 8 is in test_decoding.py; random architectures draw all of it too.
"""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_tformer.config import ComputeConfig, Positions, StackConfig, TransformerConfig
from jax_tformer.model import fast
from jax_tformer.model.attention import attend_by
from jax_tformer.model.masks import Mask
from jax_tformer.training.step import forward
from parity.gates.measure import FLOAT64_BAR, relative_error
from parity_tests.depth import deep
from parity_tests.pairs import random_pair
from parity_tests.test_decoding import model_of
from parity_tests.test_models import judge_narrow
from torch_ref.masks import visible
from twin.cases import (
    CONFIGS,
    OFF_CENTRE,
    REGIMES,
    SEGMENTS,
    SWITCHES,
    VOCABULARY,
    WINDOWED,
    Lengths,
    batch_for,
    kinds,
    weights_for,
    windowed,
)

LENGTHS = Lengths(batch=3, source=13, target=14)
IMPLEMENTATIONS = ("einsum", "blocks")


def first(values, *quick):
    """Parameters, of which `make test` takes only `quick`."""
    return [value if value in quick else deep(*(value if isinstance(value, tuple) else [value])) for value in values]


def every_mask(config, padding):
    """The kind of batch that has all masks which there are for `config`: one program computes any of them."""
    return f"{padding} segments" if config.encoder is not None else f"{padding} segments prefix"


@pytest.fixture
def hold_all(hold):
    """hold_all(name, models, kinds): the same on batches of these kinds, in every weight regime."""

    def note(name, models, kinds):
        for (seed, kind), std in product(enumerate(kinds), REGIMES.values()):
            models.load(weights_for(models.config, std, seed))
            hold(name, models, batch_for(models.config, kind, seed, LENGTHS))

    return note


def pair(config):
    return random_pair(config, 0.02)


@cache
def preset(name):
    """One for all tests, so that one process compiles it once."""
    return pair(CONFIGS[name])


@pytest.mark.parametrize("name", first(CONFIGS, "bert-base", "vaswani-base"))
def test_gates_1_and_2_with_every_mask(name, hold_all):
    hold_all(name, preset(name), [every_mask(CONFIGS[name], padding) for padding in ("left", "right")])


@pytest.mark.deep
@pytest.mark.parametrize("name", CONFIGS)
def test_gates_1_and_2_with_each_kind_of_mask(name, hold_all):
    hold_all(name, pair(CONFIGS[name]), kinds(CONFIGS[name]))


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(
    "name, kind",
    [
        deep("decoder-only, window", "none"),
        ("decoder-only, window", "left segments prefix"),
        ("encoder-decoder, windows", "left segments"),
    ],
)
def test_gates_1_and_2_with_a_window(name, kind, hold_all):
    hold_all(name, pair(WINDOWED[name]), [kind])


@pytest.mark.deep
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [1, 2, 6, 40])
@pytest.mark.parametrize("name", WINDOWED)
def test_gates_1_and_2_with_other_windows(name, window, implementation, hold_all):
    config = replace(windowed(WINDOWED[name], window, window), compute=ComputeConfig(attention=implementation))
    hold_all(name, pair(config), kinds(config))


@pytest.mark.deep
@pytest.mark.parametrize("name", WINDOWED)
def test_gates_3_and_4_with_every_mask(name, record):
    config = WINDOWED[name]
    left, right = (every_mask(config, padding) for padding in ("left", "right"))
    judge_narrow(name, pair(config), [((0.2, 0.0), left), ((0.02, OFF_CENTRE), right)], [(0.2, left)], record)


def test_a_target_that_finds_no_source_sees_nothing():
    """Its attention is zero, and so is what its loss changes in all that leads to the source."""
    models = preset("vaswani-base")
    models.load(weights_for(models.config, 0.2))
    batch = batch_for(models.config, every_mask(models.config, "right"), lengths=LENGTHS)
    same = batch["target_segments"][:, :, None] == batch["source_segments"][:, None, :]
    sees = (same & batch["source_mask"][:, None]).any(axis=2)
    blind = ~sees & batch["target_mask"]
    assert blind.sum() > 3
    assert (sees & batch["target_mask"]).sum() > 3

    labels = np.where(blind, batch["target"], -100).astype(np.int64)
    for result in (models.run_jax(batch | {"labels": labels}), models.run_torch(batch | {"labels": labels})):
        weights = result.outputs["decoder.0.cross_attention"].swapaxes(1, 2)
        assert not weights[~sees].any()
        np.testing.assert_allclose(weights[sees].sum(-1), 1, rtol=1e-12)
        led = re.compile(r"encoder\.|.*cross_attention\.(query|key|value)")
        gradients = {name: gradient for name, gradient in result.gradients.items() if led.match(name)}
        assert len(gradients) > 20
        assert not any(gradient.any() for gradient in gradients.values())
        assert result.gradients["decoder.blocks.0.feedforward.up.weight"].any()


def plain_attention(arrays, seen):
    """The formula, in PyTorch; each key/value head serves two query heads."""
    query, key, value = (x.transpose(1, 2) for x in arrays)
    key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    scores = (query @ key.transpose(2, 3)).masked_fill(~seen, -1e300)
    return (scores.softmax(-1).masked_fill(~seen, 0.0) @ value).transpose(1, 2)


LENGTH = 150
"""Three blocks of 64 queries, of which the last is shorter."""


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "window, implementation",
    first(
        product([None, 1, 40, 64, 65, 100, 200], IMPLEMENTATIONS),
        *((1, "blocks"), (40, "blocks"), (100, "blocks"), (40, "einsum")),
    ),
)
def test_attention_by_the_formula(window, causal, implementation):
    """Over several blocks, with windows below, at and beyond the length of one; without masks and with all of them."""
    assert fast.block_length(LENGTH) == 64
    rng = np.random.default_rng(0)
    shapes = [(3, LENGTH, heads, 4) for heads in (4, 2, 2, 4)]
    *given, slope = (rng.standard_normal(shape) for shape in shapes)
    batch = batch_for(SWITCHES["switches-decoder-only"], "left segments prefix", lengths=Lengths(3, LENGTH, LENGTH))
    masks = {name: batch[name] for name in ("mask", "segments", *(["prefix"] if causal else []))}

    @jax.jit
    def ours(arrays, masks):
        pairs = {name: (masks[name], masks[name]) for name in ("segments", "prefix") if name in masks}
        seen = Mask(causal=causal, window=window, is_token=masks.get("mask"), **pairs)
        output, pull = jax.vjp(lambda *x: attend_by(implementation, *x, seen, 1.0)[0], *arrays)
        return output, *pull(jnp.asarray(slope))

    for some in ({}, masks):
        arrays = [torch.from_numpy(array).requires_grad_() for array in given]
        told = {"is_token" if name == "mask" else name: torch.from_numpy(mask) for name, mask in some.items()}
        seen = visible(torch.zeros(3, LENGTH), causal=causal, window=window, **told)
        seen = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool) if seen is None else seen
        output = plain_attention(arrays, seen)
        output.backward(torch.from_numpy(slope))
        theirs = output.detach(), *(array.grad for array in arrays)
        for found, expected in zip(ours(given, some), theirs, strict=True):
            assert relative_error(np.asarray(found), expected.numpy()) <= FLOAT64_BAR
        blind = ~seen.any(3)[:, 0].numpy()
        assert bool(some) == blind.any()
        assert not np.asarray(ours(given, some)[0])[np.broadcast_to(blind, (3, LENGTH))].any()


def model_of_texts(kind, positions):
    """A small model; without positions it has a window instead. The encoder-decoder's target has other positions."""

    def stack(positions):
        rows, window = (9 if positions == "learned" else None), (3 if positions == "none" else None)
        return StackConfig(1, 2, 8, positions=positions, max_positions=rows, window=window)

    every = get_args(Positions)
    return TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=8,
        encoder=None if kind == "decoder-only" else stack(positions),
        decoder=None if kind == "encoder-only" else stack(every[every.index(positions) - (kind == "encoder-decoder")]),
    )


KINDS = ("decoder-only", "encoder-only", "encoder-decoder")
PACKED = [
    ("decoder-only", "learned"),
    ("encoder-only", "learned"),
    # With these three, the stacks of an encoder-decoder have every kind of positions.
    *(("encoder-decoder", positions) for positions in ("sinusoidal_half", "rotary", "none")),
]


@pytest.mark.parametrize("kind, positions", first(product(KINDS, get_args(Positions)), *PACKED))
def test_texts_in_one_row_are_as_each_alone(kind, positions):
    config = model_of_texts(kind, positions)
    net, params = model_of(config)
    rng, lengths = np.random.default_rng(0), {"source": (4, 5), "target": (5, 3), "tokens": (5, 4)}
    sides = ["source", "target"] if kind == "encoder-decoder" else ["tokens"]
    alone = [{side: rng.integers(0, VOCABULARY, (2, lengths[side][text])) for side in sides} for text in (0, 1)]
    packed = {side: np.concatenate([text[side] for text in alone], axis=1) for side in sides}
    packed |= {SEGMENTS[side]: np.repeat([[3, 1]] * 2, lengths[side], axis=1) for side in sides}

    @jax.jit
    def logits(params, packed, alone):
        return [forward(net, params, batch).logits for batch in (packed, *alone)]

    together, *apart = logits(params, packed, alone)
    assert relative_error(np.asarray(together), np.concatenate(apart, axis=1)) <= FLOAT64_BAR
