"""Libraries compute parts in float32 whatever they are given: `first_difference` looks behind that."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import first_difference
from parity.differ.jax_values import unrounded
from parity_tests.small_modules import Module, linear_rows, numbers

pytestmark = pytest.mark.usefixtures("as_others_write")
WIDTH = 48
"""1/sqrt(48) has no end in float32."""
X = numbers(2, 7, WIDTH)
PARTS = ("query", "key", "value", "output")
WEIGHTS = linear_rows(*PARTS) | {"norm.scale": "norm.weight", "norm.bias": "norm.bias"}


def theirs(narrow):
    def forward(self, x):
        h = self.norm(x)
        q, k, v = (part(h).unsqueeze(1) for part in (self.query, self.key, self.value))
        if narrow:
            scores = (q @ k.transpose(-1, -2)).float() * WIDTH**-0.5
            scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
            mixed = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.output(mixed.squeeze(1))

    return Module(forward, **dict.fromkeys(PARTS, lambda: nn.Linear(WIDTH, WIDTH)), norm=lambda: nn.LayerNorm(WIDTH))


def ours(fault):
    """In JAX; the line of each fault says its name."""

    def norm(x, p):
        y = x.astype(jnp.float32)
        mean = y.mean(-1, keepdims=True)
        variance = ((y - mean) ** 2).mean(-1, keepdims=True)
        eps = 1e-6 if fault == "eps" else 1e-5
        return ((y - mean) * jax.lax.rsqrt(variance + eps)).astype(x.dtype) * p["scale"] + p["bias"]

    def forward(p, x):
        h = norm(x, p["norm"])
        q, k, v = (h @ p[name]["kernel"] + p[name]["bias"] for name in PARTS[:3])
        causal = fault != "mask"
        scale = 0.15 if fault == "scale" else None
        # jax.nn computes the scores and their softmax in float32.
        mixed = jax.nn.dot_product_attention(*(x[:, :, None] for x in (q, k, v)), is_causal=causal, scale=scale)[
            :, :, 0
        ]
        if fault == "factor":
            mixed = mixed * 3
        if fault == "detached":
            mixed = jax.lax.stop_gradient(mixed)
        if fault == "bfloat16":
            mixed = mixed.astype(jnp.bfloat16).astype(x.dtype)
        return x + mixed @ p["output"]["kernel"] + p["output"]["bias"]

    return forward


def asked(fault, narrow):
    return first_difference(ours(fault), theirs(narrow), WEIGHTS, [X])


@pytest.mark.parametrize("narrow", [False, True])
def test_a_right_port_is_the_same_and_its_float32_is_named(narrow):
    found = asked("", narrow)
    assert not found
    assert any("dot_product_attention" in site.source for site in found.narrow)
    assert any("x.astype(jnp.float32)" in site.source for site in found.narrow)
    assert any(".float()" in site.source for site in found.narrow) == narrow
    assert found.rounded[0].startswith("output: ")
    assert "made to compute in float64: " in str(found)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    "fault, stage, line, kind",
    [
        ("eps", "forward", "variance + eps", "another constant is added: 1e-06 in ours, 1e-05 in theirs"),
        ("mask", "forward", "dot_product_attention", "only theirs masks"),
        ("scale", "forward", "dot_product_attention", "ours is 1.03"),
        ("factor", "forward", "mixed * 3", "ours multiplies by 3 here"),
        ("detached", "backward", "stop_gradient(mixed)", "it is detached"),
    ],
)
def test_a_fault_behind_float32_is_found(fault, stage, line, kind, narrow):
    found = asked(fault, narrow)
    assert (found.stage, found.sure) == (stage, True)
    assert line in found.ours.source
    assert kind in (found.kind or "")


def test_a_type_with_still_fewer_digits_is_a_difference_of_its_own():
    found = asked("bfloat16", False)
    assert "lowers the type here: float64 to bfloat16" in (found.kind or "")
    assert found.sure
    assert "astype(jnp.bfloat16)" in found.ours.source


@pytest.mark.parametrize("number", [0.1, 1 / 48, 48**-0.5, -(300**0.5), 0.044715, np.sqrt(2 / np.pi), np.pi, 1e-5, 0.0])
def test_numbers_in_float32_are_what_somebody_wrote(number):
    assert unrounded(np.float32(number), np.dtype(np.float32)) == pytest.approx(number, rel=1e-15)
    odd = np.float32(0.123456789)
    assert np.float32(unrounded(odd, odd.dtype)) == odd


@pytest.mark.parametrize("number", [0.79788456, 0.1234567, -2e-7])
def test_of_two_numbers_that_round_alike_the_one_in_the_line_is_meant(number):
    """The first is sqrt(2/pi) to eight digits, as Bloom has it."""
    assert unrounded(np.float32(number), np.dtype(np.float32), f"x * {number} + 3.5") == number


def rounded_there(self, x):
    """As models of others keep a table and a scale, in float32 beside the weights, and mask in two steps."""
    lowest = torch.finfo(x.dtype).min
    scores = (self.output(x) * self.table) @ x.transpose(-1, -2) / self.scale
    scores = scores.masked_fill(torch.arange(7) == 5, lowest)
    return torch.softmax(scores + torch.full((7, 7), lowest).triu(1), -1) @ x


def rounded(divided):
    """In JAX, where every row of the batch reads the table, at its own positions."""
    table = np.cos(np.arange(7)[:, None] / 100 ** np.linspace(0, 1, WIDTH))
    mask = np.tril(np.ones((7, 7), bool)) & (np.arange(7) != 5)

    def forward(p, x):
        positions = jnp.broadcast_to(jnp.arange(7), x.shape[:2])
        h = x @ p["output"]["kernel"] + p["output"]["bias"]
        scores = (h * jnp.take(jnp.asarray(table), positions, axis=0)) @ x.swapaxes(-1, -2)
        scores = divided(scores)
        return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1) @ x

    return forward


@pytest.mark.parametrize("kept", [lambda table: table, partial(nn.Parameter, requires_grad=False)])
def test_a_scale_and_a_table_of_every_row_count_as_rounded(kept):
    """And a module that asks for the lowest number of its type, without naming the type, runs in float64."""
    theirs = Module(
        rounded_there,
        output=lambda: nn.Linear(WIDTH, WIDTH),
        table=lambda: kept(torch.cos(torch.arange(7)[:, None] / 100 ** torch.linspace(0, 1, WIDTH))),
        scale=lambda: torch.sqrt(torch.tensor(float(WIDTH))),
    )
    params = {"output": {"kernel": theirs.output.weight.detach().T, "bias": theirs.output.bias.detach()}}
    find = partial(first_difference, theirs=theirs, inputs=[X], params=jax.tree.map(np.asarray, params))
    found = find(rounded(lambda scores: scores / np.sqrt(WIDTH)))
    assert not found
    assert found.rounded
    found = find(rounded(lambda scores: scores / 7))
    assert found.sure
    assert "/ 7" in found.ours.source
    assert "mask" not in found.kind


LOG = jnp.log(2 * jnp.pi)
"""A number of a module, which is rounded to float32 when that is imported."""
LOG_2 = torch.log(torch.tensor(2.0)).item()
TABLE = torch.tensor([1, 1, 1, 1, 0.1, 1])
CLASSES = np.array([4, 0, 3])


def root():
    return torch.sqrt(torch.tensor(6, dtype=torch.float) * 3)


def powers(numbers):
    return torch.exp(-math.log(1e4) * numbers / 6)


@pytest.mark.parametrize(
    "here, there",
    [
        (lambda h: h**2 + LOG, lambda h: 2 * (h**2 / 2 + 0.5 * math.log(2 * math.pi))),
        (lambda h: jnp.sin(h / math.sqrt(18)), lambda h: (h / root()).sin()),
        (lambda h: jnp.sin(h * (1 / math.sqrt(18))), lambda h: (h / root()).sin()),
        (lambda h: jnp.tanh(h - jnp.log(2.0)), lambda h: torch.tanh(h - LOG_2)),
        (
            lambda h: jnp.cos(jnp.sin(h / math.sqrt(18)) / math.sqrt(18)),
            lambda h: ((h / root().to(h.dtype)).sin() / root().to(h.dtype)).cos(),
        ),
        (
            lambda h: (
                -jnp.average(jax.nn.log_softmax(h)[np.arange(3), CLASSES], weights=jnp.where(CLASSES == 4, 0.1, 1.0))
            ),
            lambda h: F.cross_entropy(h, torch.tensor(CLASSES), TABLE.to(h.dtype)),
        ),
        (
            lambda h: h * jnp.cos(430 * 1e4 ** (-jnp.arange(6) / 6)),
            lambda h: h * (torch.tensor(430).float() * powers(torch.arange(6, dtype=torch.float32))).cos(),
        ),
    ],
    ids=[
        "ours",
        "theirs",
        "theirs, its inverse",
        "theirs, written",
        "theirs, converted twice",
        "theirs, in a table",
        "theirs, of whole numbers",
    ],
)
def test_a_number_that_one_side_holds_in_float32_is_no_difference(here, there):
    theirs = Module(lambda m, x: there(m.up(x)), up=lambda: nn.Linear(6, 6, bias=False))
    found = first_difference(lambda p, x: here(x @ p["up"].T), theirs, {"up": "up.weight"}, [numbers(3, 6)])
    assert not found
    assert found.narrow
    wrong = first_difference(lambda p, x: 1.00001 * here(x @ p["up"].T), theirs, {"up": "up.weight"}, [numbers(3, 6)])
    assert "1.00001" in wrong.kind


def test_a_whole_number_is_not_rounded_to_float32():
    """Rows are counted by 2, and a factor of theirs rounds to it."""
    theirs = Module(lambda m, x: m.up(x) * 2.0000001 + 0.1, up=lambda: nn.Linear(6, 6, bias=False))

    def ours(p, x):
        return (x @ p["up"].T * 2.0000001)[jnp.arange(6) // 2]

    found = first_difference(ours, theirs, {"up": "up.weight"}, [numbers(6, 6)])
    assert "// 2" in found.ours.source


@pytest.mark.parametrize("table", ["window", "angles", "complex"])
def test_a_table_that_is_held_in_float32_is_no_difference(table):
    """A window is small at its ends beside what was rounded; angles stand for both halves of a head; of complex numbers
    no table of theirs has an equal."""
    steps, rates = np.arange(32), 10.0 ** -np.arange(16)

    def forward(self, x):
        if table == "window":
            return self.linear(x * self.linear.window)
        angles = torch.arange(5)[:, None] * self.linear.rates
        if table == "complex":
            a, b = x[:, ::2], x[:, 1::2]
            turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
            return self.linear(torch.stack(turned, -1).flatten(-2))
        return self.linear(x * torch.cat([angles, angles], -1).cos())

    def linear():
        made = nn.Linear(32, 3)
        made.register_buffer("window", torch.hann_window(32), persistent=False)
        made.register_buffer("rates", torch.tensor(rates, dtype=torch.float32), persistent=False)
        return made

    def ours(p, x):
        cosines = np.cos(np.arange(5)[:, None] * rates)
        if table == "window":
            x = x * (0.5 - 0.5 * jnp.cos(2 * jnp.pi * steps / 32))
        elif table == "angles":
            x = jnp.concatenate([x[:, :16] * cosines, x[:, 16:] * cosines], -1)
        else:
            z = (x[:, ::2] + 1j * x[:, 1::2]) * np.exp(1j * np.arange(5)[:, None] * rates)
            x = jnp.stack([z.real, z.imag], -1).reshape(5, 32)
        return x @ p["kernel"] + p["bias"]

    weights = {"kernel": ("linear.weight", "o i -> i o"), "bias": "linear.bias"}
    found = first_difference(ours, Module(forward, linear=linear), weights, [numbers(5, 32)])
    assert not found, str(found)
    assert found.narrow or "float32" in str(found.rounded)
    assert first_difference(
        lambda p, x: ours(p, x) * 1.0000003, Module(forward, linear=linear), weights, [numbers(5, 32)]
    )


def test_one_small_number_of_a_table_that_is_another_one_is_found():
    table = np.array([1, 0.5, 0.25, 0.125, 2e-6, 3e-6, 0.75, 2.0])

    def forward(self, x):
        return torch.tanh(x * self.linear.table * 1e6) @ self.linear.weight.T

    def linear():
        made = nn.Linear(8, 3, bias=False)
        made.register_buffer("table", torch.tensor(table, dtype=torch.float32), persistent=False)
        return made

    def ours(p, x):
        other = table.astype(np.float32).astype(float)
        other[4] = 2.2e-6
        return jnp.tanh(x * other * 1e6) @ p["kernel"]

    weights = {"kernel": ("linear.weight", "o i -> i o")}
    assert first_difference(ours, Module(forward, linear=linear), weights, [numbers(5, 8)])


def test_the_digits_of_another_table_are_given_back():
    """Decays over one step and over two are as far apart as float32 rounds, and are no roundings of each other."""
    rates = 1e-8 * 2.0 ** np.arange(4)
    theirs = Module(
        lambda m, x: (y := m.up(x)) * torch.exp(-torch.tensor(rates) * 2) + 3e-11 * y,
        up=lambda: nn.Linear(6, 4, bias=False),
    )

    def ours(p, x):
        keep = jnp.exp(-rates)
        return keep * (keep * (x @ p["up"].T))

    found = first_difference(ours, theirs, {"up": "up.weight"}, [numbers(5, 6)])
    assert found.differing == ("output: 3.0e-11",)


@pytest.mark.parametrize(
    "here, there, digits",
    [
        (lambda y: jax.scipy.special.digamma(jnp.exp(y)), lambda y: torch.digamma(y.exp()), "e-10"),
        (lambda y: jax.scipy.linalg.expm((y - y.T) / 90), lambda y: torch.matrix_exp((y - y.T) / 90), "e-12"),
    ],
    ids=["trigamma", "the exponential of a small matrix"],
)
def test_what_has_nine_or_ten_digits_in_pytorch_is_no_difference(here, there, digits):
    theirs = Module(lambda m, x: there(m.up(x)), up=lambda: nn.Linear(6, 6, bias=False))
    found = first_difference(lambda p, x: here(x @ p["up"].T), theirs, {"up": "up.weight"}, [numbers(6, 6)])
    assert not found
    assert digits in str(found.rounded)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_what_lies_behind_a_table_in_float32_is_found(factor):
    """Ours holds it in complex numbers, so that no table of theirs is one of ours: what it rounds is no fault."""
    rates = 10_000.0 ** (-np.arange(8) / 8)

    def forward(m, x):
        angles = torch.arange(6)[:, None] * torch.from_numpy(rates.astype(np.float32))
        first, second = m.up(x).chunk(2, -1)
        turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
        return torch.tanh(m.down(torch.cat(turned, -1)))

    def ours(p, x):
        h = x @ p["up"].T
        turned = jax.lax.complex(h[:, :8], h[:, 8:]) * np.exp(1j * np.arange(6)[:, None] * rates)
        h = jnp.concatenate([turned.real, turned.imag], -1)
        return jnp.tanh(h @ p["down"].T) * factor

    theirs = Module(forward, up=lambda: nn.Linear(6, 16, bias=False), down=lambda: nn.Linear(16, 6, bias=False))
    found = first_difference(ours, theirs, {"up": "up.weight", "down": "down.weight"}, [numbers(6, 6)], backward=False)
    assert bool(found) == (factor != 1.0)
    if found:
        assert found.ours.source.startswith("return jnp.tanh"), str(found)


def test_a_number_that_float32_holds_is_another_one_where_ours_has_none_that_it_rounds():
    """As the largest probability that goes into a logarithm: ours has another one, for another purpose."""
    most = 1 - torch.finfo(torch.float32).eps
    theirs = Module(lambda m, x: torch.log(1 + 1e-12 - torch.sigmoid(20 * m.up(x)).clamp(max=most)))
    theirs.up = nn.Linear(6, 6, bias=False)

    def ours(p, x):
        return jnp.log(1 + 1e-12 - jax.nn.sigmoid(20 * (x @ p["up"].T)))

    assert "clamp" in first_difference(ours, theirs, {"up": "up.weight"}, [3 * numbers(3, 6)]).theirs.source
