"""The same numbers in another order: tokens, heads and groups of heads of a vision transformer that are mixed up."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import Weight, first_difference
from parity_tests.small_modules import Module, linear_rows, numbers

pytestmark = pytest.mark.usefixtures("as_others_write")
WIDTH, HEADS, KEY_HEADS, HEAD = 24, 4, 2, 6
X = numbers(2, 3, 8, 12)
LINEAR = ("query", "key", "value", "output")
WEIGHTS = {
    "patches.kernel": ("patches.weight", "o i h w -> h w i o"),
    "patches.bias": "patches.bias",
    "first": "first",
    "positions": "positions",
    **linear_rows(*LINEAR),
}


def vision(self, x, flat=False):
    x = self.patches(x).flatten(2).transpose(1, 2)
    x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
    q, k, v = (part(x).view(*x.shape[:2], -1, HEAD).transpose(1, 2) for part in (self.query, self.key, self.value))
    k, v = (y.repeat_interleave(HEADS // KEY_HEADS, 1) for y in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v)
    if flat:
        # All tokens are rows of one matrix, as in nn.MultiheadAttention.
        rows = mixed.permute(2, 0, 1, 3).reshape(-1, HEADS * HEAD)
        return x + self.output(rows).view(-1, *x.shape[::2]).transpose(0, 1)
    return x + self.output(mixed.transpose(1, 2).flatten(2))


PARTS = {
    "patches": lambda: nn.Conv2d(3, WIDTH, 4, 4),
    "first": lambda: nn.Parameter(torch.randn(1, 1, WIDTH)),
    "positions": lambda: nn.Parameter(torch.randn(1, 7, WIDTH)),
    **dict.fromkeys(("query", "output"), lambda: nn.Linear(WIDTH, WIDTH)),
    **dict.fromkeys(("key", "value"), lambda: nn.Linear(WIDTH, KEY_HEADS * HEAD)),
}


def asked(ours, weights=WEIGHTS, **options):
    return first_difference(ours, Module(partial(vision, **options), **PARTS), weights, [X])


def ours(fault=""):
    """In JAX; the line of each fault says its name."""

    def forward(p, x):
        kernel, strides, layout = p["patches"]["kernel"], (4, 4), ("NCHW", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, strides, "VALID", dimension_numbers=layout) + p["patches"]["bias"]
        if fault == "columns":
            x = x.transpose(0, 2, 1, 3)
        x = x.reshape(len(x), -1, WIDTH)
        parts = [jnp.broadcast_to(p["first"], (len(x), 1, WIDTH)), x]
        x = jnp.concatenate(parts[::-1] if fault == "last" else parts, 1)
        x = x + p["positions"]
        q, k, v = (x @ p[name]["kernel"] + p[name]["bias"] for name in LINEAR[:3])
        if fault == "heads":
            q = q.reshape(*x.shape[:2], HEAD, HEADS).swapaxes(2, 3)
        q, k, v = (y.reshape(*x.shape[:2], -1, HEAD) for y in (q, k, v))
        if fault == "groups":
            k, v = (jnp.tile(y, (1, 1, HEADS // KEY_HEADS, 1)) for y in (k, v))
        else:
            k, v = (jnp.repeat(y, HEADS // KEY_HEADS, axis=2) for y in (k, v))
        weights = jax.nn.softmax(jnp.einsum("bthc,bshc->bhts", q, k) * (0.4 if fault == "scale" else HEAD**-0.5))
        mixed = jnp.einsum("bhts,bshc->bthc", weights, v)
        if fault == "merged":
            mixed = mixed.swapaxes(2, 3)
        return x + mixed.reshape(x.shape) @ p["output"]["kernel"] + p["output"]["bias"]

    return forward


@pytest.mark.parametrize(
    "fault, flat, line",
    [
        ("columns", False, "x.transpose(0, 2, 1, 3)"),
        ("last", False, 'fault == "last"'),
        ("heads", False, "HEAD, HEADS).swapaxes(2, 3)"),
        ("groups", False, "jnp.tile"),
        ("merged", False, "mixed.swapaxes(2, 3)"),
        ("merged", True, "mixed.swapaxes(2, 3)"),
    ],
)
def test_the_line_that_mixes_up_the_order_is_named(fault, flat, line):
    found = asked(ours(fault), flat=flat)
    assert line in found.ours.source
    assert found.kind.startswith("the same numbers in another order")
    assert found.sure


@pytest.mark.parametrize(
    "join, named",
    [
        (lambda first, x: jnp.concatenate([x, first]), "jnp.concatenate([x, first])"),
        (lambda first, x: jnp.concatenate([first, x[::-1]]), "x[::-1]"),
    ],
)
def test_tokens_are_in_another_order_where_one_stands_in_every_sequence(join, named):
    """So that numbers repeat themselves, and not each of them says where it was."""

    def attend(p, x):
        x = join(p["first"], x)
        q, k = (x @ p[name]["kernel"] + p[name]["bias"] for name in ("query", "key"))
        return (jax.nn.softmax(q @ k.T) @ x)[1]

    def attend_there(self, x):
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        return ((self.query(x) @ self.key(x).mT).softmax(-1) @ x)[:, 1]

    parts = {name: lambda: nn.Linear(6, 6) for name in LINEAR[:2]}
    theirs = Module(attend_there, first=lambda: nn.Parameter(torch.randn(1, 6)), **parts)
    weights = {"first": "first", **linear_rows(*parts)}
    found = first_difference(lambda p, x: jax.vmap(attend, (None, 0))(p, x), theirs, weights, [numbers(2, 5, 6)])
    assert named in found.ours.source
    assert found.kind.startswith("the same numbers in another order: along axis 1 places ")
    assert found.sure


def test_queries_and_keys_that_are_split_alike_in_a_wrong_order_are_named():
    """Neither alone makes the scores those of theirs."""

    def heads(x):
        return x.reshape(*x.shape[:2], 4, 3).transpose(0, 3, 1, 2)

    def scored(p, x):
        q, k = (heads(x @ p[name]["kernel"] + p[name]["bias"]) for name in LINEAR[:2])
        return jax.nn.softmax(q @ k.swapaxes(2, 3))

    def scored_there(self, x):
        q, k = (part(x).view(*x.shape[:2], 3, 4).transpose(1, 2) for part in (self.query, self.key))
        return (q @ k.transpose(2, 3)).softmax(-1)

    theirs = Module(scored_there, **dict.fromkeys(LINEAR[:2], lambda: nn.Linear(6, 12)))
    found = first_difference(scored, theirs, linear_rows(*LINEAR[:2]), [numbers(2, 5, 6)])
    assert found.ours.source == "return x.reshape(*x.shape[:2], 4, 3).transpose(0, 3, 1, 2)"
    assert found.kind.startswith("the same numbers in another order")
    assert found.sure


@pytest.mark.parametrize("fault", ["", "factor", "order"])
def test_what_theirs_sorts_is_in_another_order_in_the_right_port_too(fault):
    """As packed sequences are, by their length, and experts that are chosen by topk without sorting."""
    places = np.array([2, 0, 3, 1])

    def scaled(p, x):
        h = jnp.tanh(x @ p["query"]["kernel"] + p["query"]["bias"])
        h = h[::-1] if fault == "order" else h
        gates = jax.nn.sigmoid(h) * (0.7 if fault == "factor" else 0.5)
        return jnp.sin(gates * h) + x

    def scaled_there(self, x):
        h = torch.tanh(self.query(x[places]))
        return torch.sin(torch.sigmoid(h) * 0.5 * h)[places.argsort()] + x

    theirs = Module(scaled_there, query=lambda: nn.Linear(6, 6))
    found = first_difference(scaled, theirs, linear_rows("query"), [numbers(4, 6)])
    assert bool(found) == bool(fault)
    if fault == "factor":
        assert 'fault == "factor"' in found.ours.source
        assert "order" not in (found.kind or "")
    assert fault != "order" or not found.verdict.startswith("sure")


@pytest.mark.parametrize(
    "fault, line", [("sorted", "jnp.argsort("), ("far", "x[::-1]"), ("", ""), ("factor", "0.7 * jnp.tanh")]
)
def test_what_is_sorted_the_other_way_is_named_where_it_is_sorted(fault, line):
    """And what is in another order long before it matters."""

    def summed(p, x):
        x = jnp.sin(x[::-1] if fault == "far" else x)
        for _ in range(15):
            x = jnp.sin(1.1 * x + 0.1)
        h = x @ p["query"]["kernel"] + p["query"]["bias"]
        plain = jnp.cumsum(h, 0)
        h = h[jnp.argsort(h[:, 0] if fault == "sorted" else -h[:, 0])]
        return {"plain": plain, "sorted": jnp.cumsum(0.7 * jnp.tanh(h) if fault == "factor" else jnp.tanh(h), 0)}

    def summed_there(self, x):
        for _ in range(16):
            x = torch.sin(1.1 * x + 0.1 if _ else x)
        h = self.query(x)
        return {"plain": h.cumsum(0), "sorted": torch.tanh(h[h[:, 0].argsort(descending=True)]).cumsum(0)}

    theirs = Module(summed_there, query=lambda: nn.Linear(6, 6))
    found = first_difference(summed, theirs, linear_rows("query"), [numbers(7, 6)])
    assert bool(found) == bool(fault)
    if fault:
        assert line in found.ours.source
        assert ("order" in found.kind) == (fault != "factor")
        assert found.sure


def test_a_right_order_is_no_difference_and_hides_none():
    """Queries and keys whose elements are in another order, both, as rotated halves are, give the same products."""
    assert not asked(ours())

    sizes = {"two": 2, "c": HEAD // 2}
    halves = {f"{name}.kernel": Weight(f"{name}.weight", "(h two c) i -> i (h c two)", sizes) for name in LINEAR[:2]}
    halves |= {f"{name}.bias": Weight(f"{name}.bias", "(h two c) -> (h c two)", sizes) for name in LINEAR[:2]}
    assert not asked(ours(), WEIGHTS | halves)
    found = asked(ours("scale"), WEIGHTS | halves)
    assert "jnp.einsum" in found.ours.source
    assert "order" not in (found.kind or "")


def test_axes_are_named_where_they_are_exchanged_first():
    """Some lines before the sides part, because there are as many queries as keys."""

    def biased(p, x):
        bias = jnp.tanh(p["first"] @ p["second"])
        bias = bias.T
        bias = bias[None]
        return jax.nn.softmax(x @ x.swapaxes(1, 2) + bias + jnp.asarray([0.0, 0.0, 0.0, -1e9])) @ x

    def biased_there(self, x):
        bias = torch.tanh(self.first @ self.second)
        mask = torch.tensor([0.0, 0.0, 0.0, -1e9])
        return (x @ x.transpose(1, 2) + (bias[None] + mask)).softmax(-1) @ x

    names = ("first", "second")
    theirs = Module(biased_there, **dict.fromkeys(names, lambda: nn.Parameter(torch.randn(4, 4))))
    found = first_difference(biased, theirs, {name: name for name in names}, [numbers(2, 4, 6, seed=1)])
    assert found.ours.source == "bias = bias.T"
    assert found.kind == "the same numbers in another order: axes 0 and 1 are exchanged"
    assert found.sure


def test_a_transposed_input_is_named_and_not_the_line_behind_a_norm():
    theirs = Module(
        lambda self, x, pairs: (x @ x.T + torch.tanh(pairs @ self.first)[..., 0]).softmax(-1) @ x,
        first=lambda: nn.Parameter(torch.randn(4, 1)),
    )

    def wrong(p, x, pairs):
        pairs = pairs.swapaxes(0, 1)
        return jax.nn.softmax(x @ x.T + jnp.tanh(pairs @ p["first"])[None, :, :, 0])[0] @ x

    found = first_difference(wrong, theirs, {"first": "first"}, [numbers(5, 6), numbers(5, 5, 4, seed=1)])
    assert found.ours.source == "pairs = pairs.swapaxes(0, 1)"
    assert found.kind == "the same numbers in another order: axes 0 and 1 are exchanged"
    assert found.sure


def test_an_order_that_was_lost_before_layers_that_keep_it_is_named_where_it_was_lost():
    """What is computed window by window is the same of each window, and comes to other places behind it."""

    def windows(x):
        return x.reshape(2, 2, 3, 2, 3, 8)

    def forward(p, x):
        x = windows(x).transpose(0, 3, 1, 2, 4, 5).reshape(2, 4, 9, 8)
        q, k, v = jnp.split(x @ jnp.concatenate([p[name]["kernel"] for name in LINEAR[:3]], 1), 3, -1)
        x = jax.nn.softmax(q @ k.swapaxes(2, 3)) @ v
        x = x.reshape(2, 2, 2, 3, 3, 8).transpose(0, 1, 3, 2, 4, 5).reshape(2, 6, 6, 8)
        return jnp.tanh(x + p["positions"])

    def forward_there(self, x):
        x = windows(x).permute(0, 1, 3, 2, 4, 5).reshape(8, 9, 8)
        x = (self.query(x) @ self.key(x).mT).softmax(-1) @ self.value(x)
        x = x.view(2, 2, 2, 3, 3, 8).permute(0, 1, 3, 2, 4, 5).reshape(2, 6, 6, 8)
        return torch.tanh(x + self.positions)

    parts = {name: lambda: nn.Linear(8, 8, bias=False) for name in LINEAR[:3]}
    theirs = Module(forward_there, **parts, positions=lambda: nn.Parameter(torch.randn(6, 6, 8)))
    weights = {f"{name}.kernel": (f"{name}.weight", "o i -> i o") for name in parts} | {"positions": "positions"}
    found = first_difference(forward, theirs, weights, [numbers(2, 6, 6, 8)])
    assert found.ours.source.startswith("x = windows(x).transpose(0, 3, 1")
    assert found.kind.startswith("the same numbers in another order")
    assert found.confirmed


def test_heads_are_named_where_they_are_merged_although_batches_are_stacked_in_two_ways():
    """With and without a condition: theirs has all samples with it first, ours both for each sample."""

    def sample(p, x):
        patches = x.reshape(3, 2, 4).transpose(1, 0, 2).reshape(2, 12) @ p["up"]["kernel"]
        h = jnp.stack([patches, 2 * patches])
        q, k, v = ((h @ p[name]["kernel"]).reshape(2, 2, 2, 4).swapaxes(1, 2) for name in LINEAR[:3])
        mixed = jax.nn.softmax(q @ k.swapaxes(2, 3)) @ v
        mixed = mixed.transpose(0, 2, 3, 1).reshape(2, 2, 8)
        with_it, without = mixed @ p["output"]["kernel"]
        return with_it + 3 * (with_it - without)

    def forward_there(self, x):
        patches = self.up(x.view(-1, 3, 2, 4).transpose(1, 2).reshape(-1, 2, 12))
        h = torch.cat([patches, 2 * patches])
        q, k, v = (part(h).view(-1, 2, 2, 4).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        with_it, without = self.output(mixed).chunk(2)
        return with_it + 3 * (with_it - without)

    parts = {name: lambda: nn.Linear(8, 8, bias=False) for name in LINEAR}
    theirs = Module(forward_there, **parts, up=lambda: nn.Linear(12, 8, bias=False))
    weights = {f"{name}.kernel": (f"{name}.weight", "o i -> i o") for name in (*LINEAR, "up")}
    found = first_difference(lambda p, x: jax.vmap(lambda x: sample(p, x))(x), theirs, weights, [numbers(2, 6, 4)])
    assert "mixed.transpose(0, 2, 3, 1)" in found.ours.source
    assert found.confirmed


def test_axes_that_are_exchanged_before_they_are_merged_are_in_another_order():
    def forward(self, x):
        y = self.up(x)
        graph = torch.einsum("ic,jc->ij", y, torch.sin(y))
        return torch.tanh(graph.reshape(3, 2, 6).mean(1) @ y)

    def graph_means(p, x):
        y = x @ p["up"].T
        graph = jnp.einsum("ic,jc->ij", jnp.sin(y), y)
        means = graph.reshape(3, 2, 6).mean(1)
        return jnp.tanh(means @ y)

    theirs = Module(forward, up=lambda: nn.Linear(6, 6, bias=False))
    found = first_difference(graph_means, theirs, {"up": "up.weight"}, [numbers(6, 6)])
    assert found.sure
    assert found.kind == "the same numbers in another order"
    assert "einsum" in found.ours.source


def test_heads_that_theirs_merges_wrongly_are_named_where_ours_keeps_them_apart():
    def mixed(p, x):
        heads = jnp.tanh(x @ p["query"]["kernel"] + p["query"]["bias"]).reshape(2, 5, 3, 4)
        return jnp.einsum("bthc,hcd->btd", heads, p["output"]["kernel"].reshape(3, 4, 6)) + p["output"]["bias"]

    def mixed_there(self, x):
        heads = torch.tanh(self.query(x).view(2, 5, 3, 4).transpose(1, 2))
        return self.output(heads.reshape(2, 5, 12))

    theirs = Module(mixed_there, query=lambda: nn.Linear(6, 12), output=lambda: nn.Linear(12, 6))
    found = first_difference(mixed, theirs, linear_rows("query", "output"), [numbers(2, 5, 6)])
    assert found.theirs.source == "return self.output(heads.reshape(2, 5, 12))"
    assert found.kind == "the same numbers in another order"


def test_of_two_sides_that_join_in_their_own_orders_the_one_that_takes_the_wrong_part_is_named():
    """With what is mixed in the order of theirs ours would go on as theirs does; what is joined is right as it is."""

    def mixed(p, x):
        h = x @ p["query"]["kernel"] + p["query"]["bias"]
        queries = jnp.concatenate([jnp.sin(h), h])
        values = jnp.concatenate([jnp.cos(h), 2 * h])
        mixed = jax.nn.softmax(queries @ queries.T) @ values
        return jnp.tanh(mixed[:6])

    def mixed_there(self, x):
        h = self.query(x)
        queries, values = torch.cat([h, h.sin()]), torch.cat([2 * h, h.cos()])
        mixed = (queries @ queries.T).softmax(-1) @ values
        return torch.tanh(mixed[:6])

    theirs = Module(mixed_there, query=lambda: nn.Linear(6, 6))
    found = first_difference(mixed, theirs, linear_rows("query"), [numbers(6, 6)])
    assert not found.sure
    assert "mixed[:6]" in found.ours.source


def test_a_table_whose_numbers_repeat_is_named_where_it_is_put_together():
    """Sines and cosines of distances on both sides, which a weight is multiplied by."""

    def turned(p, x):
        angles = jnp.arange(4.0, -5.0, -1.0)[:, None] / 10.0 ** jnp.arange(3)
        table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        return x @ (table @ p["query"]["kernel"] + p["query"]["bias"]).T

    def turned_there(self, x):
        angles = torch.arange(4, -5, -1, dtype=torch.float64)[:, None] / 10 ** torch.arange(3, dtype=torch.float64)
        return x @ self.query(torch.stack([angles.sin(), angles.cos()], -1).flatten(1)).T

    theirs = Module(turned_there, query=lambda: nn.Linear(6, 6))
    found = first_difference(turned, theirs, linear_rows("query"), [numbers(6, 6)])
    assert found.ours.source == "table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)"
    assert found.kind.startswith("the same numbers in another order")
