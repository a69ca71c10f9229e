"""Experts: ours sorts tokens and multiplies in one ragged product, theirs asks each expert by a mask."""

import re
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import LEFT_OUT, first_difference
from parity.differ import values
from parity_tests.small_modules import Module, numbers

pytestmark = pytest.mark.usefixtures("as_others_write")
EXPERTS, WIDTH, HIDDEN, CHOSEN = 4, 8, 16, 2
X = numbers(2, 9, WIDTH)
WEIGHTS = {
    "gate": ("gate.weight", "o i -> i o"),
    "up": "up",
    "open": "open",
    "down": "down",
    "output": ("output.weight", "o i -> i o"),
    "bias": "output.bias",
}


def experts(self, x):
    tokens = x.reshape(-1, WIDTH)
    weights, chosen = torch.topk(torch.softmax(self.gate(tokens), dim=-1), CHOSEN)
    weights = weights / weights.sum(-1, keepdim=True)
    mixed, masks = torch.zeros_like(tokens), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for expert in range(EXPERTS):
        rank, token = torch.where(masks[expert])
        hidden = F.silu(tokens[token] @ self.open[expert]) * (tokens[token] @ self.up[expert])
        mixed.index_add_(0, token, hidden @ self.down[expert] * weights[token, rank, None])
    return self.output(mixed).reshape(x.shape)


def matrices(*shape):
    """One of each expert."""
    return lambda: nn.Parameter(torch.randn(EXPERTS, *shape) * 0.3)


THEIRS = Module(
    experts,
    gate=lambda: nn.Linear(WIDTH, EXPERTS, bias=False),
    output=lambda: nn.Linear(WIDTH, WIDTH),
    up=matrices(WIDTH, HIDDEN),
    open=matrices(WIDTH, HIDDEN),
    down=matrices(HIDDEN, WIDTH),
)


