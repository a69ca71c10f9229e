"""`first_difference` on a small GPT of its own: equal pairs are equal, and each fault is named where it is.

Pairs of a few lines are in test_first_difference_small.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import ParityError, first_difference

pytestmark = pytest.mark.usefixtures("as_others_write")
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 9))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        h = self.norm_1(x)
        q, k, v = (f(h).view(batch, length, 4, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.output(mixed)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    def __init__(self, width=16, layers=2, vocabulary=31):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T


def norm(x, weights, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + eps) * weights["scale"] + weights["bias"]


@jax.custom_vjp
def wrong_gelu(x):
    return jax.nn.gelu(x, approximate=False)


def wrong_gelu_backward(x, g):
    return (g * jax.grad(lambda y: jax.nn.gelu(y, approximate=True).sum())(x),)


wrong_gelu.defvjp(lambda x: (wrong_gelu(x), x), wrong_gelu_backward)


def ours(fault=""):
    """The same in JAX; the line of each fault says its name."""

    def linear(x, weights):
        return x @ weights["kernel"] + weights["bias"]

    def block(x, p):
        batch, length, width = x.shape
        h = norm(x, p["norm_1"], 1e-6) if fault == "eps" else norm(x, p["norm_1"])
        q, k, v = (linear(h, p[name]).reshape(batch, length, 4, -1) for name in ("query", "key", "value"))
        scale = width**-0.5 if fault == "scale" else 0.5
        scores = jnp.einsum("bthc,bshc->bhts", q, k) * scale
        mask = jnp.tril(jnp.ones((length, length), bool), 1 if fault == "leak" else 0)
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        if fault == "detached weights":
            weights = jax.lax.stop_gradient(weights)
        axes = "bhts,bshc->bhtc" if fault == "heads" else "bhts,bshc->bthc"
        mixed = jnp.einsum(axes, weights, v).reshape(batch, length, width)
        h = linear(mixed, p["output"])
        if fault == "detached branch":
            h = jax.lax.stop_gradient(h)
        x = (norm(x, p["norm_1"]) if fault == "residual" else x) + h
        h = norm(x, p["norm_2"])
        if fault == "no bias":
            up = h @ p["up"]["kernel"]
        elif fault == "frozen bias":
            up = h @ p["up"]["kernel"] + jax.lax.stop_gradient(p["up"]["bias"])
        else:
            up = linear(h, p["up"])
        active = wrong_gelu(up) if fault == "vjp" else jax.nn.gelu(up, approximate=fault == "gelu")
        if fault == "float32":
            active = active.astype(jnp.float32).astype(jnp.float64)
        if fault == "dropout":
            active = active / 0.9
        return x + linear(active, p["down"]), None

    def forward(p, ids):
        start = 1 if fault == "positions" else 0
        x = p["embedding"][ids] + p["positions"][jnp.arange(ids.shape[1]) + start]
        x, _ = jax.lax.scan(block, x, p["blocks"])
        head = jax.lax.stop_gradient(p["embedding"]) if fault == "untied" else p["embedding"]
        return norm(x, p["norm"]) @ head.T

    return forward


WEIGHTS = {
    "embedding": "embedding.weight",
    "positions": "positions.weight",
    "norm.scale": "norm.weight",
    "norm.bias": "norm.bias",
    **{
        f"blocks.{name}.kernel": (f"blocks.{{layer}}.{name}.weight", "o i -> i o")
        for name in ("query", "key", "value", "output", "up", "down")
    },
    **{
        f"blocks.{name}.bias": f"blocks.{{layer}}.{name}.bias"
        for name in ("query", "key", "value", "output", "up", "down", "norm_1", "norm_2")
    },
    **{f"blocks.{name}.scale": f"blocks.{{layer}}.{name}.weight" for name in ("norm_1", "norm_2")},
}


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    module = Decoder()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def test_an_equal_pair_is_equal(module):
    found = first_difference(ours(), module, WEIGHTS, [TOKENS])
    assert not found
    assert str(found).endswith("the same")
    assert found.counts[0] > 100


@pytest.mark.parametrize(
    ("fault", "line", "module_path", "kind"),
    [
        ("eps", "jnp.sqrt(variance + eps)", "blocks.0.norm_1", "another constant is added: 1e-06 in ours, 1e-05 in"),
        ("scale", "* scale", "blocks.0", "ours is 0.5"),
        ("leak", 'if fault == "leak"', "blocks.0", "only theirs masks key 1 from query 0"),
        ("heads", ".reshape(batch, length, width)", "blocks.0.output", "the same numbers in another order"),
        ("residual", 'if fault == "residual"', "blocks.0", None),
        ("no bias", "jax.nn.gelu(up", "blocks.0.up", "theirs adds blocks.0.up.bias here, ours goes on as without it"),
        ("gelu", "jax.nn.gelu(up", "blocks.0", "another activation: GELU (tanh) in ours, GELU (erf) in theirs"),
        ("float32", "active.astype(jnp.float32)", "blocks.0.down", "ours lowers the type here: float64 to float32"),
        ("dropout", "active / 0.9", "blocks.0.down", "ours divides by 0.9 (a dropout of 0.1?)"),
        ("positions", 'p["positions"]', "", "where theirs reads `x = self.embedding(ids) + self.positions("),
    ],
)
def test_forward(module, fault, line, module_path, kind):
    found = first_difference(ours(fault), module, WEIGHTS, [TOKENS])
    assert found.stage == "forward"
    assert line in found.ours.source
    assert found.theirs.module == module_path
    assert found.sure
    if kind is not None:
        assert kind in (found.kind or "")


def test_a_wrong_map_is_named_by_its_weights(module):
    transposed = {**WEIGHTS, "blocks.output.kernel": "blocks.{layer}.output.weight"}
    found = first_difference(ours(), module, transposed, [TOKENS])
    assert found.stage == "parameters"
    assert found.parameters == ("blocks.output.kernel holds blocks.0.output.weight transposed",)


def exchanged(one, other):
    """The map with all weights of two projections exchanged."""
    rows = dict(WEIGHTS)
    for part in ("kernel", "bias"):
        a, b = f"blocks.{one}.{part}", f"blocks.{other}.{part}"
        rows[a], rows[b] = WEIGHTS[b], WEIGHTS[a]
    return rows


def test_exchanged_projections_are_named_where_their_products_meet(module):
    found = first_difference(ours(), module, exchanged("key", "value"), [TOKENS])
    assert found.stage == "parameters"
    assert found.parameters == (
        "ours reads blocks.0.value.weight, as blocks.key.kernel, where theirs reads blocks.0.key.weight",
    )


def test_queries_and_keys_exchanged_are_not_told_apart_by_numbers(module):
    """Their scores are each other's transposes: every number has an equal until the mask."""
    found = first_difference(ours(), module, exchanged("query", "key"), [TOKENS])
    assert found
    assert not found.sure
    assert found.kind == "axes 2 and 3 are exchanged: perhaps two weights are"


