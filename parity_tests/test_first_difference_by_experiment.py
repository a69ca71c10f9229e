"""`first_difference` says with what change one side goes on as the other does, where it was run on so."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import first_difference
from parity.differ.alignment import match
from parity.differ.element_order import without_copies
from parity.differ.kinds import masked_apart
from parity.differ.substitution import Experiments, is_by_chance
from parity.differ.values import Value, Values
from parity_tests.small_modules import Module, numbers

pytestmark = pytest.mark.usefixtures("as_others_write")
GRID = np.arange(36.0).reshape(6, 6) / 7
LABELS = np.array([-1, 3, 0, 2, -1, 4])
MASK = np.where(np.arange(6) < np.array([[[4]], [[5]]]), 0.0, -1e9)
NUMBERS = numbers(6, 6, seed=3)
WEIGHTS = {
    "up": "up.weight",
    "down": "down.weight",
    "scale": "norm.weight",
    "bias": "norm.bias",
    "positions": "positions.weight",
}


class Between(nn.Module):
    """Two products with something between them."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.positions = nn.Embedding(6, 6)
        self.between = between

    def forward(self, x):
        h = self.up(x)
        h = self.between(self, x, h)
        return torch.tanh(self.down(h)) + x


def part(ours, forward, *inputs, names=("up",), **options):
    """What parts a function and a module of these products alone."""
    theirs = Module(forward, **dict.fromkeys(names, lambda: nn.Linear(6, 6, bias=False)))
    weights = {name: f"{name}.weight" for name in names}
    return first_difference(ours, theirs, weights, inputs or [NUMBERS], **options)


def ours(between, p, x):
    h = x @ p["up"].T
    h = between(p, x, h)
    return jnp.tanh(h @ p["down"].T) + x


def standard(h, root=lambda variance: jnp.sqrt(variance + 1e-5)):
    centred = h - h.mean(-1, keepdims=True)
    return centred / root(jnp.square(centred).mean(-1, keepdims=True))


def normalise(p, h, *root):
    return standard(h, *root) * p["scale"] + p["bias"]


def same(_, x, h):
    return h


def with_branch(m, x, h):
    """A branch, longer than what is tried step by step, on what follows too: a product with the norm's weight."""
    return (h + long(h * m.norm.weight)) * m.norm.weight


def long(h):
    for _ in range(10):
        h = torch.tanh(h * 1.1 + 0.1)
    return h


def two_branches(m, x, h):
    for _ in range(2):
        h = torch.tanh(m.up(m.norm(h))) + m.norm(h) + h
    return h


def turned(p, x, h):
    """By a table in two halves that are read apart, of which the first should hold sines."""
    cosines = np.cos(np.arange(6)[:, None] / 10.0 ** np.arange(3))
    rows = jnp.asarray(np.concatenate([cosines, cosines], -1))[jnp.arange(6)]
    sines, cosines = jnp.split(rows, 2, axis=-1)
    return jnp.concatenate([h[:, :3] * sines, h[:, 3:] * cosines], -1)


def turned_there(m, x, h):
    angles = torch.arange(6)[:, None] / 10.0 ** torch.arange(3)
    sines = angles.sin()
    return torch.cat([h[:, :3] * sines, h[:, 3:] * angles.cos()], -1)


def table_added_there(m, x, h):
    grid = torch.tensor(GRID)
    return torch.tanh(grid.sin()[None].baddbmm(h[None], x.T[None], alpha=0.5)[0] + grid)


def dead(p, x, h):
    """What nobody reads agrees with theirs, and says nothing; what is read is not what was computed."""
    attended = jnp.tanh(normalise(p, h) @ p["up"].T)
    del attended
    return normalise(p, h) @ p["down"].T


def both_turned_there(m, x, h):
    def turn(y):
        return y * torch.tensor(GRID).cos() + y.flip(-1) * torch.tensor(GRID).sin()

    return torch.softmax(turn(h) @ turn(x), -1) @ h


def layers(maximum, norm, weight, h):
    for _ in range(4):
        h = maximum(norm(h), 0 * h) @ weight.T
    return h


def masked(p, x, h):
    mask = jnp.asarray(LABELS) > 0
    return jnp.tanh(h * mask)


def parts_exchanged(h):
    y = jnp.tanh(h)
    b, a = y[:, :3], y[:, 3:]
    return jnp.concatenate([long_product(a, b, jnp), y[:, 3:]], -1)


def in_parts_there(h):
    a, b = torch.tanh(h).chunk(2, -1)
    return torch.cat([long_product(a, b, torch), b], -1)


def once(inner, h):
    return inner(h * 2)


def again(inner, h):
    return inner(h - 1)


def long_product(a, b, numpy):
    for _ in range(5):
        a = numpy.tanh(a * 1.1 - b)
    return a


