"""The schedules are the paper's formulas, worked by hand; gate 5 holds AdamW and clipping to PyTorch's."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import OptimizerConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.training.optimizer import decay_mask, learning_rate


def rates(config, steps):
    schedule = learning_rate(config, steps)
    return np.array([float(schedule(jnp.asarray(n))) for n in range(steps)])


def test_the_papers_schedule():
    """Section 5.3: d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), steps counted from 1."""
    d_model, warmup, steps = 512, 40, 200
    peak = (d_model * warmup) ** -0.5
    ours = rates(OptimizerConfig(learning_rate=peak, schedule="inverse_sqrt", warmup_steps=warmup), steps)
    paper = [d_model**-0.5 * min(s**-0.5, s * warmup**-1.5) for s in range(1, steps + 1)]
    assert np.abs(ours / paper - 1).max() < 1e-6


def test_cosine_begins_at_the_end_of_the_warm_up_and_ends_at_its_fraction():
    ours = rates(OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.1), 104)
    assert np.abs(ours[:4] - [0.5, 1.0, 1.5, 2.0]).max() < 1e-6
    assert abs(ours[53] - 2.0 * (0.1 + 0.9 * 0.5)) < 1e-6  # half way down
    assert abs(ours[-1] - 0.2) < 1e-6
    assert (np.diff(ours[3:]) < 0).all()


def test_constant():
    assert rates(OptimizerConfig(learning_rate=0.5, schedule="constant", warmup_steps=0), 3).tolist() == [0.5] * 3


def test_decay_is_on_matrices_only():
    shapes = transformer(ARCHITECTURES["bert-base"]).shapes
    mask = decay_mask(shapes)
    decayed = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, on in jax.tree_util.tree_leaves_with_path(mask)
        if on
    }
    assert "encoder.blocks.self_attention.query.kernel" in decayed
    assert "embedding.tokens.embedding" in decayed
    assert not any(name.endswith((".bias", ".scale")) for name in decayed)


@pytest.mark.parametrize("rate", [math.nan, math.inf, 0.0, -1.0])
def test_a_learning_rate_must_be_a_number(rate):
    with pytest.raises(InputError, match="learning_rate"):
        OptimizerConfig(learning_rate=rate)
