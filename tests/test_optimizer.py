"""The optimizer is PyTorch's AdamW, and its schedules are the paper's formulas, worked by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import OptimizerConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.training.optimizer import clip_by_global_norm, decay_mask, learning_rate, optimizer


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


def test_one_step_by_hand():
    """Clip, Adam with bias correction, decoupled decay: the update of one matrix and one bias, step by step."""
    config = OptimizerConfig(learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.5, clip_norm=1.0)
    tx = optimizer(config, 10)
    params = {"kernel": jnp.array([[2.0]]), "bias": jnp.array([3.0])}
    grads = {"kernel": jnp.array([[3.0]]), "bias": jnp.array([-4.0])}
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    # At the first step Adam divides each gradient by its own size: the update is its sign, times the rate.
    assert float(new["kernel"][0, 0]) == pytest.approx(2.0 - 0.1 * (1 + 0.5 * 2.0), abs=1e-5)
    assert float(new["bias"][0]) == pytest.approx(3.0 + 0.1, abs=1e-5)


def test_clipping_has_torchs_form():
    clip = clip_by_global_norm(1.0)
    grads = {"a": jnp.array([3e-6]), "b": jnp.array([4e-6])}
    clipped, _ = clip_by_global_norm(2e-6).update(grads, clip.init(grads))
    # limit / (norm + 1e-6) = 2 / (5 + 1)
    assert float(clipped["a"][0]) == pytest.approx(1e-6, rel=1e-5)
    untouched, _ = clip.update(grads, clip.init(grads))
    assert float(untouched["a"][0]) == float(grads["a"][0])


@pytest.mark.parametrize("rate", [math.nan, math.inf, 0.0, -1.0])
def test_a_learning_rate_must_be_a_number(rate):
    with pytest.raises(InputError, match="learning_rate"):
        OptimizerConfig(learning_rate=rate)