CASES = {
    "an activation more": (lambda p, x, h: jnp.exp(h), same, "ours applies exp here; without that, ours goes on"),
    "an activation less": (same, lambda m, x, h: F.softplus(h), "theirs applies softplus here; without that"),
    "a norm less": (same, lambda m, x, h: m.norm(h), "theirs computes `h = self.between(self, x, h)` here"),
    "a norm more": (lambda p, x, h: normalise(p, h), same, "ours computes `centred = h - h.mean(-1, keepdims=True)`"),
    "a mean less": (
        lambda p, x, h: h * jax.lax.rsqrt(jnp.square(h) + 1e-5) * p["scale"],
        lambda m, x, h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * m.norm.weight,
        "theirs applies mean here; without that, theirs goes on as ours does",
    ),
    "a residual of another value": (
        lambda p, x, h: jnp.tanh(h) + x,
        lambda m, x, h: torch.tanh(h) + h,
        "ours reads input x; with `h = self.up(x)`",
    ),
    "softmax over the other axis": (
        lambda p, x, h: jax.nn.softmax(h, axis=0),
        lambda m, x, h: F.softmax(h, dim=-1),
        "with axes 0 and 1 of `h = x @ p[\"up\"].T`",
    ),
    "a choice that theirs makes everywhere": (
        lambda p, x, h: jnp.where(GRID > 2, jnp.where(h > 0.1, jnp.tanh(h), h * h), h),
        lambda m, x, h: torch.where(torch.tensor(GRID > 2), torch.where(h > -9, torch.tanh(h), h * h), h),
        "the two choose otherwise here; with what theirs chooses, ours goes on as theirs does",
    ),
    "a branch less, its residual kept": (
        lambda p, x, h: h * p["scale"],
        with_branch,
        "theirs adds `h = torch.tanh(h * 1.1 + 0.1)`",
    ),
    "the inside of a branch less": (
        lambda p, x, h: h + normalise(p, h),
        lambda m, x, h: h + long(m.norm(h)),
        "theirs computes `h = torch.tanh(h * 1.1 + 0.1)` here; without that, theirs goes on as ours does",
    ),
    "two branches less": (same, two_branches, "theirs adds the result of aten.add here"),
    "a table less, before another place at which both scale what they agree on": (
        lambda p, x, h: (jnp.tanh(x) / 3) @ normalise(p, h).T,
        lambda m, x, h: (torch.tanh(x) * 3**-0.5) @ (m.norm(h + m.positions(torch.arange(6))) * 3**-0.5).T,
        "theirs adds",
    ),
    "what the layer of the same weight reads": (
        dead,
        lambda m, x, h: m.down(torch.tanh(m.up(m.norm(h)))),
        "theirs computes `lambda m, x, h: m.down(torch.tanh(m.up(m.norm(h)))),` here; without that",
    ),
    "a table of cosines for sines": (
        turned,
        turned_there,
        "[jnp.arange(6)]`; with `sines = angles.sin()`",
    ),
    "a table within one product, which ours adds to another one first": (
        lambda p, x, h: jnp.tanh(h / 2 @ x.T + (jnp.asarray(GRID) + jnp.cos(jnp.asarray(GRID)))),
        table_added_there,
        "ours reads `lambda p, x, h: jnp.tanh(h / 2 @ x.T + (jnp.asarray(GRID) + jnp.cos(jnp.asarray(GRID)))),`; with",
    ),
    "a table of weights less, that is added to a mask": (
        lambda p, x, h: (jax.nn.softmax(h @ x.T + jnp.asarray(MASK)) @ h)[0],
        lambda m, x, h: (torch.softmax(h @ x.T + (m.positions(torch.arange(6)) + torch.tensor(MASK)), -1) @ h)[0],
        "theirs adds positions.weight here; without that, theirs goes on as ours does",
    ),
    "a term less in a function that is called twice": (
        lambda p, x, h: jax.nn.softmax((h * jnp.cos(GRID)) @ (x * jnp.cos(GRID)), -1) @ h,
        both_turned_there,
        "theirs adds the result of aten.mul here; without that, theirs goes on as ours does",
    ),
    "a norm less in layers that are little more than a norm": (
        lambda p, x, h: layers(jnp.maximum, lambda h: h, p["up"], h),
        lambda m, x, h: layers(torch.maximum, m.norm, m.up.weight, h),
        "here; without that, theirs goes on as ours does",
    ),
    "a branch that is multiplied by zeros, behind which there is a bias": (
        lambda p, x, h: x + ((h * jnp.zeros(6)) @ p["up"].T + p["bias"]),
        lambda m, x, h: x + (h @ m.up.weight.T + m.norm.bias),
        "ours multiplies by",
    ),
    "another comparison of whole numbers": (
        masked,
        lambda m, x, h: torch.tanh(h * (torch.tensor(LABELS) != -1)),
        "ours reads `mask = jnp.asarray(LABELS) > 0`; with",
    ),
    "a mask, where that of theirs holds ones": (
        lambda p, x, h: jnp.tanh(h) * GRID,
        lambda m, x, h: torch.tanh(h) * torch.ones(6, 6),
        "ours multiplies by",
    ),
    "an eps, beside another sum of what it is added to": (
        lambda p, x, h: h * jax.lax.rsqrt(x**2 + 1e-2) * jnp.log1p(x**2),
        lambda m, x, h: h * torch.rsqrt(x**2) * torch.log(1.0 + x**2),
        "ours adds 0.01 here",
    ),
    "an eps, where that of theirs changes no number": (
        lambda p, x, h: h * jax.lax.rsqrt(x**2 + 1e-2),
        lambda m, x, h: h * torch.rsqrt(x**2 + 1e-30),
        "another constant is added: 0.01 in ours, 1e-30 in theirs",
    ),
    "another slope": (
        lambda p, x, h: jnp.where(h > 0, h, 0.3 * h),
        lambda m, x, h: F.leaky_relu(h, 0.2),
        "another activation: leaky ReLU (0.3) in ours, leaky ReLU (0.2) in theirs",
    ),
    "two parts that are exchanged, in a function that two others call": (
        lambda p, x, h: once(parts_exchanged, h) + again(parts_exchanged, h),
        lambda m, x, h: once(in_parts_there, h) + again(in_parts_there, h),
        "two parts of `y = jnp.tanh(h)` (",
    ),
    "two results that are exchanged": (
        lambda p, x, h: long_product(h, jnp.tanh(x), jnp),
        lambda m, x, h: long_product(torch.tanh(x), h, torch),
        "with `h = x @ p[\"up\"].T` (",
    ),
    "the other sign": (
        lambda p, x, h: jnp.exp(x - h) * h,
        lambda m, x, h: torch.exp(h - x) * h,
        "the other sign",
    ),
}  # fmt: skip


def asked(mine, their, *, backward=False):
    """What parts two sides with these between their products."""
    return first_difference(partial(ours, mine), Between(their), WEIGHTS, {"x": NUMBERS}, backward=backward)


def normed_there(m, x, h):
    return m.norm(h)


@pytest.mark.parametrize("mine, their, said", CASES.values(), ids=CASES)
def test_what_one_side_does_alone_is_said(mine, their, said):
    found = asked(mine, their)
    assert said in found.kind
    assert found.sure


def test_what_agrees_for_one_step_alone_shows_nothing():
    """Without its root ours has the variance with eps, as theirs has it before the root; then they part again."""
    found = asked(lambda p, x, h: normalise(p, h, lambda variance: jnp.sqrt(variance) + 1e-5), normed_there)
    assert found
    assert "without that" not in (found.kind or "")


def test_what_counts_as_equal_in_a_search_does_so_in_its_experiments():
    """Else what differs by very little would be explained by whatever is left out."""
    ours, theirs = Values("ours"), Values("theirs")
    their = NUMBERS * (1 + 1e-10)
    for values, array in ((ours, NUMBERS), (theirs, their)):
        values.outputs["x"] = values.add(Value("input", "input", name="x"), array)
    match(ours, theirs, bar=1e-12)
    assert Experiments(ours, theirs).reached(0, their) == 0
    assert Experiments(ours, theirs).reached(0, NUMBERS) is None


def test_the_other_sign_is_named_at_the_factor_that_has_it():
    def turned(p, x, h):
        inverse = p["scale"] / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
        return inverse * (h.mean(-1, keepdims=True) - h) + p["bias"]

    found = asked(turned, normed_there)
    assert found.kind == "with the other sign, ours goes on as theirs does"
    assert found.ours.source.startswith("return inverse")


def test_a_formula_in_another_arrangement_is_not_taken_for_the_fault_behind_it():
    """Theirs scales both factors, so that our product has no equal in a right port either."""

    def scaled(p, x, h, by):
        return by(h @ x)

    def scaled_there(m, x, h):
        return (h / 6**0.25) @ (x / 6**0.25)

    right, wrong = (partial(scaled, by=by) for by in (lambda y: y / 6**0.5, lambda y: 6**0.5 / y))
    assert not asked(right, scaled_there, backward=True)
    assert asked(wrong, scaled_there).ours.source.startswith("right, wrong = ")


def test_what_the_other_side_computes_elsewhere_is_no_place():
    """Ours returns a row that theirs returns as well, and has no use for another one."""

    def rows_there(self, x):
        h = self.up(x)
        return {"first": h[0], "rest": h[1]}

    def rows(p, x):
        h = x @ p["up"].T
        return {"first": h[0], "rest": h[0]}

    found = part(rows, rows_there, backward=False)
    assert found.ours.source == 'return {"first": h[0], "rest": h[0]}'


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_gradient_that_is_cut_before_an_activation_is_named_where_it_is_cut(scale):
    """Also where ours has scaled what theirs scales later."""

    def cut(p, x, h):
        h = jax.lax.stop_gradient(scale * h)
        return jnp.tanh(h / scale) @ p["up"].T

    found = asked(cut, lambda m, x, h: m.up(torch.tanh(h)), backward=True)
    assert found.ours.source == "h = jax.lax.stop_gradient(scale * h)"
    assert found.sure


