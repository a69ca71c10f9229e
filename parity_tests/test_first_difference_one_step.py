"""`first_difference` where one step of a side is another, and the two compute in other ways: what is tried out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
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


def decayed_step_by_step(p, x):
    def step(state, given):
        state = jnp.exp(-jnp.abs(given[:, :1])) * state + given
        return state, state

    _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return states.swapaxes(0, 1) @ p["kernel"]


def attended(self, x):
    """Keys and values of one projection, head by head (AlphaFold)."""
    key, value = self.out(x).unflatten(-1, (2, 4)).transpose(1, 2).chunk(2, -1)
    query, key = x[..., :2].unsqueeze(1), key / (key * key).sum(-1, keepdim=True).sqrt()
    return ((query @ key.mT).softmax(-1) @ torch.sin(value)).transpose(1, 2).flatten(2)


def attended_by_sums(p, x, fault):
    both = (x @ p["kernel"]).reshape(*x.shape[:2], 2, 4)
    key, value = jnp.split(both, 2, axis=-1)[:: -1 if fault else 1]
    scores = jnp.einsum("bqc,bkhc->bqkh", x[..., :2], key) / jnp.linalg.norm(key, axis=-1)[:, None]
    mixed = jnp.einsum("bqkh,bkhc->bqhc", jax.nn.softmax(scores, axis=2), jnp.sin(value))
    return mixed.reshape(*x.shape[:2], 4)


def scaled(self, x):
    """A step of an optimizer, with its moments corrected behind the root (Adan)."""
    first, second = 0.1 * self.out(x), 0.001 * self.out(x).square()
    return (first / 0.19) / ((second.sqrt() / 0.04) + 1e-3)


def scaled_at_once(p, x, fault):
    slope = x @ p["kernel"]
    second = jnp.square(slope) / 1.6
    return 0.1 / 0.19 * slope / (jnp.sqrt(second + 1e-3) if fault else jnp.sqrt(second) + 1e-3)


def linear(width, out):
    return lambda: nn.Linear(width, out, bias=False)


def transposed():
    return weight_norm(nn.ConvTranspose1d(3, 5, 4, stride=2))


OF = {"kernel": ("out.weight", "o i -> i o")}
NORMED = {
    "size": "out.parametrizations.weight.original0",
    "direction": "out.parametrizations.weight.original1",
    "bias": "out.bias",
}
GOES_ON = "ours goes on as theirs does"
CASES = {
    "axes before they are merged": (
        (waves_at_once, waves, linear(21, 4), OF),
        "both.reshape",
        f"ours has [2, 9, 2, 3, 3] as [2, 9, 18] here; with axes 2 and 3 exchanged before, {GOES_ON}",
    ),
    "a kernel": (
        (widened_by_zeros, widened, transposed, NORMED),
        ".transpose(2, 0, 1)",
        f"ours applies transpose here; with the result reversed along axis 0, {GOES_ON}",
    ),
    "two parts": (
        (attended_by_sums, attended, linear(3, 8), OF),
        "jnp.split",
        f"here; with the two exchanged, {GOES_ON}",
    ),
    "two steps": (
        (scaled_at_once, scaled, linear(3, 4), OF),
        "jnp.sqrt",
        f"ours applies sqrt after add; with the two in the other order, {GOES_ON}",
    ),
}


@pytest.mark.parametrize("pair, line, said", CASES.values(), ids=CASES)
def test_one_step_of_ours_that_would_mend_all_is_found(pair, line, said):
    ours, theirs, layer, weights = pair
    right, wrong = (
        first_difference(partial(ours, fault=fault), Module(theirs, out=layer), weights, [POINTS])
        for fault in (False, True)
    )
    assert not right
    assert wrong.tried
    assert wrong.verdict == "not sure: with one step done otherwise here, all agrees; so may it with another"
    assert line in wrong.ours.source
    assert said in wrong.kind


@pytest.mark.parametrize("below, factor", [(0, 1.0), (-1, 1.0), (-1, 1.3)])
def test_a_step_of_theirs_is_found_and_two_steps_are_not_taken_for_one(below, factor):
    module = Module(partial(decayed, below=below), out=linear(3, 4))
    found = first_difference(
        lambda p, x: decayed_step_by_step(p, x + (factor - 1) * jnp.square(x)), module, OF, [POINTS]
    )
    assert bool(found) == (below < 0)
    if found:
        assert found.tried == (factor == 1)
        assert ("theirs has -1 here; with 0, theirs goes on as ours does" in (found.kind or "")) == found.tried
        assert ("torch.tril" in found.theirs.source) == found.tried


def test_of_several_lines_none_is_sure():
    """Where a mask is its opposite, so may be what is chosen by it."""

    def forward(self, x):
        states = [torch.tanh(self.out(row[:n])).sum(0) for row, n in zip(x, (5, 8), strict=True)]
        return torch.stack(states)

    def ours(p, x):
        hidden = jnp.arange(9) < jnp.array([[5], [8]])
        state = jnp.tanh(x @ p["kernel"])
        return jnp.where(hidden[..., None], 0.0, state).sum(1)

    found = first_difference(ours, Module(forward, out=linear(3, 4)), OF, [POINTS])
    assert found.tried
    assert not found.sure
    assert "hidden = " in found.ours.source
    [other] = (site for site in found.others if "jnp.where(" in site.source)
    assert f"  or:      {other}" in str(found)


def test_what_is_computed_of_masked_numbers_is_no_mask():
    """A loss of routers, of rows that hold -1e9 where they are padded: ours leaves a square out."""
    mask = np.arange(9) < np.array([[5], [8]])

    def ours(p, x, fault):
        z = jax.nn.logsumexp(jnp.where(mask[..., None], x @ p["kernel"], -1e9), axis=-1)
        return jnp.sum((z if fault else z**2) * mask)

    def forward(self, x):
        seen = torch.tensor(mask)
        z = self.out(x).masked_fill(~seen[..., None], -1e9).logsumexp(-1)
        return (z.square() * seen).sum()

    right, wrong = (
        first_difference(partial(ours, fault=fault), Module(forward, out=linear(3, 4)), OF, [POINTS])
        for fault in (False, True)
    )
    assert not right
    assert wrong.kind == "theirs applies pow here; without that, theirs goes on as ours does"


def test_a_gradient_that_is_cut_before_a_result_without_one_is_named_where_it_is_cut():
    """As in a loss of values (IQL): theirs detaches them once more, and rightly in another line."""

    def ours(p, x):
        gap = jnp.cos(x).sum(-1) - (x @ p["kernel"]).sum(-1)
        weight = jax.lax.stop_gradient(jnp.exp(0.3 * gap))
        return {
            "value": (jnp.where(gap > 0, 0.7, 0.3) * gap**2).mean(),
            "policy": (weight * x[..., 0]).mean(),
            "gap": gap.mean(),
        }

    def forward(self, x):
        value, target = self.out(x).sum(-1), x.cos().sum(-1)
        gap, cut = target - value, target - value.detach()
        loss = (torch.where(cut > 0, 0.7, 0.3) * cut**2).mean()
        weight = torch.exp(0.3 * gap.detach())
        return {"value": loss, "policy": (weight * x[..., 0]).mean(), "gap": gap.mean()}

    found = first_difference(ours, Module(forward, out=linear(3, 4)), OF, [POINTS])
    assert found.stage == "backward"
    assert "value.detach()" in found.theirs.source
    assert found.kind == "ours hands a gradient back here, theirs does not: it is detached"


@pytest.mark.parametrize("order", [(0, 1, 3, 2, 4, 5), (0, 1, 3, 4, 2, 5)])
def test_a_weight_is_not_in_another_order_for_sure_where_ours_moves_what_it_multiplies(order):
    """Patches of images, whose height and width are exchanged."""
    images = numbers(2, 3, 6, 6, seed=5)

    def ours(p, x):
        cut = x.transpose(0, 2, 3, 1).reshape(2, 2, 3, 2, 3, 3)
        return cut.transpose(order).reshape(2, 4, 27) @ p["kernel"]

    module = Module(lambda self, x: self.out(x).flatten(2).mT, out=lambda: nn.Conv2d(3, 5, 3, stride=3, bias=False))
    found = first_difference(ours, module, {"kernel": ("out.weight", "o i h w -> (h w i) o")}, [images])
    assert bool(found) == (order[3] == 4)
    if found:
        assert not found.sure
        assert any(".transpose(order)" in site.source for site in (found.ours, *found.others))


def test_the_reader_of_one_of_two_parts_is_named_and_not_the_line_that_takes_both():
    """Edges of a graph, whose ends each step takes anew: theirs sums by the other end."""
    edges = np.array([[0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 4, 0]])

    def ours(p, x, edges):
        left, right = edges[0], edges[1]
        message = jnp.tanh((x[left] - x[right]) @ p["kernel"])
        total, many = (jax.ops.segment_sum(each, left, 5) for each in (message, jnp.ones_like(message)))
        return total / jnp.maximum(many, 1)

    def gaps(self, x, edges):
        left, right = edges
        return torch.tanh(self.out(x[left] - x[right]))

    def forward(self, x, edges):
        message = gaps(self, x, edges)
        _, right = edges
        total = torch.zeros(5, 4, dtype=x.dtype).index_add(0, right, message)
        return total / torch.zeros_like(total).index_add(0, right, torch.ones_like(message)).clamp(min=1)

    module = Module(forward, out=linear(3, 4))
    found = first_difference(ours, module, OF, [numbers(5, 3, seed=2), edges])
    assert "index_add" in found.theirs.source
    assert "segment_sum" in found.ours.source
