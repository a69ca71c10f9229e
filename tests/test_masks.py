"""The softmax that heeds a mask, and its derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_tformer.model.masks import masked_softmax

SHAPE = (2, 3, 4, 5)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def drawn():
    """Scores, and a mask under which one row may attend to nothing."""
    rng = np.random.default_rng(0)
    mask = rng.random((2, 1, 4, 5)) < 0.6
    mask[0, 0, 1] = False
    return jnp.asarray(rng.standard_normal(SHAPE)), jnp.asarray(mask)


def test_derivatives_of_every_order_forward_and_backward():
    scores, mask = drawn()
    for seen in (None, mask):
        check_grads(lambda x, seen=seen: masked_softmax(jnp.asarray(x), seen), (scores,), order=2)


def test_a_row_that_sees_nothing_has_neither_weights_nor_gradients():
    scores, mask = drawn()
    weights, pull = jax.vjp(lambda x: masked_softmax(x, mask), scores)
    (gradient,) = pull(jnp.ones_like(scores).at[0, 0, 0].set(jnp.arange(5.0)))
    assert gradient[0, 0, 0].any()
    for found in (weights, gradient):
        assert not found[0, :, 1].any()
        assert not np.where(mask, 0, found).any()


def test_what_rounding_loses_is_the_same_for_every_key():
    """w * (g - sum(w * g)) subtracts g as it is; the error of the sum is that of every key, and cancels later.

    Differentiated by JAX itself, `jax.nn.softmax` subtracts a g that was divided, and so rounded, at every key: then
    queries and keys lose digits where the numbers g are nearly equal (gate 3).
    """
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.standard_normal((1, 2, 50, 30)), jnp.float32)
    along = jnp.asarray(1.1 + 2**-8 * rng.standard_normal(scores.shape), jnp.float32)
    weights, pull = jax.vjp(lambda x: masked_softmax(x, None), scores)
    (gradient,) = pull(along)
    lost = np.float64(gradient) / np.float64(weights) - np.float64(along)
    assert np.std(lost, axis=-1).max() < 2**-28
