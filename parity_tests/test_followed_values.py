"""What `first_difference` follows: loops, branches, inner programs, operations in place, views."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec
from torch import nn

from parity import check_parity, first_difference
from parity.differ.jax_values import values_of_jax
from parity.differ.torch_values import values_of_torch
from parity.islands import Float64
from parity_tests.small_modules import Module, numbers

pytestmark = pytest.mark.usefixtures("as_others_write")
X = numbers(3, 8)
WEIGHTS = {"kernel": ("linear.weight", "o i -> i o"), "bias": "linear.bias"}


def repeated(self, x):
    """Three times a linear layer and tanh, with operations in place and a view that is written to."""
    x = x.clone()
    for _ in range(3):
        x = self.linear(x).tanh()
        x = x.clone()
        x.mul_(1.5)
        x[:, 0] = x[:, 0] + 1
    return x


def module(forward=repeated):
    return Module(forward, linear=lambda: nn.Linear(8, 8))


def step(p, x, factor=1.5):
    x = jnp.tanh(x @ p["kernel"] + p["bias"])
    x = x * factor
    return x.at[:, 0].add(1)


def by_while(p, x, factor):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(p, c[1], factor)), (0, x))[1]


def by_fori(p, x, factor):
    return jax.lax.fori_loop(0, 3, lambda _, x: step(p, x, factor), x)


def by_scan(p, x, factor):
    return jax.lax.scan(lambda x, _: (step(p, x, factor), None), x, length=3)[0]


def by_cond(p, x, factor):
    for n in range(3):
        x = jax.lax.cond(n < 3, lambda x: step(p, x, factor), lambda x: x, x)
    return x


def by_remat(p, x, factor):
    for _ in range(3):
        x = jax.checkpoint(partial(step, factor=factor))(p, x)
    return x


def by_custom_derivative(p, x, factor):
    @jax.custom_vjp
    def stepped(p, x):
        return step(p, x, factor)

    stepped.defvjp(lambda p, x: jax.vjp(partial(step, factor=factor), p, x), lambda back, g: back(g))
    for _ in range(3):
        x = stepped(p, x)
    return x


def asked(ours, theirs=None, **options):
    return first_difference(ours, module() if theirs is None else theirs, WEIGHTS, [X], **options)


@pytest.mark.parametrize("ours", [by_while, by_fori, by_scan, by_cond, by_remat, by_custom_derivative])
def test_inner_programs_are_followed(ours):
    backward = ours is not by_while  # JAX has no reverse derivative of it
    assert not asked(partial(ours, factor=1.5), backward=backward)
    found = asked(partial(ours, factor=1.4), backward=backward)
    assert found.stage == "forward"
    assert found.ours.source == "x = x * factor"
    assert found.theirs.source == "x.mul_(1.5)"
    assert found.kind == "ours is 0.933333333 times theirs"
    assert found.sure
    assert not found.opaque


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: jnp.prod(x, -1),
        lambda x: jnp.cumprod(x, 0),
        lambda x: jax.lax.cummax(x, 1),
        lambda x: jnp.sort(x, 0)[::-1],
        lambda x: jnp.where(x > 0, x, jnp.roll(x, 1, 0)) ** 3,
        lambda x: jax.lax.reshape(x, (8, 3), (1, 0)),
        lambda x: jnp.pad(x, ((1, 0), (0, 2)))[::2, 1::3],
        lambda x: jnp.einsum("ab,cb->bac", x, x),
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (1, 2), "VALID"),
        lambda x: jax.lax.conv_general_dilated(
            x[None], jnp.tile(x[:, None, :4], (2, 1, 1)), (1,), "SAME", feature_group_count=3
        ),
        lambda x: x.at[jnp.array([0, 2]), 1].add(x[1, 3]),
    ],
)
def test_what_is_followed_is_what_jax_computes(operation):
    def run(x):
        made, back = jax.vjp(operation, x)
        return {"made": made, "gradient": back(jnp.cos(made))[0]}

    with jax.enable_x64(True):
        followed = values_of_jax(run, lambda: [jnp.asarray(X)], [("input", "x")])
        for name, array in run(jnp.asarray(X)).items():
            np.testing.assert_allclose(followed.output(name), array, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    "product, stopped",
    [(lambda x: jnp.linalg.solve(x, x[:, :2]), 0), (jax.jit(lambda x: x * jax.lax.stop_gradient(x)), 1)],
)
def test_a_gradient_that_a_library_stops_is_stopped_by_nobody(product, stopped):
    """What solves equations stops the gradient of the order of their rows."""

    def run(x):
        made, back = jax.vjp(product, x @ x.T + 9 * jnp.eye(len(x)))
        return {"gradient": back(made)[0]}

    with jax.enable_x64(True):
        followed = values_of_jax(run, lambda: [jnp.asarray(X)], [("input", "x")])
    assert sum(row.operation == "stop_gradient" for row in followed.rows) == stopped


def test_what_is_written_through_a_view_is_seen():
    def without(p, x):
        for _ in range(3):
            x = jnp.tanh(x @ p["kernel"] + p["bias"]) * 1.5
        return x

    found = asked(without)
    assert found.theirs.source == "x[:, 0] = x[:, 0] + 1"


def test_what_is_fresh_is_made_of_nothing():
    """It may lie where a value was that nobody holds any more."""

    def run():
        made = torch.zeros(3, 8, dtype=torch.float64)
        for _ in range(20):
            x = made + 1
            del x
            made = torch.tensor(X)
        return {"output": made}

    rows = values_of_torch(nn.Identity(), run, {}).rows
    assert {row.inputs for row in rows if "lift_fresh" in row.operation} == {()}


@pytest.mark.parametrize("within", [True, False], ids=["in the module", "around the search"])
def test_lines_of_the_module_are_named_under_float64(within):
    """Its casts to float32 would be named first, were it not for Float64."""

    def narrow(self, x):
        with Float64() if within else nullcontext():
            return repeated(self, x.float()) + torch.ones(8, dtype=torch.float32)

    def ours(p, x, factor):
        return by_scan(p, x, factor) + 1

    with nullcontext() if within else Float64():
        assert not asked(partial(ours, factor=1.5), module(narrow))
        found = asked(partial(ours, factor=1.4), module(narrow))
    assert (found.theirs.file, found.theirs.source) == (__file__, "x.mul_(1.5)")
    assert found.sure


def test_compiled_modules_are_looked_into():
    assert not asked(partial(by_scan, factor=1.5), torch.compile(module()))


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_program_over_a_mesh_is_one_value_and_named(factor):
    mesh, spec = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data")

    def ours(p, x):
        for _ in range(3):
            x = jax.shard_map(lambda x: step(p, factor * x), mesh=mesh, in_specs=spec, out_specs=spec)(x)
        return x

    found = asked(ours, backward=False)
    assert bool(found) == (factor != 1)
    assert found.opaque == ("shard_map in JAX",)
    assert not found or (found.ours.operation, found.stage, found.sure) == ("shard_map", "forward", False)


def test_the_module_and_float32_stay_as_they_were():
    theirs = module().train()
    before = {name: p.clone() for name, p in theirs.named_parameters()}
    asked(partial(by_scan, factor=1.5), theirs)
    assert theirs.training
    assert all(p.dtype == torch.float32 and torch.equal(p, before[name]) for name, p in theirs.named_parameters())
    assert all(p.grad is None for p in theirs.parameters())


@pytest.mark.parametrize(
    "slope, differs, line",
    [(jax.grad, False, ""), (lambda f: lambda x: 2 * jax.grad(f)(x), True, "slope(energy)(x)")],
)
def test_a_module_that_differentiates_what_it_computes(slope, differs, line):
    """As a penalty of gradients does, and forces that are those of an energy."""

    def ours(p, x):
        def energy(x):
            return jnp.tanh(x @ p["kernel"] + p["bias"]).sum()

        return {"energy": energy(x), "forces": slope(energy)(x)}

    def forces(self, x):
        energy = self.linear(x.requires_grad_()).tanh().sum()
        return {"energy": energy, "forces": torch.autograd.grad(energy, x, create_graph=True)[0]}

    theirs = module(forces)
    theirs.linear.weight.requires_grad_(False)
    found = asked(ours, theirs)
    assert bool(found) == differs
    assert line in (found.ours.source if differs else "")
    assert [p.requires_grad for p in theirs.parameters()] == [False, True]
    if not differs:
        check_parity(ours, theirs, WEIGHTS, [X], gates=["1", "2"])


def test_an_operation_that_checks_no_shapes_is_not_tried_with_others():
    """It would write beyond what it is given."""
    given = [torch.randn(3, 4, 2, 2), torch.randn(3, 1, 1, 1)]
    rows = values_of_torch(nn.Identity(), lambda: {"output": torch._weight_norm(*given, 0)}, {}).rows
    row, _ = (row for row in rows if "weight_norm" in row.operation)
    first, second = (tensor.numpy() for tensor in given)
    assert row.again([first, second]).shape == (3, 4, 2, 2)
    with pytest.raises(ValueError, match="weight_norm"):
        row.again([first.swapaxes(0, 1), second])


def test_a_view_is_made_again_of_numbers_that_lie_in_memory_in_another_way():
    rows = values_of_torch(nn.Identity(), lambda: {"output": torch.arange(6.0).reshape(2, 3).exp().view(6)}, {}).rows
    [view] = (row for row in rows if row.operation == "aten.view" and row.shape == (6,) and row.again)
    given = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(view.again([given]), np.arange(6.0))


def test_memory_that_nothing_was_written_to_is_zero():
    torch.full((5, 1000), 7.0)  # which the allocator may hand out again
    rows = values_of_torch(nn.Identity(), lambda: {"output": torch.empty(5, 1000).fill_(2.0) + 0}, {}).rows
    assert next(row for row in rows if "empty" in row.operation).largest == 0
