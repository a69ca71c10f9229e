"""`first_difference` where one step of a side is another, and the two compute in other ways: what is tried out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
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


def in_logarithms(self, x):
    """A recurrence of gates and candidates, from sums of logarithms (minGRU)."""
    gate, candidate = self.out(x).chunk(2, -1)
    keep, add = -F.softplus(gate), -F.softplus(-gate) + F.softplus(candidate).log()
    before = torch.cumsum(keep, 1)
    return (before + torch.logcumsumexp(add - before, 1)).exp()


def in_steps(p, x, fault):
    gate, candidate = jnp.split(x @ p["kernel"], 2, axis=-1)[:: -1 if fault else 1]
    state, states = 0.0, []
    for n in range(x.shape[1]):
        z = jax.nn.sigmoid(gate[:, n])
        state = (1 - z) * state + z * jax.nn.softplus(candidate[:, n])
        states.append(state)
    return jnp.stack(states, 1)


def coupled(self, x):
    """Two flows that are not equally wide, each with a shift and a gate (Glow)."""
    for layer in self.out:
        shift, gate = layer(x).chunk(2, -1)
        x = torch.cat([x, (x.sum(-1, keepdim=True) + shift) * torch.sigmoid(gate + 2)], -1)
    return x


def coupled_at_once(p, x, fault):
    for kernel in (p["first"], p["second"]):
        raw = x @ kernel
        half = raw.shape[-1] // 2
        log_gate = jax.nn.log_sigmoid(raw[..., half:] + 2)
        shift = raw[..., half if fault else 0 :][..., :half]
        x = jnp.concatenate([x, (x.sum(-1, keepdims=True) + shift) * jnp.exp(log_gate)], -1)
    return x


def likely_pairs(self, x):
    """A loss of pairs, each alike or not (SigLIP)."""
    y = self.out(x[0])
    return -F.logsigmoid((2 * torch.eye(9) - 1) * (y @ y.T)).sum(-1).mean()


def likely_pairs_in_one(p, x, fault):
    y = x[0] @ p["kernel"]
    losses = jax.nn.softplus((y @ y.T) * jnp.where(jnp.eye(9), -1.0, 1.0))
    return losses.mean() if fault else losses.sum(-1).mean()


def linear(width, out):
    return lambda: nn.Linear(width, out, bias=False)


def transposed():
    return weight_norm(nn.ConvTranspose1d(3, 5, 4, stride=2))


def of_two():
    return nn.ModuleList([nn.Linear(3, 4, bias=False), nn.Linear(5, 6, bias=False)])


OF = {"kernel": ("out.weight", "o i -> i o")}
OF_TWO = {"first": ("out.0.weight", "o i -> i o"), "second": ("out.1.weight", "o i -> i o")}
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
    "a mean of more": (
        (likely_pairs_in_one, likely_pairs, linear(3, 4), OF),
        "losses.mean()",
        f"ours has 81 here; with 9, {GOES_ON}",
    ),
    "two parts, where nothing agrees for long": (
        (in_steps, in_logarithms, linear(3, 8), OF),
        "jnp.split",
        f"here; with the two exchanged, {GOES_ON}",
    ),
    "the same part of arrays of another length": (
        (coupled_at_once, coupled, of_two, OF_TWO),
        "shift = ",
        f"ours takes a part here; with [:, :, 0:2] in its place, {GOES_ON}",
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


@pytest.mark.parametrize("order", [(0, 2, 4, 1, 3, 5), (0, 2, 4, 3, 5, 1)])
def test_patches_that_are_cut_in_another_order_than_a_convolution_does_are_not_said_to_agree(order):
    images = numbers(2, 3, 6, 6, seed=5)

    def ours(p, x):
        return x.reshape(2, 3, 2, 3, 2, 3).transpose(order).reshape(2, 4, 27) @ p["kernel"] + p["bias"]

    module = Module(lambda self, x: self.out(x).flatten(2).mT, out=lambda: nn.Conv2d(3, 5, 3, stride=3))
    weights = {"kernel": ("out.weight", "o i h w -> (i h w) o"), "bias": "out.bias"}
    found = first_difference(ours, module, weights, [images])
    assert bool(found) == (order[3] == 3)
    if found:
        assert found.tried
        assert ".transpose(order)" in found.ours.source
        assert "with axis 5 as axis 3 before" in found.kind


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


class Scaled(torch.autograd.Function):
    """Hands its gradient back as so many times what it is."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.neg() * -ctx.factor, None


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled_back(x, factor):
    return x


scaled_back.defvjp(lambda x, factor: (x, None), lambda factor, _, gradient: (factor * gradient,))


def adversary(self, x, factor=-0.6, reads_it=True):
    """A reversed gradient (domain-adversarial training)."""
    pooled = torch.tanh(self.out(x)).mT.mean(2)
    reversed_there = Scaled.apply(pooled, factor)
    read = reversed_there if reads_it else pooled
    return pooled.sin().sum() + torch.cos(2 * read).sum()