@pytest.mark.parametrize(
    "whole, line",
    [
        (False, "read = jax.lax.stop_gradient(jnp.tanh(h))"),
        (True, "h = jax.lax.stop_gradient(h + jnp.tanh(h) @ p[name].T)"),
    ],
)
def test_a_gradient_that_is_cut_in_layers_of_the_same_lines_is_named_where_it_is_cut(whole, line):
    """What the first layer is handed is then what the last one is, so that numbers do not tell the two apart; what the
    whole of a layer is made of may be handed nothing, and what each side computes for the norm behind it is another."""

    def layers(p, x, h):
        for name in ("up", "positions"):
            if whole:
                h = jax.lax.stop_gradient(h + jnp.tanh(h) @ p[name].T)
            else:
                read = jax.lax.stop_gradient(jnp.tanh(h))
                h = h + read @ p[name].T
        return normalise(p, h)

    def layers_there(m, x, h):
        for layer in (m.up, m.positions):
            h = h + torch.tanh(h) @ layer.weight.T
        return m.norm(h)

    found = asked(layers, layers_there, backward=True)
    assert found.ours.source == line
    assert found.sure


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_right_ports_stay_the_same(scale):
    right = partial(ours, lambda p, x, h: normalise(p, h))
    assert not first_difference(right, Between(normed_there), WEIGHTS, [scale * NUMBERS])


@pytest.mark.parametrize("length, told", [(12, True), (500, False)])
def test_a_batch_too_short_for_angles_is_said(length, told):
    def ours(p, x):
        angles = jnp.arange(x.shape[0])[:, None] / 100.0 ** (jnp.arange(6) / 6)
        return x @ p["up"].T * jnp.cos(angles)

    def rotated(m, x):
        return m.up(x) * torch.cos(torch.arange(len(x))[:, None] / 100.0 ** (torch.arange(6) / 6))

    found = part(ours, rotated, numbers(length, 6))
    assert not found
    assert found.few_positions == ("12, and angles part further on: give 500 or more",) * told


def test_scaling_at_another_place_is_not_sure_to_be_what_parts_them():
    """Both sides read the same there and make other numbers of it, before the place that is wrong."""

    def scaled(p, x, h):
        scaled = jnp.tanh(x) / 3
        return scaled @ jnp.abs(normalise(p, h)).T ** 1.5

    def scaled_there(m, x, h):
        return (torch.tanh(x) * 3**-0.5) @ (m.norm(h).square() * 3**-0.5).T

    found = asked(scaled, scaled_there)
    assert found
    assert not found.sure or "tanh" not in found.ours.source


def test_a_side_that_masks_everything_is_not_said_to_mask_nothing():
    """Its weights are all alike, as if it did."""

    def blind(p, x, h):
        return jax.nn.softmax(h @ x.T + jnp.full((6, 6), -3e38)) @ h

    def causal(m, x, h):
        return torch.softmax(h @ x.T + torch.full((6, 6), -3e38).triu(1), -1) @ h

    found = asked(blind, causal)
    assert found.kind == "the mask differs at 21 of 36 places: only ours masks key 0 from query 0, for example"


def test_a_table_is_followed_to_where_it_begins_to_differ():
    """Each side rounds the far distances in its own way, so that there steps have no equal in a right port either."""

    def bucketed(p, x, h, behind):
        away = jnp.arange(6) - jnp.arange(6)[:, None]
        half = behind(away)
        far = 1 + jnp.log(jnp.abs(away) / 1.5) / jnp.log(2.5)
        bucket = jnp.where(jnp.abs(away) < 2, jnp.abs(away), jnp.clip(far, max=2)) + half * 3
        return jax.nn.softmax(h @ x.T + p["positions"][bucket.astype(int)].mean(-1)) @ h

    def bucketed_there(m, x, h):
        away = torch.arange(6) - torch.arange(6)[:, None]
        half = away > 0
        far = 1 + ((away.abs() / 1.5).log() / np.log(2.5)).long()
        bucket = torch.where(away.abs() < 2, away.abs(), far.clamp(max=2)) + half.long() * 3
        return torch.softmax(h @ x.T + m.positions(bucket).mean(-1), -1) @ h

    right, wrong = (partial(bucketed, behind=by) for by in (lambda away: away > 0, lambda away: away >= 0))
    assert not asked(right, bucketed_there, backward=True)
    found = asked(wrong, bucketed_there)
    assert found.sure
    assert found.ours.source.startswith("right, wrong = ")
    assert found.theirs.source == "half = away > 0"


def test_a_table_of_two_numbers_does_not_agree_by_having_two():
    """Cosines and sines of one table: neither mends without the other, and what is before both does."""

    def turned(p, x, h):
        frequencies = 100.0 ** (-jnp.arange(0, 4, 2) / 4)
        angles = jnp.arange(6)[:, None] * jnp.tile(frequencies, 3)
        return h * jnp.cos(angles) + h[:, ::-1] * jnp.sin(angles)

    def turned_there(m, x, h):
        frequencies = 10000.0 ** (-torch.arange(0, 4, 2) / 4)
        angles = torch.arange(6)[:, None] * frequencies
        angles = torch.cat((angles, angles, angles), -1)
        return h * angles.cos() + h.flip(-1) * angles.sin()

    found = asked(turned, turned_there)
    assert found.sure
    assert found.ours.source.startswith("frequencies = ")


@pytest.mark.parametrize("seed", range(6))
def test_the_same_mask_in_scores_that_differ_is_no_difference(seed):
    """Keys and queries are as many, so that scores may be transposed; where none agree, chance says which."""
    scores, others = np.random.default_rng(seed).standard_normal((2, 9, 9))
    masked = np.arange(9) == 3
    mine = np.where(masked, -np.inf, scores)
    assert not masked_apart(mine, np.where(masked, -np.inf, others)).any()
    assert masked_apart(mine, np.where(masked[:, None], -np.inf, scores)).sum() == 16


def test_the_same_mask_with_batch_and_heads_exchanged_is_no_difference():
    """Theirs has [B, H, T, S], ours [K, B, G, T, S]."""
    scores, others = np.random.default_rng(0).standard_normal((2, 2, 4, 5, 5))
    masked = np.arange(5) < np.array([1, 3])[:, None, None, None]
    mine, their = (np.where(masked, -np.inf, each) for each in (scores, others))
    mine = mine.reshape(2, 2, 2, 5, 5).swapaxes(0, 1)
    assert not masked_apart(mine, their).any()
    assert not masked_apart(their, mine).any()


def test_a_part_that_is_masked_is_not_taken_for_one_that_is_not():
    """Theirs masks a key of the second sequence; of the first, it has the numbers that ours has of both."""

    def attend(p, x, h):
        bias = jnp.stack([p["positions"]] * 2) + jnp.zeros((2, 1, 6))
        return (jax.nn.softmax(h @ x.T + bias) @ h).sum(0)

    def attend_there(m, x, h):
        mask = torch.zeros(2, 1, 6)
        mask[1, 0, 5] = torch.finfo(torch.float64).min
        return (torch.softmax(h @ x.T + (m.positions.weight + mask), -1) @ h).sum(0)

    assert asked(attend, attend_there).kind == "only theirs masks here, ours does not"