def test_our_own_parameters_are_compared_by_name_first(module):
    from parity.gates.weight_map import Weights

    tensors = {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
    params = Weights(WEIGHTS, tensors).into(tensors)
    assert not first_difference(ours(), module, WEIGHTS, [TOKENS], params=params, backward=False)
    params["blocks"]["query"]["kernel"] = np.array(params["blocks"]["query"]["kernel"])
    params["blocks"]["query"]["kernel"][1] = params["blocks"]["query"]["kernel"][1].T.copy()
    found = first_difference(ours(), module, WEIGHTS, [TOKENS], params=params)
    assert found.stage == "parameters"
    assert found.parameters == ("blocks.1.query.weight is not what our parameters hold: it is transposed",)


def test_outputs_of_other_shapes_are_refused(module):
    with pytest.raises(ParityError, match=r"shapes differ: ours \[2, 1, 31\], theirs \[2, 9, 31\]"):
        first_difference(lambda p, ids: ours()(p, ids)[:, :1], module, WEIGHTS, [TOKENS])


@pytest.mark.parametrize(
    ("ours_takes", "theirs_takes", "said"),
    [
        (optax.adamw(1e-3, weight_decay=0.01), partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1), "another decay"),
        (optax.sgd(2e-3), partial(torch.optim.SGD, lr=1e-3), "ours is 2 times theirs"),
        (optax.adamw(1e-3, weight_decay=0.01, eps=1e-6), partial(torch.optim.AdamW, lr=1e-3), "the step of"),
    ],
)
def test_the_step_of_an_optimizer(module, ours_takes, theirs_takes, said):
    found = first_difference(ours(), module, WEIGHTS, [TOKENS], optimizer=(ours_takes, theirs_takes))
    assert found.stage == "optimizer"
    assert said in found.differing[0]
    assert "optim" in found.theirs.file


def test_the_same_optimizer_is_the_same(module):
    both = optax.adamw(1e-3, weight_decay=0.01), partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01)
    assert not first_difference(ours(), module, WEIGHTS, [TOKENS], optimizer=both)


@pytest.mark.parametrize(
    ("inputs", "error", "said"),
    [
        (np.zeros((3, 4)), TypeError, "inputs is a ndarray; expected a list"),
        ([[1.0, {"x"}]], ParityError, "input 0.1 is set; expected an array of numbers"),
        ([np.zeros((2, 9, 3))], ParityError, "ours failed"),
    ],
)
def test_bad_inputs_are_told_in_a_sentence(module, inputs, error, said):
    with pytest.raises(error, match=said):
        first_difference(ours(), module, WEIGHTS, inputs)