@pytest.mark.parametrize(
    "factor, reads_it, named, said",
    [
        (-0.6, True, "", ""),
        (-1.0, True, "return gradient.neg() * -ctx.factor, None", "theirs multiplies by 0.6"),
        (-0.6, False, "torch.cos(2 * read)", "ours multiplies by -0.6"),
    ],
)
def test_a_step_on_the_way_back_is_named_without_which_all_gradients_agree(factor, reads_it, named, said):
    def ours(p, x):
        pooled = jnp.tanh(x @ p["kernel"]).mean(1)
        return jnp.sin(pooled).sum() + jnp.cos(2 * scaled_back(pooled, factor)).sum()

    found = first_difference(ours, Module(partial(adversary, reads_it=reads_it), out=linear(3, 4)), OF, [POINTS])
    assert bool(found) == bool(named)
    if found:
        assert found.tried
        assert named in found.theirs.source
        assert said in found.kind


def test_what_one_side_stops_is_not_sure_where_the_other_goes_on_otherwise_without_it():
    """The size of a step that is learned, with a smaller gradient (LSQ): theirs ends with another one."""

    def ours(p, x):
        step = p["step"] * 0.1 + jax.lax.stop_gradient(p["step"] * 0.9)
        return jnp.tanh(x / step) * step

    def forward(self, x):
        return torch.tanh(x / Scaled.apply(self.step, 0.1)) * self.step

    module = Module(forward, step=lambda: nn.Parameter(torch.tensor(0.4)))
    found = first_difference(ours, module, {"step": "step"}, [POINTS])
    assert found.stage == "backward"
    assert not found.sure


def test_where_gradients_are_off_no_other_stop_is_named():
    """A target of a critic (SAC), which reads what is rightly detached as well."""

    def ours(p, x):
        target = x + 0.9 * (jnp.cos(x @ p["kernel"]) - jax.lax.stop_gradient(jnp.exp(p["alpha"])) * x)
        return jnp.square(x @ p["value"] - target).mean()

    def forward(self, x):
        alpha = self.alpha.exp().detach()
        with torch.no_grad():
            target = x + 0.9 * (self.out(x).cos() - alpha * x)
        return (self.value(x) - target).square().mean()

    module = Module(forward, out=linear(3, 3), value=linear(3, 3), alpha=lambda: nn.Parameter(torch.tensor(0.4)))
    weights = {**OF, "value": ("value.weight", "o i -> i o"), "alpha": "alpha"}
    found = first_difference(ours, module, weights, [POINTS])
    assert found.kind == "ours hands a gradient back here, theirs does not: it is detached"
    assert "target" in found.theirs.source


def test_of_one_array_another_part_is_read():
    def ours(p, x):
        gate, value = jnp.split(x @ p["kernel"], 2, -1)
        return jnp.tanh(x @ p["last"]) + jnp.tile(value * jax.nn.silu(gate), 2)

    def forward(self, x):
        value, gate = self.out(x).chunk(2, -1)
        return self.last(x).tanh() + (value * nn.functional.silu(gate)).tile(2)

    weights = {**OF, "last": ("last.weight", "o i -> i o")}
    found = first_difference(ours, Module(forward, out=linear(3, 4), last=linear(3, 4)), weights, [POINTS])
    assert found.kind.startswith("ours reads a part of `gate, value = jnp.split(x @")
    assert found.kind.endswith(f"; with another part of it in its place, {GOES_ON}")


def test_of_one_weight_another_row_is_read():
    def ours(p, x):
        one, other = p["starts"][:1], p["starts"][1:]
        return jnp.tanh(jnp.tanh(x) * one) + jnp.cos(jnp.sin(x) * one) * other + x @ p["kernel"]

    def forward(self, x):
        one, other = (row.repeat(9, 1) for row in self.starts)
        return torch.tanh(x.tanh() * other) + torch.cos(x.sin() * one) * other + self.out(x)

    starts = torch.tensor([[0.4, -0.3, 0.8], [0.1, 0.7, -0.6]])
    module = Module(forward, out=linear(3, 3), starts=lambda: nn.Parameter(starts))
    found = first_difference(ours, module, {**OF, "starts": "starts"}, [POINTS])
    assert f"ours reads starts; with another part of it in its place, {GOES_ON}" in found.kind


def test_what_both_stop_for_some_lines_is_read_wrongly_by_another():
    """Votes of capsules: their weights are computed of what is stopped, their sum is not."""

    def ours(p, x):
        votes = x @ p["kernel"]
        frozen = jax.lax.stop_gradient(votes)
        share = jax.nn.softmax(frozen @ frozen.swapaxes(-1, -2))
        return jnp.tanh(share @ frozen)

    def forward(self, x):
        votes = self.out(x)
        frozen = votes.detach()
        share = (frozen @ frozen.mT).softmax(-1)
        return (share @ votes).tanh()

    found = first_difference(ours, Module(forward, out=linear(3, 3)), OF, [POINTS])
    assert found.kind == "theirs hands a gradient back here, ours does not: it is detached"
    assert "share @ frozen" in found.ours.source
    assert "share @ votes" in found.theirs.source