def test_inputs_that_are_exchanged_are_named_where_they_are_read():
    """And not where the program reads one of them first: places are counted where the mask is, and that is right."""

    def placed(m, ids, mask):
        places = mask.cumsum(1) * mask
        return torch.tanh(m.tokens(ids) + m.places(places))

    def exchanged(p, ids, mask):
        places = mask.cumsum(1) * mask
        return jnp.tanh(p["tokens"][mask.astype("i4")] + p["places"][places])

    ids = np.random.default_rng(0).integers(0, 8, (3, 6))
    mask = np.tril(np.ones((3, 6), int), 3)
    theirs = Module(placed, **dict.fromkeys(("tokens", "places"), lambda: nn.Embedding(8, 6)))
    weights = {"tokens": "tokens.weight", "places": "places.weight"}
    found = first_difference(exchanged, theirs, weights, {"ids": ids, "mask": mask})
    assert found.sure
    assert found.kind == "ours reads input mask; with input ids in its place, ours goes on as theirs does"
    assert 'p["tokens"]' in found.ours.source
    assert "m.tokens(ids)" in found.theirs.source or found.theirs.module == "tokens"


def rounded_there(m, x, h):
    return torch.round(4 * (h + 1e-6 * torch.tanh(m.up(h))))


def norm_of_another_value_there(m, x, h):
    """The norm behind it begins as one of what it should read does."""
    branch = torch.tanh(m.up(h))
    h = h + branch
    h = h + torch.tanh(m.down(m.norm(branch)))
    return m.up(torch.tanh(F.layer_norm(h, (6,)) * m.positions.weight[0]))


def two_norms(p, x, h):
    h = h + jnp.tanh(h @ p["up"].T)
    h = h + jnp.tanh(normalise(p, h) @ p["down"].T)
    return jnp.tanh(standard(h) * p["positions"][0]) @ p["up"].T


def test_what_agrees_by_chance_shows_nothing():
    """Rounded numbers are the same for many, and so are the first steps of two norms of one value."""
    found = asked(lambda p, x, h: jnp.round(4 * (h + jnp.sin(3 * h @ p["up"].T))), rounded_there)
    assert "here, " not in (found.kind or "")
    found = asked(two_norms, norm_of_another_value_there)
    assert found.theirs.source == "h = h + torch.tanh(m.down(m.norm(branch)))"
    assert "here, " not in (found.kind or "")


def test_a_factor_of_a_number_that_is_returned_is_told():
    def loss_there(m, x):
        first, second = m.up(x).square().mean(), m.down(x).square().mean()
        first = (first + second) / 2
        return {"first": first, "total": first + second}

    def loss(p, x):
        first, second = (jnp.square(x @ p[name].T).mean() for name in ("up", "down"))
        return {"first": first + second, "total": first + second + second}

    found = part(loss, loss_there, names=("up", "down"), backward=False)
    assert found.kind == "theirs applies div here; without that, theirs goes on as ours does"
    assert found.theirs.source == "first = (first + second) / 2"


def test_a_number_that_is_divided_by_itself_proves_nothing():
    """Without the absolute value, either of two values is divided by its own mean, and the loss is the same."""

    def actor_there(m, x):
        first, second = torch.sigmoid(m.up(x)), torch.sigmoid(m.down(x)) - 0.4
        q = second
        scale = 2.5 / q.abs().mean()
        return {"first": first, "second": second, "loss": x.square().mean() - scale * q.mean()}

    def actor(p, x):
        first, second = jax.nn.sigmoid(x @ p["up"].T), jax.nn.sigmoid(x @ p["down"].T) - 0.4
        q = first
        scale = 2.5 / jnp.abs(q).mean()
        return {"first": first, "second": second, "loss": jnp.square(x).mean() - scale * q.mean()}

    found = part(actor, actor_there, names=("up", "down"), backward=False)
    assert not found.sure
    assert not found.confirmed


