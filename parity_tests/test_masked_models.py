"""Who sees whom, beyond padding: windows, several texts in a row, prefixes. Gates 1 to 4, and packed rows.

Gate 8 is in test_decoding.py; random architectures draw all of it too.
"""

from dataclasses import replace
from itertools import product
from typing import get_args

import jax
import numpy as np
import pytest

from jax_tformer.config import ComputeConfig, Positions, StackConfig, TransformerConfig
from jax_tformer.model import fast
from jax_tformer.training.step import forward
from parity.gates.measure import FLOAT64_BAR, relative_error
from parity_tests.depth import deep
from parity_tests.pairs import random_pair
from parity_tests.test_decoding import model_of
from parity_tests.test_models import judge_narrow
from twin.cases import (
    CONFIGS,
    OFF_CENTRE,
    REGIMES,
    SEGMENTS,
    VOCABULARY,
    WINDOWED,
    Lengths,
    batch_for,
    kinds,
    weights_for,
    windowed,
)

LENGTHS, LONG = Lengths(3, 13, 14), Lengths(3, 150, 150)
EVERY = CONFIGS | WINDOWED
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


@pytest.mark.parametrize("name", ["bert-base", "vaswani-base"])
def test_gates_1_and_2_with_every_mask(name, hold_all):
    hold_all(name, pair(CONFIGS[name]), [every_mask(CONFIGS[name], padding) for padding in ("left", "right")])


@pytest.mark.deep
@pytest.mark.parametrize("name", EVERY)
def test_gates_1_and_2_with_each_kind_of_mask(name, hold_all):
    hold_all(name, pair(EVERY[name]), kinds(EVERY[name]))


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize(
    "window, implementation",
    first(product([1, 40, 64, 65, 100, 200], IMPLEMENTATIONS), (40, "blocks"), (100, "blocks")),
)
def test_gates_1_and_2_over_several_blocks(name, window, implementation, hold):
    """Three blocks of 64 queries, of which the last is shorter; windows below, at and beyond the length of one."""
    assert fast.block_length(LONG.target) == 64
    config = replace(windowed(WINDOWED[name], window, window), compute=ComputeConfig(attention=implementation))
    hold(name, random_pair(config), batch_for(config, every_mask(config, "left"), lengths=LONG))


@pytest.mark.deep
@pytest.mark.parametrize("name", WINDOWED)
def test_gates_3_and_4_with_every_mask(name, record):
    config = WINDOWED[name]
    left, right = (every_mask(config, padding) for padding in ("left", "right"))
    judge_narrow(name, pair(config), [((0.2, 0.0), left), ((0.02, OFF_CENTRE), right)], [(0.2, left)], record)


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
