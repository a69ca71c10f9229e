"""One training step: averages, norms of accumulated gradients, ignored labels, memory options and precision."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jax_tformer import transformer
from jax_tformer.config import IGNORED
from jax_tformer.config.experiment import OptimizerConfig
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import average_of, forward, init_state, train_step
from tests import small_models
from tests.small_models import assert_same_bits
from twin.reference_loss import mean_cross_entropy

STACK = replace(small_models.STACK, num_layers=3)
CONFIG = replace(small_models.GPT, decoder=STACK)
TX = optimizer(OptimizerConfig(warmup_steps=0, schedule="constant"), 10)


TOKENS, LABELS = jnp.asarray(np.random.default_rng(0).integers(0, 23, (2, 4, 9)), jnp.int32)
# Rows with different numbers of counting labels, so that means of means show.
BATCH = {"tokens": TOKENS, "labels": LABELS.at[0, 2:].set(IGNORED)}


@pytest.mark.parametrize("decay", [0.5, 0.999999])
def test_the_average_is_that_of_the_weights_after_each_step(decay):
    """In float64, and for a decay near 1 the plain mean but for that."""
    with jax.enable_x64(True):
        net = transformer(CONFIG.with_dtype("float64"))
        state, step = init_state(net, TX, jax.random.key(0), averages=True), jax.jit(train_step(net, TX, average=decay))
        seen = []
        for _ in range(6):
            state, _ = step(state, BATCH)
            seen.append(jax.device_get(state.params))
        weights = decay ** np.arange(6)[::-1]
        for average, *each in zip(*map(jax.tree.leaves, (average_of(state), *seen)), strict=True):
            assert np.abs(average - np.average(each, axis=0, weights=weights)).max() < 1e-12
        broken = jax.tree.map(lambda p: p.at[0].set(jnp.inf), state.params["embedding"])
        after, _ = step(state._replace(params={**state.params, "embedding": broken}), BATCH)
        assert not after.finite
        assert_same_bits(after.average["decoder"], state.average["decoder"])


def test_norms_of_each_layer_and_the_noise_scale():
    """Against NumPy in float64: the gradients of each part by themselves, and Adam's first update."""
    with jax.enable_x64(True):
        net = transformer(CONFIG.with_dtype("float64"))
        state = init_state(net, TX, jax.random.key(0))
        after, metrics = jax.jit(train_step(net, TX, accumulation=2, norms=True, noise=True))(state, BATCH)

        @jax.jit
        @jax.grad
        def gradients(params, batch):
            return mean_cross_entropy(forward(net, params, batch).logits, batch["labels"])

        parts = [{name: x[rows] for name, x in BATCH.items()} for rows in (slice(2), slice(2, 4), slice(4))]
        first, second, whole = (jax.device_get(gradients(state.params, part)) for part in parts)
        update = jax.device_get(jax.tree.map(jnp.subtract, after.params, state.params))

    def squares(tree, layer=...):
        """The sum of all, or of one of the stacked layers."""
        return sum(np.square(x[layer]).sum() for x in jax.tree.leaves(tree))

    for name, tree in {"gradient_norm": whole, "update_norm": update}.items():
        layers = [squares(tree["decoder"]["blocks"], layer) ** 0.5 for layer in range(3)]
        assert_allclose(metrics.norms[f"{name}/decoder.blocks"], layers, rtol=1e-12)
        all_together = [x for key, x in metrics.norms.items() if key.startswith(name)]
        assert_allclose(squares(all_together), squares(tree), rtol=1e-12)
    # |G|^2 and the variance, of batches of 2 and 4 rows.
    small, large = (squares(first) + squares(second)) / 2, squares(whole)
    expected = (4 * large - 2 * small) / (4 - 2), (small - large) / (1 / 2 - 1 / 4)
    assert_allclose(metrics.noise, expected, rtol=1e-12)


def test_parameters_kept_in_bfloat16_are_widened_before_anything_is_computed():
    """To the bit what the same numbers give that are kept in float32; 1 + scale, say, would be rounded in bfloat16."""
    stack = replace(STACK, norm_unit_offset=True, norm_bias=True, positions="relative")
    config = replace(CONFIG, decoder=stack, head_bias=True, tied_head=False)
    narrow = transformer(config.with_compute(parameter_dtype="bfloat16"))
    params = jax.tree.map(
        lambda x: jnp.sin(jnp.arange(1.0, x.size + 1)).reshape(x.shape).astype(x.dtype), narrow.shapes
    )
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    found, expected = (
        net.apply(each, BATCH["tokens"]) for net, each in ((narrow, params), (transformer(config), wide))
    )
    assert_array_equal(found, expected)


def test_float64_needs_x64():
    with pytest.raises(ValueError, match="jax_enable_x64"):
        transformer(CONFIG.with_dtype("float64"))