def test_an_array_without_numbers_has_no_copies():
    assert without_copies(np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("after, chance", [(1.0, True), (1.5, True), (1.0001, False), (np.nan, False), (2j, False)])
def test_a_single_number_that_becomes_a_simple_fraction_of_itself_proves_nothing(after, chance):
    assert is_by_chance(np.array(4.0), np.array(after)) is chance
    assert not is_by_chance(np.array([4.0, 2.0]), np.array([after, 1.0]))


def test_what_one_line_adds_up_is_not_sure_where_theirs_begins_on_another_line_too():
    """Theirs gives a layer its own input, where ours gives it the first one's; neither line of the sum is wrong."""

    def layer_there(m, x, first):
        x = 0.7 * torch.tanh(x)
        first = 0.3 * first
        out = 0.6 * x + 0.4 * m.down(x)
        return out + 0.6 * first + 0.4 * m.positions(first)

    def layers_there(m, x):
        x = layer_there(m, m.up(x), m.up(x))
        return layer_there(m, x, x)

    def layer(p, x, first):
        mixed = 0.7 * jnp.tanh(x)
        kept = 0.3 * first
        return 0.6 * (mixed + kept) + 0.4 * (mixed @ p["down"].T + kept @ p["positions"].T)

    def layers(p, x):
        first = x @ p["up"].T
        return layer(p, layer(p, first, first), first)

    found = part(layers, layers_there, names=("up", "down", "positions"), backward=False)
    assert found.kind is None
    assert not found.confirmed


def test_where_what_the_other_side_stops_is_first_read_is_named():
    """And not where the gradient is handed back that goes on to it."""

    def target_there(m, x):
        aim = m.down(x).detach()
        crossed = torch.cat([aim[3:], aim[:3]])
        return (m.up(x) - crossed / (crossed.square().mean() + 1)).square().mean()

    def target(p, x):
        aim = x @ p["down"].T
        crossed = jnp.concatenate([aim[3:], aim[:3]])
        return jnp.square(x @ p["up"].T - crossed / (jnp.square(crossed).mean() + 1)).mean()

    found = part(target, target_there, names=("up", "down"))
    assert found.sure
    assert found.ours.source == "crossed = jnp.concatenate([aim[3:], aim[:3]])"
    assert found.theirs.source == "aim = m.down(x).detach()"


def test_where_a_gradient_is_handed_on_is_named_and_not_where_it_is_added():
    """As that of rounded numbers, which is handed to what was rounded."""

    def straight(p, x, h, through=lambda h, q: h + jax.lax.stop_gradient(q - h)):
        q = jnp.tanh(x @ p["positions"].T)
        loss = jnp.square(q - jax.lax.stop_gradient(h)) + jnp.square(jax.lax.stop_gradient(q) - h)
        return jnp.sin(through(h, q)) + loss

    def straight_there(m, x, h):
        q = torch.tanh(x @ m.positions.weight.T)
        loss = (q - h.detach()).square() + (q.detach() - h).square()
        q = h + (q - h).detach()
        return torch.sin(q) + loss

    assert not asked(straight, straight_there, backward=True)
    found = asked(partial(straight, through=lambda h, q: q + 0 * h), straight_there, backward=True)
    assert found.theirs.source == "q = h + (q - h).detach()"


def goal_there(m, x, h):
    with torch.no_grad():
        goal = torch.tanh(m.down(h))
    return torch.sin(goal - h) * goal.cos()


def quantized_there(m, x, h, names=("positions", "norm")):
    """What is left is rounded again, and the rounded numbers hand their gradient to what was rounded."""
    total, rest = 0, h
    for name in names:
        q = torch.tanh(x) * getattr(m, name).weight
        q = rest + (q - rest).detach()
        rest = rest - q.detach()
        total = total + q
    return torch.sin(total) + torch.cos(rest)


def quantized(p, x, h, names=("positions", "scale"), given=False, left=jax.lax.stop_gradient):
    total, rest = 0, h
    for name in names:
        q = jnp.tanh(x) * p[name]
        q = q if given else rest + jax.lax.stop_gradient(q - rest)
        rest = rest - left(q)
        total = total + q
    return jnp.sin(total) + jnp.cos(rest)


HANDED = {
    "to what theirs computes without gradients": (
        lambda p, x, h: jnp.sin((goal := jnp.tanh(h @ p["down"].T)) - h) * jnp.cos(goal),
        goal_there,
        "theirs",
        "goal = torch.tanh(m.down(h))",
        "ours hands a gradient back here, theirs does not: it is detached",
    ),
    "not to what was rounded": (
        partial(quantized, names=["positions"], given=True),
        partial(quantized_there, names=["positions"]),
        "theirs",
        "q = rest + (q - rest).detach()",
        "each hands a gradient back to something else here",
    ),
    "to what is taken off": (
        partial(quantized, left=lambda q: q),
        quantized_there,
        "ours",
        "rest = rest - left(q)",
        "ours hands a gradient back here, theirs does not: it is detached",
    ),
}


@pytest.mark.parametrize("mine, their, side, source, said", HANDED.values(), ids=HANDED)
def test_who_is_handed_a_gradient_is_said(mine, their, side, source, said):
    found = asked(mine, their, backward=True)
    assert getattr(found, side).source == source, str(found)
    assert found.kind == said


class SineByHand(torch.autograd.Function):
    """The sine, computed without gradients, with its own derivative; a detach behind it is one all the same."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return torch.sin(h)

    @staticmethod
    def backward(ctx, slope):
        (h,) = ctx.saved_tensors
        return slope * torch.cos(h)


@pytest.mark.parametrize("power", [1, 2])
def test_what_a_function_of_autograd_computes_is_not_detached(power):
    """A wrong derivative of ours hands nothing to anything else either."""

    @jax.custom_vjp
    def same(y):
        return y

    same.defvjp(lambda y: (y, y), lambda y, slope: (slope + (power - 1) * jnp.cos(y),))

    def forward(m, x, h):
        y = SineByHand.apply(h)
        return torch.tanh((y.detach() if power == 1 else y) * m.norm.weight) * y

    found = asked(lambda p, x, h: jnp.tanh(same(jnp.sin(h)) * p["scale"]) * jnp.sin(h), forward, backward=True)
    assert found.sure == (power == 1), str(found)
    assert found.theirs.operation == "aten.detach" or power == 2
    assert "something else" not in (found.kind or "")


def test_a_mask_behind_the_lines_is_not_sure_there():
    """What ours takes along an axis, and theirs shifts, has no equal in the right port: what is hidden differs."""
    places = np.arange(6) + np.arange(6)[:, None] // 2

    def shifted(p, x, h, seen=places < 6):
        scores = jnp.take_along_axis(h, jnp.asarray(places % 6), -1)
        scores = scores + x
        return jax.nn.softmax(jnp.where(seen, scores, -1e30), -1) @ h

    def shifted_there(m, x, h):
        wide = F.pad(h, (0, 6))
        scores = torch.stack([row[n // 2 : n // 2 + 6] for n, row in enumerate(wide)])
        scores = scores + x
        return torch.softmax(scores.masked_fill(torch.tensor(places >= 6), -1e30), -1) @ h

    assert not asked(shifted, shifted_there)
    found = asked(partial(shifted, seen=places < 5), shifted_there)
    assert "perhaps the mask differs at 6 of 36 places: only ours masks" in found.kind
    assert not found.sure


def test_of_two_places_that_stop_a_gradient_the_one_that_theirs_has_not_is_named():
    def stopped(p, x, h):
        goal = jnp.tanh(h @ p["down"].T)
        near = jnp.square(jax.lax.stop_gradient(jnp.sin(goal)) - h)
        return near + jnp.square(jnp.cos(h) - jax.lax.stop_gradient(goal))

    def stopped_there(m, x, h):
        goal = torch.tanh(m.down(h))
        return (torch.sin(goal) - h).square() + (torch.cos(h) - goal.detach()).square()

    found = asked(stopped, stopped_there, backward=True)
    assert found.ours.source.startswith("near = ")


def test_a_small_gradient_of_what_theirs_does_not_reach_is_a_difference():
    """As through a softmax that is nearly sure."""

    def teach(p, x, h):
        return h * jax.nn.softmax((x @ p["down"].T) * 1e2).sum() + jax.nn.softmax(5.6e2 * x @ p["positions"].T)

    def teach_there(m, x, h):
        with torch.no_grad():
            goal = torch.softmax(5.6e2 * x @ m.positions.weight.T, -1)
        return h * torch.softmax(m.down(x) * 1e2, -1).sum() + goal

    found = asked(teach, teach_there, backward=True)
    assert found.differing == ("the gradient of positions.weight: zero in theirs",)


@pytest.mark.parametrize("on", ["ours", "theirs"])
def test_a_gradient_that_stops_at_what_theirs_does_not_train_is_not_cut_there(on):
    """A vector that ours stops, and that theirs keeps as a buffer, is read behind the cut."""

    def scaled(p, x, h):
        h = jax.lax.stop_gradient(h) if on == "ours" else h
        return jnp.sin(h) * jnp.sum(h * jax.lax.stop_gradient(p["vector"]))

    def scaled_there(m, x, h):
        h = h.detach() if on == "theirs" else h
        return torch.sin(h) * (h * m.vector).sum()

    theirs = Between(scaled_there)
    theirs.register_buffer("vector", torch.randn(6))
    found = first_difference(partial(ours, scaled), theirs, WEIGHTS | {"vector": "vector"}, [NUMBERS])
    line = {"ours": found.ours, "theirs": found.theirs}[on]
    assert line.source == f'h = {"jax.lax.stop_gradient(h)" if on == "ours" else "h.detach()"} if on == "{on}" else h'


def test_a_gradient_of_zero_behind_many_steps_is_found():
    """Each of which reads the one before it twice: there are 2^40 ways back."""

    def steps(sin, h):
        for _ in range(40):
            h = h + 0.01 * sin(h)
        return h

    found = asked(
        lambda p, x, h: jax.lax.stop_gradient(steps(jnp.sin, h)), lambda m, x, h: steps(torch.sin, h), backward=True
    )
    assert "detached" in found.kind


def steps_there(m, x, h):
    """From a state that is zero, backwards."""
    state = torch.zeros_like(x[0])
    for row in h.flip(0):
        both = torch.stack([row, state])
        state = torch.lerp(state, torch.tanh(m.up(both)).sum(0), torch.sigmoid(m.down(both)).prod(0))
    return h + state


def steps(p, x, h):
    def step(state, row):
        both = jnp.stack([row, state])
        gate, new = jax.nn.sigmoid(both @ p["down"].T).prod(0), jnp.tanh(both @ p["up"].T).sum(0)
        return (1 - gate) * state + gate * new, None

    return h + jax.lax.scan(step, jnp.zeros_like(x[0]), h)[0]


def test_a_step_from_a_state_of_zero_is_not_said_to_be_more_than_theirs():
    assert "without that" not in (asked(steps, steps_there).kind or "")


def test_a_table_that_is_right_elsewhere_is_named_where_the_wrong_one_is_read():
    """And not where both are made."""

    def summed(m, x, edges):
        start, end = edges[0], edges[1]
        messages = torch.tanh(m.up(x[start]) - x[end])
        return torch.zeros_like(x).index_add(0, end, messages)

    def summed_wrongly(p, x, edges):
        start, end = edges
        messages = jnp.tanh(x[start] @ p["up"].T - x[end])
        return jax.ops.segment_sum(messages, start, 6)

    edges = np.array([[0, 1, 2, 3, 4, 5, 0], [1, 2, 4, 4, 5, 0, 3]])
    found = part(summed_wrongly, summed, NUMBERS, edges)
    assert found.ours.source == "return jax.ops.segment_sum(messages, start, 6)"
    assert found.theirs.source == "return torch.zeros_like(x).index_add(0, end, messages)"
    assert found.sure


def test_a_loss_that_is_one_operation_masks_inside():
    """As that of alignments does; what ours masks on the way to it may be right."""

    def aligned(factor, p, x, labels):
        log_p = jax.nn.log_softmax(x @ p["up"].T)[:2]
        masked = jnp.where(jnp.arange(6) == labels[:, None], log_p, -jnp.inf)
        return {"loss": -factor * masked.max(-1).sum()}

    def aligned_there(m, x, labels):
        log_p = torch.log_softmax(m.up(x), -1)
        return {"loss": F.ctc_loss(log_p[:2, None], labels[None], [2], [2], reduction="sum")}

    given = aligned_there, NUMBERS, np.array([1, 3])
    assert not part(partial(aligned, 1.0), *given, backward=False)
    found = part(partial(aligned, 2.0), *given)
    assert found
    assert "masks here" not in (found.kind or "")


def test_tables_in_another_order_are_no_weights_that_are_read_wrongly():
    def added(p, x, h):
        return h + np.concatenate([np.cos(np.arange(3.0)), np.sin(np.arange(3.0))])

    def added_there(m, x, h):
        angles = torch.arange(3, dtype=x.dtype)
        return h + torch.cat([angles.sin(), angles.cos()])

    found = asked(added, added_there)
    assert found.stage == "forward"
    assert not found.parameters


def test_whole_numbers_that_are_returned_are_compared():
    def best_there(m, x):
        h = m.up(x)
        return {"h": h, "best": (h + m.down(x)).argmax(-1)}

    def best(p, x):
        h = x @ p["up"].T
        return {"h": h, "best": h.argmax(-1)}

    found = part(best, best_there, names=("up", "down"))
    assert found
    assert found.differing[0].startswith("best")
    assert "argmax" in found.ours.source


def recurrent(p, x, split):
    def step(state, row):
        h, c = state
        gates = jnp.split(row @ p["ih"].T + h @ p["hh"].T + p["bias"], 4)
        i, f, g, o = (gates[n] for n in split)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return jax.lax.scan(step, (jnp.zeros(6), jnp.zeros(6)), x)[1]


def recurrent_there(m, x):
    h, c, found = torch.zeros(6, dtype=x.dtype), torch.zeros(6, dtype=x.dtype), []
    for row in x:
        i, f, g, o = (m.ih(row) + m.hh(h)).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        found.append(h)
    return torch.stack(found)


@pytest.mark.parametrize("split", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_what_theirs_adds_one_step_later_is_not_left_out(split):
    theirs = Module(recurrent_there, ih=lambda: nn.Linear(6, 24), hh=lambda: nn.Linear(6, 24, bias=False))
    weights = {"ih": "ih.weight", "hh": "hh.weight", "bias": "ih.bias"}
    found = first_difference(partial(recurrent, split=split), theirs, weights, [NUMBERS], backward=False)
    assert bool(found) == (split != (0, 1, 2, 3))
    assert "without that" not in (found.kind or "")


@pytest.mark.parametrize("masked", [-torch.inf, 1 - 2.0**32])
def test_zeros_in_the_place_of_a_mask_are_named(masked):
    hidden = np.triu(np.ones((6, 6), bool), 1)

    def blind(p, x, h):
        return jax.nn.softmax(jnp.where(hidden, 0.0, h @ x.T)) @ h

    def causal(m, x, h):
        return torch.softmax((h @ x.T).masked_fill(torch.tensor(hidden), masked), -1) @ h

    assert asked(blind, causal).kind == "theirs reads a mask here where ours reads zeros"


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_that_are_taken_wrongly_have_no_order_that_is_sure(sign):
    def rolled(p, x):
        h = x @ p["up"].T
        share = jax.nn.softmax(h.mean(-1)[:3])
        at = (jnp.arange(6)[None] + sign * jnp.arange(1, 4)[:, None]) % 6
        return jnp.einsum("k,ktd->td", share, h[at])

    def rolled_there(m, x):
        h = m.up(x)
        share = torch.softmax(h.mean(-1)[:3], -1)
        return sum(share[k] * h.roll(-k - 1, 0) for k in range(3))

    found = part(rolled, rolled_there, backward=False)
    assert bool(found) == (sign == -1)
    assert not found.verdict.startswith("sure")


def test_a_norm_behind_a_branch_and_not_before_it_leaves_no_branch_out():
    def behind(p, x, h):
        return h + normalise(p, jnp.tanh(h @ p["up"].T))

    found = asked(behind, lambda m, x, h: h + torch.tanh(m.up(m.norm(h))))
    assert found
    assert "without that" not in (found.kind or "")


def test_a_side_that_writes_rows_into_a_buffer_is_run_on_to_its_end():
    def rows_there(m, x):
        rows, found = torch.sin(0.5 * m.up(x)), torch.zeros_like(x)
        for n in range(len(x)):
            found[:, n] = torch.tanh(rows[:, n])
        return m.down(found)

    found = part(lambda p, x: jnp.tanh(jnp.sin(x @ p["up"].T)) @ p["down"].T, rows_there, names=("up", "down"))
    assert "0.5" in found.kind
    assert found.confirmed


def test_a_factor_is_told_where_it_comes_in_and_not_by_its_square():
    """A norm squares what theirs has scaled, and what comes out of it has no factor any more."""

    def normed(p, x, h):
        return h + h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * p["scale"]

    def normed_there(m, x, h):
        h = 4.0 * h
        return h + h * torch.rsqrt(torch.mean(h * h, -1, keepdim=True) + 1e-6) * m.norm.weight

    found = asked(normed, normed_there)
    assert found.kind == "theirs multiplies by 4 here; without that, theirs goes on as ours does"
    assert found.confirmed


@pytest.mark.parametrize("merged", [(4, 2, 5, 5), (8, 5, 5)], ids=["as ours", "batch and heads merged"])
def test_masks_that_hide_nothing_in_common_differ_everywhere(merged):
    scores, hidden = numbers(4, 2, 5, 5, seed=2), np.arange(5) < np.array([4, 5, 2, 3])[:, None, None, None]
    mine, their = (np.where(mask, -np.inf, scores) for mask in (hidden, ~hidden))
    assert masked_apart(mine, their.reshape(merged)).all()


def test_whole_numbers_are_no_activation():
    """None of them is below zero, so that many a function changes nothing."""

    def places_there(m, x):
        h = m.up(x).reshape(-1, 6)
        return {"h": h, "places": h.argmin(1).unsqueeze(1).view(x.shape[:-1])}

    found = part(
        lambda p, x: {"h": (h := x @ p["up"].T).reshape(-1, 6), "places": jnp.argmin(h, -1).swapaxes(1, 2)},
        places_there,
        numbers(2, 3, 3, 6),
        backward=False,
    )
    assert found
    assert "activation" not in (found.kind or "")


def test_an_input_is_named_where_another_one_is_computed_with():
    """Which theirs reads on another line first."""

    def shares(p, x, counts, others):
        return jnp.tanh(x @ p["up"].T).sum(1) / jnp.maximum(others // 2, 1)

    def shares_there(m, x, counts, others):
        h = torch.tanh(m.up(x)) + 0 * counts[:, None]
        return h.sum(1) / counts.clamp(min=1)

    found = part(shares, shares_there, NUMBERS, np.array([4, 3, 2, 6, 5, 1]), np.array([20, 9, 16, 4, 6, 8]))
    assert found.kind.endswith("with input 1 in its place, ours goes on as theirs does")
    assert "clamp" in found.theirs.source


def test_two_results_that_are_exchanged_are_named_where_they_are_read():
    def forward(m, x):
        mine, other = [torch.log_softmax(y, -1) for y in (m.up(x), m.down(x))]
        return (mine.exp() * (mine - other)).sum(-1)

    def ours(p, x):
        mine, other = [jax.nn.log_softmax(x @ p[name].T) for name in ("up", "down")]
        return (jnp.exp(other) * (other - mine)).sum(-1)

    found = part(ours, forward, names=("up", "down"))
    assert "two results of" in found.kind
    assert found.ours.source == "return (jnp.exp(other) * (other - mine)).sum(-1)"


def test_axes_are_those_of_what_is_read_there():
    def ours(p, x):
        moved, kernel = jnp.transpose(x, (0, 3, 2, 1)), p["up"].reshape(2, 2, 3, 3).transpose(2, 3, 1, 0)
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(moved, kernel, (1, 1), "VALID", dimension_numbers=numbers)

    found = part(ours, lambda m, x: F.conv2d(x, m.up.weight.view(2, 2, 3, 3)).permute(0, 2, 3, 1), numbers(2, 2, 8, 8))
    assert "with axes 1 and 2 of input 0, as it is read here ([2, 8, 8, 2]), exchanged" in found.kind


def test_a_sign_within_complex_numbers_is_not_seen_and_nothing_is_sure():
    table = numbers(10, seed=8)
    found = part(
        lambda p, x: jnp.fft.irfft(jax.lax.complex(x @ p["up"].T, -x)) * table,
        lambda m, x: torch.fft.irfft(torch.complex(m.up(x), x)) * torch.from_numpy(table),
    )
    assert found.stage == "forward"
    assert not found.sure


def test_a_number_that_is_subtracted_from_itself_stops_no_gradient():
    def forward(m, x):
        h = torch.softmax(m.up(x), -1)
        return torch.round(h) + (h - h.detach()), (h**2).sum(0)

    def ours(p, x):
        h = jax.nn.softmax(x @ p["up"].T)
        return jnp.round(h), (h**2).sum(0)

    found = part(ours, forward)
    assert found.stage == "backward"
    assert not found.sure, str(found)


def test_an_input_is_not_named_where_a_mask_is_made_of_it():
    kept, tokens = np.array([1, 1, 1, 1, 0, 1]), np.array([3, 2, 4, 5, 2, 3])

    def forward(m, x, kept, tokens):
        keep = kept.bool() & ~(tokens.unsqueeze(-1) == torch.tensor([2, 4])).any(-1)
        return torch.softmax(m.up(x).masked_fill(~keep, -1e4), -1)

    def ours(p, x, kept, tokens):
        keep = (kept > 0) & ~(tokens[:, None] == jnp.array([2])).any(-1)
        return jax.nn.softmax(jnp.where(keep, x @ p["up"].T, -1e4))

    found = part(ours, forward, NUMBERS, kept, tokens)
    assert found
    assert not (found.sure and "input" in found.kind), str(found)


def test_a_sign_is_no_other_number_and_a_small_number_no_slope():
    def forward(m, x):
        h = m.up(x)
        return torch.stack([h * 0.4886 - 0.25 * x, h * 0.2]).sum(0), torch.relu(h) + 1e-12

    def ours(p, x):
        h = x @ p["up"].T
        return jnp.stack([-0.4886 * h - 0.25 * x, h * 0.2]).sum(0), jax.nn.sigmoid(h) + 1e-12

    found = part(ours, forward)
    assert found
    assert "another number" not in (found.kind or "")
    activation = part(lambda p, x: ours(p, x)[1], lambda m, x: forward(m, x)[1])
    assert activation.kind == "another activation: the sigmoid in ours, ReLU in theirs"


def test_a_buffer_of_which_a_part_is_written_is_no_copy_of_that():
    marks = np.array([[1, 2, 0, 4, 5, 3]])

    def forward(m, x, marks):
        shifted = marks.new_full(marks.shape, -1)
        shifted[:, :-1] = marks[:, 1:]
        return F.cross_entropy(m.up(x), shifted[0], ignore_index=-1)

    def ours(p, x, marks):
        shifted = jnp.pad(marks[:, :-1], ((0, 0), (1, 0)), constant_values=-1)[0]
        each = -jnp.take_along_axis(jax.nn.log_softmax(x @ p["up"].T), jnp.maximum(shifted, 0)[:, None], 1)[:, 0]
        return (each * (shifted >= 0)).sum() / (shifted >= 0).sum()

    found = part(ours, forward, NUMBERS, marks)
    assert found
    assert "input" not in (found.kind or "")


def test_a_gradient_that_is_stopped_in_what_is_subtracted_is_named():
    """It is subtracted from something else that is made of it."""

    def ours(p, x):
        h = x @ p["up"].T
        return jnp.tanh(h) - h

    found = part(ours, lambda m, x: torch.tanh(h := m.up(x)) - h.detach())
    assert found.sure
    assert "h.detach()" in found.theirs.source
    assert found.theirs.operation == "aten.detach"


def test_a_weight_that_is_read_wrongly_each_time_is_sure():
    def repeated(h, weight):
        for _ in range(3):
            h = h @ weight.T
        return h

    found = part(
        lambda p, x: jnp.exp(repeated(x @ p["up"].T, p["up"])),
        lambda m, x: torch.exp(repeated(m.up(x), m.down.weight)),
        names=("up", "down"),
    )
    assert found.kind == "ours reads up.weight, as up, where theirs reads down.weight"
    assert found.sure


def test_what_is_subtracted_is_no_constant_that_is_added():
    found = asked(lambda p, x, h: jnp.tanh(h - 0.01), lambda m, x, h: torch.tanh(h - 1e-13))
    assert found
    assert "is added" not in (found.kind or "")


def test_the_sign_of_a_part_of_complex_numbers_is_not_sure_either():
    def forward(m, x):
        z = torch.complex(m.up(x), x) * 2.5
        return z.real * 1.5 + torch.sin(z.imag) * 0.3

    def ours(p, x):
        z = jnp.conj(jax.lax.complex(x @ p["up"].T, x)) * 2.5
        return z.real * 1.5 + jnp.sin(z.imag) * 0.3

    found = part(ours, forward)
    assert found
    assert not found.sure, str(found)


def test_a_gradient_that_is_stopped_before_a_norm_is_named():
    """The norm subtracts a mean of it, which is stopped as well."""
    found = asked(
        lambda p, x, h: h + normalise(p, h), lambda m, x, h: h + layer_norm_in_steps(m, h.detach()), backward=True
    )
    assert found.theirs.operation == "aten.detach"


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_a_weight_that_one_side_detaches_is_named(side):
    def forward(m, x):
        weight = m.up.weight.detach() if side == "theirs" else m.up.weight
        h = torch.tanh(x @ weight.T)
        return torch.tanh((h + m.down(h)) @ m.down.weight)

    def ours(p, x):
        h = jnp.tanh(x @ (jax.lax.stop_gradient(p["up"]) if side == "ours" else p["up"]).T)
        return jnp.tanh((h + h @ p["down"].T) @ p["down"])

    found = part(ours, forward, names=("up", "down"))
    assert found.verdict.startswith("sure")
    assert "it is detached" in found.kind
    assert getattr(found, side).operation in ("stop_gradient", "aten.detach")


def layer_norm_in_steps(m, h):
    h = h.view(h.shape) - h.mean(-1, keepdim=True)
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * m.norm.weight + m.norm.bias


def test_what_is_chosen_by_other_scores_says_nothing_of_the_scores():
    """Ours adds what theirs takes off after the first choice, and so chooses as by the scores alone: that is tried."""

    def forward(m, x):
        score = m.up(x).sum(-1)
        chosen = torch.zeros_like(score)
        for _ in range(2):
            value = torch.where(chosen.sum(-1, keepdim=True) > 0, score - 9 * torch.tanh(score * 2), score)
            pick = value.masked_fill(chosen.bool(), -torch.inf).argmax(-1)
            chosen = chosen + F.one_hot(pick, 6).to(x.dtype)
        return (torch.sin(x) * chosen[:, None]).sum(0)

    def ours(p, x):
        score = (x @ p["up"].T).sum(-1)

        def step(chosen, first):
            value = jnp.where(first, score, score + 9 * jnp.tanh(score * 2))
            pick = jnp.argmax(jnp.where(chosen > 0, -jnp.inf, value))
            return chosen.at[pick].set(1.0), None

        chosen, _ = jax.lax.scan(step, jnp.zeros_like(score), jnp.arange(2) == 0)
        return (jnp.sin(x) * chosen[:, None]).sum(0)

    found = part(ours, forward, backward=False)
    assert found.tried
    assert found.verdict.startswith("not sure")
    assert "if that held" not in found.kind
    assert found.ours.source.startswith("value = ")


def test_one_step_of_a_recurrence_that_is_mended_alone_is_no_proof():
    """Ours goes the other way; in the step that comes first in both, it goes on without what it adds there."""
    alive = np.arange(5) < 4

    def forward(m, x):
        found, beta = [], torch.zeros(6, dtype=x.dtype)
        scores = torch.log_softmax(m.up(x), -1)
        for t in reversed(range(5)):
            new = torch.logsumexp(scores.T.log_softmax(-1) + (scores[t + 1] + beta)[None], 1)
            beta = torch.where(torch.tensor(alive[t]), new, beta)
            found.append(beta)
        return torch.stack(found[::-1])

    def ours(p, x):
        scores = jax.nn.log_softmax(x @ p["up"].T)

        def step(beta, given):
            score, on = given
            new = jax.nn.logsumexp(jax.nn.log_softmax(scores.T) + (score + beta)[None, :], axis=1)
            return (jnp.where(on, new, beta),) * 2

        return jax.lax.scan(step, jnp.zeros(6, x.dtype), (scores[1:], alive))[1]

    found = part(ours, forward, backward=False)
    assert found
    assert not found.verdict.startswith("sure"), str(found)


def test_a_choice_that_both_make_is_not_called_one_too_many():
    """Of what is returned, theirs goes on as ours would if it did not choose at all."""
    rows = np.arange(6)[:, None]
    kept = 1.0 * (rows < 5)

    def chosen(p, x, h):
        return jnp.where(rows < 3, jnp.tanh(h), h) * kept

    def chosen_there(m, x, h):
        return torch.where(torch.tensor(rows < 5), torch.tanh(h), h) * torch.tensor(kept)

    found = asked(chosen, chosen_there)
    assert found.sure
    assert found.kind == "both choose between the same two arrays here, by other masks"
    assert "jnp.where" in found.ours.source
    assert "torch.where" in found.theirs.source


@pytest.mark.parametrize("wrong", [False, True])
def test_what_agrees_in_some_rows_may_be_wrong_in_the_others(wrong):
    """Theirs computes a part of the numbers, and has them nowhere beside others that are wrong."""

    def within(p, x, h):
        h = h[:, ::2]
        inside = jnp.abs(h) < 0.7
        safe = jnp.where(inside, h, 0.0)
        inner = jnp.where(inside, jnp.sin(3 * safe) + 2, safe if wrong else h)
        return x.at[:, np.arange(0, 6, 2)].set(inner)

    def within_there(m, x, h):
        h = h[:, ::2]
        inside = h.abs() < 0.7
        after, out = h.clone(), torch.empty_like(x)
        after[inside] = torch.sin(3 * h[inside]) + 2
        out[:, torch.arange(1, 6, 2)] = x[:, 1::2]
        out[:, torch.arange(0, 6, 2)] = after
        return out

    found = asked(within, within_there)
    assert bool(found) == wrong
    if found:
        assert not found.sure
        assert any("inner = " in site.source for site in (found.ours, *found.others))


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_factor_of_complex_numbers_that_is_taken_back_is_not_sure(factor):
    """As that of a Fourier transform, which each side may divide by where it goes there or comes back."""

    def filtered(p, x, h):
        return jnp.fft.irfft(jnp.fft.rfft(h) * jnp.array([1.0, factor, 1.0, 1.0]), 6)

    def filtered_there(m, x, h):
        spectrum = torch.fft.rfft(h, norm="forward") * torch.tensor([1.0, 2.0, 1.0, 1.0])
        return torch.fft.irfft(spectrum, 6, norm="forward")

    found = asked(filtered, filtered_there)
    assert bool(found) == (factor != 2.0)
    if found:
        assert not found.sure
