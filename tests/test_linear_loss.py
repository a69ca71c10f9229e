"""The loss that training uses, which never has all logits at once, against the one that has."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config import IGNORED
from jax_tformer.config.experiment import LossConfig
from jax_tformer.training import linear_loss
from jax_tformer.training.linear_loss import linear_cross_entropy
from twin.reference_loss import cross_entropy

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 7, 8, 37
PLAIN, ADDED = LossConfig(), LossConfig(0.1, z_loss=0.03)
CAPS = (None, (2.0, "tanh"), (2.0, "root"))
SETTINGS = [(*each, cap) for each in product((PLAIN, ADDED), (False, True)) for cap in CAPS]
"""What is added, whether there is a bias, and the cap: many logits are beyond it."""


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def inputs(dtype, biased):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((BATCH, LENGTH, WIDTH)), dtype)
    table = jnp.asarray(rng.standard_normal((VOCABULARY, WIDTH)), dtype)
    bias = jnp.asarray(rng.standard_normal(VOCABULARY), dtype) if biased else None
    labels = rng.integers(0, VOCABULARY, (BATCH, LENGTH))
    labels[rng.random(labels.shape) < 0.2] = IGNORED
    return x, table, bias, jnp.asarray(labels)


def plain(x, table, bias, labels, added, cap):
    """All logits at once, and JAX's own gradient."""
    high = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=high)
    logits = logits if bias is None else logits + bias.astype(high)[None, None]
    if cap is not None:
        size, form = cap
        logits = size * jnp.tanh(logits / size) if form == "tanh" else logits / jnp.sqrt(1 + (logits / size) ** 2)
    return cross_entropy(logits, labels, added)


def loss_and_gradients(loss, arguments, *settings):
    x, table, bias, labels = arguments
    # The factor stands for what a caller does with the loss: the gradient of `_summed` is made before it is known.
    function = lambda x, table, bias: (lambda total, count: (3 * total, count))(  # noqa: E731
        *loss(x, table, bias, labels, *settings)
    )
    (total, count), gradients = jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True))(x, table, bias)
    return total, count, jax.tree.leaves(gradients)


@pytest.mark.parametrize("at_once", [10**9, 4 * VOCABULARY, 1], ids=["at once", "4 rows", "1 row"])
@pytest.mark.parametrize(("added", "biased", "cap"), SETTINGS)
def test_equal_in_float64(at_once, added, biased, cap, monkeypatch):
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", at_once)
    arguments = inputs("float64", biased)
    ours, theirs = (loss_and_gradients(loss, arguments, added, cap) for loss in (linear_cross_entropy, plain))
    assert int(ours[1]) == int(theirs[1]) < BATCH * LENGTH
    for one, other in zip([ours[0], *ours[2]], [theirs[0], *theirs[2]], strict=True):
        assert np.linalg.norm(one - other) <= 1e-14 * np.linalg.norm(other)
    # Without a gradient it is another function that computes.
    x, table, bias, labels = arguments
    alone = linear_cross_entropy(x, table, bias, labels, added, cap)[0]
    np.testing.assert_allclose(3 * alone, ours[0], rtol=1e-14)


@pytest.mark.parametrize(("added", "biased", "cap"), SETTINGS)
def test_as_good_in_bfloat16(added, biased, cap):
    """The vocabulary is padded to 128 there; of the padding nothing may be seen."""
    arguments = inputs("bfloat16", biased)
    x, table, bias, labels = arguments
    exact = (*(None if a is None else a.astype(jnp.float64) for a in (x, table, bias)), labels)
    truth = loss_and_gradients(plain, exact, added, cap)
    ours = loss_and_gradients(linear_cross_entropy, arguments, added, cap)
    np.testing.assert_allclose(ours[0], truth[0], rtol=1e-5)
    for one, other in zip(ours[2], truth[2], strict=True):
        assert one.dtype == jnp.bfloat16
        assert np.linalg.norm(one.astype(np.float64) - other) <= 2**-7 * np.linalg.norm(other)


def test_parts_of_bfloat16_are_added_in_float32(monkeypatch):
    """Loss and gradients of table and bias are rounded once, so that it hardly matters how many parts there are."""
    arguments, found = inputs("bfloat16", True), []
    for at_once in (10**9, 1):
        monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", at_once)
        loss, _, (_, *by_weights) = loss_and_gradients(linear_cross_entropy, arguments, ADDED, CAPS[1])
        found.append([np.asarray(x, np.float64) for x in (loss, *by_weights)])
    for whole, parts, bar in zip(*found, (1e-6, 2**-11, 2**-11), strict=True):
        assert np.linalg.norm(whole - parts) <= bar * np.linalg.norm(whole)


@pytest.mark.parametrize(
    ("at_once", "cap"), [(10**9, None), (4 * VOCABULARY, CAPS[1])], ids=["at once", "4 rows, capped"]
)
def test_forward_mode_and_second_derivatives(at_once, cap, monkeypatch):
    """In float64, along a random direction of x, table and bias: first order, and the gradient's own derivative."""
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", at_once)
    x, table, bias, labels = inputs("float64", True)
    assert bias is not None
    along = tuple(jnp.cos(jnp.arange(a.size)).reshape(a.shape) for a in (x, table, bias))

    def derivatives(loss):
        def function(x, table, bias):
            return 3 * loss(x, table, bias, labels, ADDED, cap)[0]

        gradients = jax.grad(function, argnums=(0, 1, 2))
        first, second = (jax.jit(partial(jax.jvp, f))((x, table, bias), along) for f in (function, gradients))
        return jax.tree.leaves((first, second))

    for one, other in zip(derivatives(linear_cross_entropy), derivatives(plain), strict=True):
        assert np.linalg.norm(one - other) <= 1e-13 * np.linalg.norm(other)


def test_a_table_that_does_not_move_takes_no_part():
    x, table, _, labels = inputs("float64", False)
    moved = jax.jvp(lambda x: linear_cross_entropy(x, table, None, labels)[0], (x,), (jnp.ones_like(x),))[1]
    gradient = jax.grad(lambda x: linear_cross_entropy(x, table, None, labels)[0])(x)
    np.testing.assert_allclose(moved, gradient.sum(), rtol=1e-12)


def test_nothing_is_computed_twice(monkeypatch):
    """Loss and gradients are three products of matrices."""
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", 4 * VOCABULARY)
    x, table, bias, labels = inputs("float32", True)
    function = jax.value_and_grad(lambda *given: linear_cross_entropy(*given, labels)[0], argnums=(0, 1, 2))
    program = jax.make_jaxpr(function)(x, table, bias)
    assert str(program).count("dot_general[") == 3


def test_no_array_holds_all_logits(monkeypatch):
    """One row at a time needs less memory, by about the logits of the others."""
    x = jax.ShapeDtypeStruct((4, 64, 16), jnp.float32)
    table, labels = jax.ShapeDtypeStruct((4096, 16), jnp.float32), jax.ShapeDtypeStruct((4, 64), jnp.int32)
    sizes = []
    for at_once in (10**9, 8 * 4096):
        monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", at_once)
        function = jax.grad(lambda x, table, labels: linear_cross_entropy(x, table, None, labels)[0], argnums=(0, 1))
        compiled = jax.jit(function).lower(x, table, labels).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[0] - sizes[1] > 0.8 * 4 * 4096 * (256 - 8)
