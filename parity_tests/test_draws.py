"""Gate 10: dropout is not only applied as PyTorch applies it (gate 7), what it drops is drawn as it should be.

The masks are drawn from outside, as for gate 7, which sees a forward pass that drops something else.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config import DropoutConfig, StackConfig, TransformerConfig
from jax_tformer.functional import transformer
from jax_tformer.training.step import TrainState
from parity_tests.draws import dependences, judged, largest
from twin.cases import CONFIGS, Lengths, batch_for
from twin.dropout import masks_of_step

RATES = DropoutConfig(embedding=0.4, attention=0.3, residual=0.5, feedforward=0.6, final=0.45)
"""All different, so that no site can have that of another; near a half, where a few draws tell much."""
CLASSIFYING = replace(RATES, pooler=0.45, classifier=0.35)
"""For a model that classifies texts."""
STEPS = 16


def drawn(config, parts=1):
    """`[steps * parts, ...]`, every mask that training draws in some steps of so many parts, by its site.

    Compiled are single draws only, which sites of one shape share: the masks do not depend on what the model computes.
    """
    net = transformer(config)
    # As long as wide would let the columns of a mask pass for its rows.
    batch = batch_for(config, "none", lengths=Lengths(batch=3 * parts, source=9, target=7))
    batch = jax.device_put(batch)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), net.shapes)
    key = jax.random.key_data(jax.random.key(42))
    record = masks_of_step(net, accumulation=parts)

    def at(step):
        recorded = record(TrainState(params, (), step, key), batch)
        return {site: jnp.stack([part[site] for part in recorded]) for site in recorded[0]}

    masks = jax.vmap(at)(jnp.arange(STEPS, dtype=jnp.int32))
    return {site: np.asarray(mask).reshape(-1, *mask.shape[2:]) for site, mask in masks.items()}


def rate_of(site):
    """The rate that the config names for this site."""
    if "embedding" in site:
        return RATES.embedding
    if site in ("pooler.dropout", "classifier.dropout"):
        return CLASSIFYING.pooler if "pooler" in site else CLASSIFYING.classifier
    if site.endswith("_residual_dropout"):
        return RATES.residual
    if site.endswith("final_dropout"):
        return RATES.final
    return RATES.feedforward if "feedforward" in site else RATES.attention


def rates(masks):
    """How far the share of what is kept is from 1 - rate: of each site in all, and of its worst draw."""
    scores = {}
    for site, mask in masks.items():
        rate, size = rate_of(site), mask[0].size
        excess = (mask.reshape(len(mask), -1) - (1 - rate)).sum(1) / np.sqrt(rate * (1 - rate) * size)
        scores[site] = excess.sum() / np.sqrt(len(mask))
        scores |= {f"{site}[{draw}]": z for draw, z in enumerate(excess)}
    return largest(scores)


def gate(masks):
    """The right rates; and layers, sites, sides, rows, heads, positions, columns, steps and parts independent."""
    standardised = {}
    for site, mask in masks.items():
        rate = rate_of(site)
        standardised[site] = ((mask - (1 - rate)) / np.sqrt(rate * (1 - rate))).astype(np.float32)
    return judged(rates(masks), *dependences(standardised))


@pytest.mark.parametrize("name, parts", [("vaswani-base", 1), ("gpt2", 2), ("bert-base", 1)])
def test_masks_are_drawn_independently(name, parts, record):
    record(name, gate(drawn(replace(CONFIGS[name], dropout=RATES), parts)))


_STACK = StackConfig(num_layers=3, num_heads=2, feedforward_width=12)
SMALL = TransformerConfig(
    vocab_size=61, d_model=8, encoder=replace(_STACK, num_layers=2), decoder=_STACK, dropout=RATES
)
