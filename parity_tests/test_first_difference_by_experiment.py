"""`first_difference` says what one side does and the other does not, where running on without it shows so."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import first_difference

pytestmark = pytest.mark.usefixtures("as_others_write")
NUMBERS = np.random.default_rng(3).standard_normal((6, 6))
WEIGHTS = {"up": "up.weight", "down": "down.weight", "scale": "norm.weight", "bias": "norm.bias"}


class Module(nn.Module):
    """Two products with something between them."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.between = between

    def forward(self, x):
        h = self.up(x)
        h = self.between(self, x, h)
        return torch.tanh(self.down(h)) + x


def ours(between, p, x):
    h = x @ p["up"].T
    h = between(p, x, h)
    return jnp.tanh(h @ p["down"].T) + x


def normalise(p, h, eps=1e-5):
    centred = h - h.mean(-1, keepdims=True)
    return centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def same(_, x, h):
    return h


def with_branch(m, x, h):
    """A branch, longer than what is tried step by step, on what follows too: a product with the norm's weight."""
    branch = h * m.norm.weight
    for _ in range(10):
        branch = torch.tanh(branch * 1.1 + 0.1)
    return (h + branch) * m.norm.weight


CASES = {
    "an activation more": (lambda p, x, h: jnp.exp(h), same, "ours applies exp here, theirs goes on as without it"),
    "an activation less": (same, lambda m, x, h: F.softplus(h), "theirs applies softplus here, ours goes on as"),
    "a norm less": (same, lambda m, x, h: m.norm(h), "theirs computes `h = self.between(self, x, h)` here"),
    "a norm more": (lambda p, x, h: normalise(p, h), same, "ours computes `centred = h - h.mean(-1, keepdims=True)`"),
    "a residual of another value": (
        lambda p, x, h: jnp.tanh(h) + x,
        lambda m, x, h: torch.tanh(h) + h,
        "ours reads input x where theirs reads `h = self.up(x)`",
    ),
    "softmax over the other axis": (
        lambda p, x, h: jax.nn.softmax(h, axis=0),
        lambda m, x, h: F.softmax(h, dim=-1),
        "axes 0 and 1 of `h = x @ p[\"up\"].T`",
    ),
    "a branch less, its residual kept": (
        lambda p, x, h: h * p["scale"],
        with_branch,
        "theirs adds `branch = torch.tanh(branch * 1.1 + 0.1)`",
    ),
    "the other sign": (
        lambda p, x, h: jnp.exp(x - h) * h,
        lambda m, x, h: torch.exp(h - x) * h,
        "the other sign",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_one_side_does_alone_is_said(name):
    mine, their, said = CASES[name]
    found = first_difference(partial(ours, mine), Module(their), WEIGHTS, {"x": NUMBERS}, backward=False)
    assert found
    assert found.kind is not None
    assert said in found.kind, str(found)
    assert found.sure


def test_what_agrees_for_one_step_alone_shows_nothing():
    """Without its root ours has the variance with eps, as theirs has it before the root; then they part again."""

    def outside(p, x, h):
        centred = h - h.mean(-1, keepdims=True)
        return centred / (jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True)) + 1e-5) * p["scale"] + p["bias"]

    found = first_difference(
        partial(ours, outside), Module(lambda m, x, h: m.norm(h)), WEIGHTS, [NUMBERS], backward=False
    )
    assert found
    assert "without it" not in (found.kind or ""), str(found)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_right_ports_stay_the_same(scale):
    module = Module(lambda m, x, h: m.norm(h))
    assert not first_difference(partial(ours, lambda p, x, h: normalise(p, h)), module, WEIGHTS, [scale * NUMBERS])


@pytest.mark.parametrize(("length", "told"), [(12, True), (500, False)])
def test_a_batch_too_short_for_angles_is_said(length, told):
    def ours(p, x):
        angles = jnp.arange(x.shape[0])[:, None] / 100.0 ** (jnp.arange(6) / 6)
        return x @ p["up"].T * jnp.cos(angles)

    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(6, 6, bias=False)

        def forward(self, x):
            return self.up(x) * torch.cos(torch.arange(len(x))[:, None] / 100.0 ** (torch.arange(6) / 6))

    x = np.random.default_rng(0).standard_normal((length, 6))
    found = first_difference(ours, Rotated(), {"up": "up.weight"}, [x])
    assert not found, str(found)
    assert ("positions: 12, and angles part further on: give 500 or more" in str(found)) == told
