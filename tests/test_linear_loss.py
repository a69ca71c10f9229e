"""The loss that training uses, which never has all logits at once, against the one that has."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

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
    *floats, labels = arguments

    @partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def function(*floats):
        total, count = loss(*floats, labels, *settings)
        # The factor stands for what a caller does with the loss: the gradient of `_summed` is made before it is known.
        # A power of two rounds nothing, so that it does not matter whether a compiler rounds before it, too.
        return 4 * total, count

    (total, count), gradients = jax.jit(function)(*floats)
    return int(count), [total, *jax.tree.leaves(gradients)]


def assert_near(ours, theirs, bar):
    for one, other in zip(ours, theirs, strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        assert np.linalg.norm(one - other) <= bar * np.linalg.norm(other)


@pytest.mark.parametrize("at_once", [10**9, 4 * VOCABULARY, 1])
@pytest.mark.parametrize("added, biased, cap", SETTINGS)
def test_equal_in_float64(at_once, added, biased, cap, monkeypatch):
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", at_once)
    arguments = inputs("float64", biased)
    (count, ours), theirs = (loss_and_gradients(loss, arguments, added, cap) for loss in (linear_cross_entropy, plain))
    assert count == theirs[0] < BATCH * LENGTH
    assert_near(ours, theirs[1], 1e-14)
    assert_near([4 * linear_cross_entropy(*arguments, added, cap)[0]], ours[:1], 1e-14)


@pytest.mark.parametrize("added, biased, cap", SETTINGS)
def test_as_good_in_bfloat16(added, biased, cap, monkeypatch):
    """The vocabulary is padded to 128 there, of which nothing may be seen; and parts are added in float32."""
    arguments = inputs("bfloat16", biased)
    exact = [a if a is None or a.dtype == int else a.astype(jnp.float64) for a in arguments]
    _, (total, *gradients) = loss_and_gradients(plain, exact, added, cap)
    found = []
    for at_once in (10**9, 1):
        monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", at_once)
        found.append(loss_and_gradients(linear_cross_entropy, arguments, added, cap)[1])
        assert {gradient.dtype.name for gradient in found[-1][1:]} == {"bfloat16"}
        assert_near(found[-1][:1], [total], 1e-5)
        assert_near(found[-1][1:], gradients, 2**-7)
    # Loss and gradients of table and bias are rounded once, so that it hardly matters how many parts there are.
    whole, parts = found
    assert_near(parts[:1], whole[:1], 1e-6)
    assert_near(parts[2:], whole[2:], 2**-11)


@pytest.mark.parametrize("at_once, cap", [(10**9, None), (4 * VOCABULARY, CAPS[1])])
def test_forward_mode_and_second_derivatives(at_once, cap, monkeypatch):
    """In float64, along a random direction of x, table and bias, and of x alone; and the gradient's own derivative."""
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", at_once)
    *floats, labels = inputs("float64", True)
    along = [jnp.cos(jnp.arange(a.size)).reshape(a.shape) for a in floats]

    def derivatives(loss):
        def function(*floats):
            return 3 * loss(*floats, labels, ADDED, cap)[0]

        gradients = jax.grad(function, argnums=(0, 1, 2))
        yield from jax.tree.leaves([jax.jit(partial(jax.jvp, f))(floats, along) for f in (function, gradients)])
        yield jax.jvp(lambda x: function(x, *floats[1:]), floats[:1], along[:1])[1]

    assert_near(derivatives(linear_cross_entropy), derivatives(plain), 1e-13)


def test_nothing_is_computed_twice(monkeypatch):
    """Loss and gradients are three products of matrices; of the loss alone XLA leaves one."""
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", 4 * VOCABULARY)
    *floats, labels = inputs("float32", True)
    loss = jax.jit(lambda *given: linear_cross_entropy(*given, labels)[0])
    function = jax.value_and_grad(loss, argnums=(0, 1, 2))
    assert str(jax.make_jaxpr(function)(*floats)).count("dot_general[") == 3
    assert loss.lower(*floats).compile().as_text().count(" dot(") == 1


def test_no_array_holds_all_logits(monkeypatch):
    """One row at a time needs less memory, by about the logits of the others."""
    x, table = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 64, 16), (4096, 16)))
    function = jax.grad(lambda x, table, labels: linear_cross_entropy(x, table, None, labels)[0], argnums=(0, 1))
    sizes = []
    for at_once in (10**9, 8 * 4096):
        monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", at_once)
        # Compiled anew, as nothing that is traced tells the two apart.
        compiled = jax.jit(partial(function)).lower(x, table, jnp.zeros((4, 64), jnp.int32)).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[0] - sizes[1] > 0.8 * 4 * 4096 * (256 - 8)


@pytest.mark.parametrize(
    "platform, axis, batch, rows",
    [
        ("gpu", "tensor", 8, 4),
        ("gpu", "data", 8, 32),
        ("gpu", "fsdp", 8, 32),
        ("gpu", "context", 8, 32),
        ("gpu", "data", 4, 4),
        ("gpu", "x", 8, 4),
        ("cpu", "data", 8, 4),
    ],
)
def test_each_device_has_as_many_logits_as_one_alone(platform, axis, batch, rows, monkeypatch):
    """Where eight devices share the rows, each with its memory, a part has eight times as many of them."""
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", 4 * VOCABULARY)
    monkeypatch.setattr(linear_loss, "MORE_AT_ONCE", {})
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with jax.sharding.use_abstract_mesh(mesh_of_eight(axis)):
        assert batch * 16 / linear_loss._count_parts(jnp.zeros((batch, 16, WIDTH)), VOCABULARY) == rows


@pytest.mark.parametrize("axis, gathered", [("data", 0), ("fsdp", 2)])
def test_the_table_and_its_gradient_are_exchanged_once(axis, gathered):
    """With FSDP: before the loop over the parts and after it, and not in each of its iterations."""
    *floats, labels = inputs("float32", False)
    with jax.sharding.use_abstract_mesh(mesh_of_eight(axis)):
        program = jax.make_jaxpr(jax.grad(lambda *given: linear_cross_entropy(*given, None, labels)[0]))(*floats[:2])
    assert str(program).count("sharding_constraint[") == gathered


def mesh_of_eight(axis):
    sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | {axis: 8}
    if axis == "x":
        sizes = {"x": 8}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