def ours(fault="", descending=True):
    """In JAX; the line of each fault says its name. The chosen experts of a token are in either order."""

    def forward(p, x):
        tokens = x.reshape(-1, WIDTH)
        scores = tokens @ p["gate"]
        if fault == "scores":
            scores = 2 * scores
        weights, chosen = (
            array if descending else array[:, ::-1] for array in jax.lax.top_k(jax.nn.softmax(scores), CHOSEN)
        )
        if fault != "weights":
            weights = weights / weights.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
        up, opened = (jax.lax.ragged_dot(tokens[order // CHOSEN], p[name], sizes) for name in ("up", "open"))
        if fault == "detached":
            opened = jax.lax.stop_gradient(opened)
        hidden = (jax.nn.gelu(opened) if fault == "activation" else jax.nn.silu(opened)) * up
        if fault == "half":
            hidden = hidden * 0.5
        down = jax.lax.ragged_dot(hidden, p["down"], sizes)
        mixed = jnp.zeros_like(tokens).at[order // CHOSEN].add(down * weights.reshape(-1)[order][:, None])
        if fault == "residual":
            mixed = mixed + tokens
        return (mixed @ p["output"] + p["bias"]).reshape(x.shape)

    return forward


def asked(ours):
    return first_difference(ours, THEIRS, WEIGHTS, [X])


@pytest.mark.parametrize("descending", [True, False])
def test_sorting_and_masks_are_the_same(descending):
    assert not asked(ours(descending=descending))


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize(
    "fault, line, their_line, kind",
    [
        ("scores", "2 * scores", "self.gate(tokens)", ""),
        ("weights", "weights.reshape(-1)[order]", "weights.sum(-1", ""),
        ("activation", 'fault == "activation"', "F.silu", ""),
        ("half", "hidden * 0.5", "hidden @ self.down[expert]", "ours multiplies by 0.5 here; without that"),
        ("residual", "mixed + tokens", "self.output(mixed)", "ours adds input 0 here; without that"),
    ],
)
def test_a_fault_among_experts_is_found(fault, line, their_line, kind, descending):
    found = asked(ours(fault, descending))
    assert line in found.ours.source
    assert their_line in found.theirs.source
    assert kind in (found.kind or "")


@pytest.mark.parametrize(
    "fault, line, kind",
    [
        (
            "bias",
            "jax.lax.top_k(groups, 2)[0].sum(-1)",
            "theirs adds bias here; without that, theirs goes on as ours does",
        ),
        ("groups", 'fault == "groups"', "ours applies reduce_max here; with reduce_sum, ours goes on as theirs does"),
        ("after", 'fault == "after"', "ours multiplies by 0.5 here; without that, ours goes on as theirs does"),
    ],
)
def test_what_chooses_is_named_and_not_what_is_chosen(fault, line, kind):
    """Experts of the best groups, as DeepSeek-V3 chooses them."""

    def chosen_there(self, x):
        scores = self.gate(x).sigmoid()
        biased = scores + self.bias
        groups = biased.view(-1, 4, 2).topk(2, -1)[0].sum(-1).topk(2, -1, sorted=False)[1]
        mask = torch.zeros(len(x), 4).scatter_(1, groups, 1).repeat_interleave(2, 1)
        weights = scores.gather(1, biased.masked_fill(~mask.bool(), 0.0).topk(2, -1, sorted=False)[1])
        return torch.tanh(weights / weights.sum(-1, keepdim=True)).sum(-1, keepdim=True) * x

    def chosen(p, x):
        scores = jax.nn.sigmoid(x @ p["gate"])
        biased = scores if fault == "bias" else scores + p["bias"]
        groups = biased.reshape(-1, 4, 2)
        best = groups.max(-1) if fault == "groups" else jax.lax.top_k(groups, 2)[0].sum(-1)
        kept = jax.nn.one_hot(jax.lax.top_k(best, 2)[1], 4).sum(1).repeat(2, 1) > 0
        places = jax.lax.top_k(jnp.where(kept, biased, -jnp.inf), 2)[1]
        weights = jnp.take_along_axis(scores, places, 1)
        weights = weights / weights.sum(-1, keepdims=True)
        weights = weights * 0.5 if fault == "after" else weights
        return jnp.tanh(weights).sum(-1, keepdims=True) * x

    theirs = Module(
        chosen_there, gate=lambda: nn.Linear(WIDTH, 8, bias=False), bias=lambda: nn.Parameter(torch.randn(8))
    )
    weights = {"gate": ("gate.weight", "o i -> i o"), "bias": "bias"}
    found = first_difference(chosen, theirs, weights, [numbers(12, WIDTH)], backward=False)
    assert line in found.ours.source
    assert kind in (found.kind or "")
    # Beside the lines that it quotes, and the names of operations.
    assert not re.search(r"\bmasks?\b", re.sub("`.*?`", "", found.kind or ""))


def test_a_mask_that_both_have_is_no_other_choice_where_it_was_not_kept(monkeypatch):
    """As those of large models are not."""
    monkeypatch.setattr(values, "_SMALL", 0)

    def chosen(p, x):
        h = x @ p["kernel"] + p["bias"]
        kept = jnp.sin(h) * 5.0 > 0
        return jnp.where(kept, h, h * h)

    def chosen_there(self, x):
        h = self.linear(x)
        kept = torch.sin(h) * 3.0 > 0
        return torch.where(kept, h * h, h)

    theirs = Module(chosen_there, linear=lambda: nn.Linear(WIDTH, 9))
    weights = {"kernel": ("linear.weight", "o i -> i o"), "bias": "linear.bias"}
    found = first_difference(chosen, theirs, weights, [numbers(5, WIDTH)], backward=False)
    assert found.ours.source == "return jnp.where(kept, h, h * h)"


def test_what_is_stopped_within_the_choice_of_experts_is_no_cut():
    """The maximum in the softmax of the scores has no gradient on either side."""
    found = asked(ours("detached"))
    assert found.stage == "backward"
    assert not found.sure or "stop_gradient" in found.ours.source


def test_whole_numbers_are_never_sure():
    """Where the tokens themselves differ, nothing that is chosen by them is taken for the difference."""

    def other(p, x):
        return ours()(p, x[:, ::-1] * 1.5)

    found = asked(other)
    assert "int" not in found.ours.dtype
    assert "x[:, ::-1] * 1.5" in found.ours.source


@pytest.mark.parametrize("fault, line", [("radius", "squares <= "), ("first", "index[:, -1:]")])
def test_neighbours_that_are_chosen_otherwise_are_named_where_they_are_chosen(fault, line):
    """As PointNet++ groups points: those within a radius, filled up with the first; ours sorts, theirs writes."""
    x = numbers(9, WIDTH)

    def forward(p, x):
        squares = ((x[:, None] - x[None]) ** 2).sum(-1)
        inside = squares <= (14 if fault == "radius" else 12)
        index = jnp.sort(jnp.where(inside, jnp.arange(9), 9), axis=-1)[:, :4]
        index = jnp.where(index == 9, index[:, -1:] % 9 if fault == "first" else index[:, :1], index)
        return jnp.tanh(x[index].sum(1) @ p["kernel"] + p["bias"])

    def forward_there(self, x):
        index = torch.arange(9).repeat(9, 1)
        index[((x[:, None] - x[None]) ** 2).sum(-1) > 12] = 9
        index = index.sort(-1)[0][:, :4]
        mask = index == 9
        index[mask] = index[:, :1].repeat(1, 4)[mask]
        return torch.tanh(self.linear(x[index].sum(1)))

    theirs = Module(forward_there, linear=lambda: nn.Linear(WIDTH, 5))
    weights = {"kernel": ("linear.weight", "o i -> i o"), "bias": "linear.bias"}
    found = first_difference(forward, theirs, weights, [x], backward=False)
    assert line in found.ours.source
    assert found.confirmed
    assert found.kind.startswith("the two choose otherwise here")


@pytest.mark.parametrize("line, loops", [("segment_max", 0), ("segment_sum", 0), ("segment_max", 4)])
def test_rows_of_another_index_are_named_by_what_they_are_taken_by(line, loops):
    """Edges, of which ours sums by where they begin, once or in all of a softmax, and theirs by where they end; in one
    case they are put together with loops."""
    edges = np.array([[0, 1, 2, 2, 3, 0, 1], [1, 2, 0, 3, 3, 2, 0]])

    def softmax(scores, first, then):
        top = jax.ops.segment_max(scores, then, num_segments=4)
        shifted = jnp.exp(scores - top[then])
        return shifted / jax.ops.segment_sum(shifted, first, num_segments=4)[then]

    def forward(p, x, edges):
        h = x @ p["kernel"] + p["bias"]
        begins, ends = [jnp.concatenate([each, jnp.arange(loops)]) for each in edges] if loops else edges
        return jnp.tanh(softmax(h[begins] * h[ends], begins, begins if line == "segment_max" else ends)) * h[begins]

    def forward_there(self, x, edges):
        h = self.linear(x)
        begins, ends = torch.cat([edges, torch.arange(loops).expand(2, loops)], 1)
        scores = h[begins] * h[ends]
        index = ends[:, None].expand_as(scores)
        top = torch.full_like(h, -torch.inf).scatter_reduce_(0, index, scores, "amax")
        shifted = torch.exp(scores - top.gather(0, index))
        return torch.tanh(shifted / torch.zeros_like(h).scatter_add_(0, index, shifted).gather(0, index)) * h[begins]

    theirs = Module(forward_there, linear=lambda: nn.Linear(WIDTH, 5))
    weights = {"kernel": ("linear.weight", "o i -> i o"), "bias": "linear.bias"}
    found = first_difference(forward, theirs, weights, [numbers(4, WIDTH), edges], backward=False)
    assert line in found.ours.source
    if loops:
        assert "; with another result of `begins, ends = [jnp.concatenate" in found.kind
    else:
        other = "another part of input 1"
        assert found.kind == f"ours reads input 1; with {other} in its place, ours goes on as theirs does"
    assert found.confirmed


def test_what_a_maximum_begins_with_is_no_mask():
    """The largest of each group, of which theirs has another number; the groups are not all that differs."""
    groups = np.array([0, 1, 2, 3, 0, 1]), np.array([0, 0, 1, 1, 2, 2])

    def ours(p, x, one, other):
        h = x @ p["up"].T
        return jnp.exp(h - jax.ops.segment_max(h, one, num_segments=4)[one]) * h[other] * 1.01

    def forward(self, x, one, other):
        h = self.up(x)
        top = h.new_full((4, 6), -torch.inf).scatter_reduce(0, other[:, None].expand_as(h), h, "amax")
        return torch.exp(h - top[other]) * h[other]

    theirs = Module(forward, up=lambda: nn.Linear(6, 6, bias=False))
    inputs = numbers(6, 6, seed=3), *groups
    found = first_difference(ours, theirs, {"up": "up.weight"}, inputs, backward=False)
    assert "segment_max" in found.ours.source
    assert "masks" not in (found.kind or "")


@pytest.mark.parametrize("seed", [6, 8])
def test_what_is_put_into_the_order_that_scores_best_is_named_where_that_is_chosen(seed):
    """Each estimate is given to the target that it is most like; ours sums over the inverse of each permutation."""
    table = np.array([*permutations(range(3))])

    def forward(self, x, y):
        h = self.up(x).view(2, 3, 6)
        likeness = -((h[:, :, None] - y[:, None]) ** 2).mean(-1)
        best, index = torch.einsum("bij,pij->bp", likeness, F.one_hot(torch.tensor(table), 3).double()).max(1)
        order = torch.tensor(table)[index].argsort(1)
        return best, (torch.gather(h, 1, order[..., None].expand_as(h)) - y).abs().mean()

    def ours(p, x, y):
        def one(h, y):
            likeness = -((h[:, None] - y[None]) ** 2).mean(-1)
            scores = likeness[table, np.arange(3)].sum(1)
            chosen = jnp.asarray(table)[jnp.argmax(scores)]
            return scores.max(), h[jnp.argsort(chosen)]

        best, h = jax.vmap(one)((x @ p["up"].T).reshape(2, 3, 6), y)
        return best, jnp.abs(h - y).mean()

    theirs = Module(forward, up=lambda: nn.Linear(6, 6, bias=False))
    inputs = numbers(6, 6, seed=3), numbers(2, 3, 6, seed=seed)
    found = first_difference(ours, theirs, {"up": "up.weight"}, inputs, backward=False)
    assert found.ours.source == "chosen = jnp.asarray(table)[jnp.argmax(scores)]"
    assert not found.sure


@pytest.mark.parametrize("fault, named", [({}, ""), ({"squashed": jnp.sin}, "h_new = jax.nn.sigmoid(o) * squashed")])
def test_sequences_that_are_packed_are_rows_of_those_that_are_masked(fault, named):
    """An LSTM in both directions, of which the second one begins where the longest sequence ends."""
    lengths = np.array([3, 5, 2])

    def direction(p, x, going, reverse, squashed=jnp.tanh):
        def step(carry, inputs):
            (h, c), (x, going) = carry, inputs
            i, f, g, o = jnp.split(x + h @ p["hidden"].T, 4, axis=-1)
            c_new = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h_new = jax.nn.sigmoid(o) * squashed(c_new)
            return (jnp.where(going, h_new, h), jnp.where(going, c_new, c)), jnp.where(going, h_new, 0)

        start = jnp.zeros((3, 6))
        inputs = (x @ p["inputs"].T + p["bias"]).swapaxes(0, 1)
        return jax.lax.scan(step, (start, start), (inputs, going), reverse=reverse)[1].swapaxes(0, 1)

    def ours(p, x, lengths):
        going = (jnp.arange(5)[:, None] < lengths)[..., None]
        there, back = direction(p["there"], x, going, False), direction(p["back"], x, going, True, **fault)
        return jnp.concatenate([there, back], -1)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    theirs = Module(forward, lstm=lambda: nn.LSTM(4, 6, batch_first=True, bidirectional=True))
    weights = {LEFT_OUT: []}
    for name, end in (("there", "l0"), ("back", "l0_reverse")):
        held = {"inputs": f"weight_ih_{end}", "hidden": f"weight_hh_{end}", "bias": f"bias_ih_{end}"}
        weights |= {f"{name}.{part}": f"lstm.{path}" for part, path in held.items()}
        weights[LEFT_OUT].append(f"lstm.bias_hh_{end}")
        nn.init.zeros_(theirs.lstm.get_parameter(f"bias_hh_{end}"))
    found = first_difference(ours, theirs, weights, [numbers(3, 5, 4), lengths], backward=False)
    assert bool(found) == bool(fault)
    assert named in (found.ours.source if found else "")
