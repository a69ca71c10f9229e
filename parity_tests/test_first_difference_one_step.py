"""`first_difference` where one step of a side is another, and the two compute in other ways: what is tried out."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from parity import first_difference
from parity_tests.small_modules import Module, numbers

pytestmark = pytest.mark.usefixtures("as_others_write")

POINTS = numbers(2, 9, 3, seed=3)


def widened(self, x):
    """A transposed convolution with weight normalisation, as vocoders have it."""
    return torch.sin(self.out(x.mT).mT)


def widened_by_zeros(p, x, fault):
    kernel = p["size"] * p["direction"] / jnp.sqrt(jnp.sum(jnp.square(p["direction"]), axis=(1, 2), keepdims=True))
    kernel = (kernel if fault else jnp.flip(kernel, -1)).transpose(2, 0, 1)
    numbers = ("NWC", "WIO", "NWC")
    wide = jax.lax.conv_general_dilated(x, kernel, (1,), [(3, 3)], lhs_dilation=(2,), dimension_numbers=numbers)
    return jnp.sin(wide + p["bias"])


def waves(self, x):
    """Sines and cosines of each number, as a field of rays has them (NeRF)."""
    found = [x]
    for n in range(3):
        found += [torch.sin(x * 2**n), torch.cos(x * 2**n)]
    return self.out(torch.cat(found, -1))


def waves_at_once(p, x, fault):
    angles = x[..., None, :] * (2.0 ** jnp.arange(3))[:, None]
    both = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-3 if fault else -2)
    return jnp.concatenate([x, both.reshape(*x.shape[:-1], -1)], axis=-1) @ p["kernel"]


def decayed(self, x, below=0):
    """A sum over what was before, each number of which has decayed, in one product (the dual form of Mamba-2)."""
    total = torch.cumsum(-x[..., 0].abs(), -1)
    between = total[:, :, None] - total[:, None, :]
    seen = torch.tril(torch.ones(9, 9, dtype=torch.bool), diagonal=below)
    return self.out(between.masked_fill(~seen, -torch.inf).exp() @ x)


decayed_less = partial(decayed, below=-1)


def decayed_step_by_step(p, x, fault):
    def step(state, given):
        state = jnp.exp(-jnp.abs(given[:, :1])) * state + given
        return state, state

    _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return states.swapaxes(0, 1) @ p["kernel"]


OF = {"kernel": ("out.weight", "o i -> i o")}
NORMED = {"size": "out.parametrizations.weight.original0", "direction": "out.parametrizations.weight.original1"}


def linear(width):
    return lambda: nn.Linear(width, 4, bias=False)


def transposed():
    return weight_norm(nn.ConvTranspose1d(3, 5, 4, stride=2))


@pytest.mark.parametrize(
    "ours, theirs, layer, weights, verdict, lines, said",
    [
        (
            waves_at_once,
            waves,
            linear(21),
            OF,
            "likely",
            ("both.reshape", ""),
            "with axes 2 and 3 exchanged before, ours goes on",
        ),
        (
            decayed_step_by_step,
            decayed_less,
            linear(3),
            OF,
            "likely",
            ("scan", "torch.tril"),
            "theirs has -1 here; with 0, theirs goes on",
        ),
        (
            widened_by_zeros,
            widened,
            transposed,
            NORMED | {"bias": "out.bias"},
            "not sure",
            ("transpose", ""),
            "with the result reversed along axis 0, ours goes on",
        ),
    ],
    ids=["axes before they are merged", "a mask and a loop", "a kernel"],
)
def test_one_step_that_would_mend_all_is_found(ours, theirs, layer, weights, verdict, lines, said):
    assert not first_difference(
        partial(ours, fault=False),
        Module(theirs if theirs is not decayed_less else decayed, out=layer),
        weights,
        [POINTS],
    )
    found = first_difference(partial(ours, fault=True), Module(theirs, out=layer), weights, [POINTS])
    assert found.tried
    assert found.verdict.startswith(f"{verdict}: with one step done otherwise ")
    assert all(line in site.source for line, site in zip(lines, (found.ours, found.theirs), strict=True))
    assert said in found.kind


def test_two_steps_are_not_taken_for_one():
    found = first_difference(
        lambda p, x: jnp.square(decayed_step_by_step(p, x, False)) * jnp.abs(p["kernel"]).max(),
        Module(decayed_less, out=linear(3)),
        OF,
        [POINTS],
    )
    assert found
    assert not found.tried
