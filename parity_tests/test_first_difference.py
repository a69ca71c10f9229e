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
from parity.gates.weight_map import Weights
from parity_tests.small_modules import linear_rows

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
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(31, 16), nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T


def norm(x, weights, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + eps) * weights["scale"] + weights["bias"]


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
        axes = "bhts,bshc->bhtc" if fault == "heads" else "bhts,bshc->bthc"
        mixed = jnp.einsum(axes, weights, v).reshape(batch, length, width)
        x = (norm(x, p["norm_1"]) if fault == "residual" else x) + linear(mixed, p["output"])
        h = norm(x, p["norm_2"])
        up = h @ p["up"]["kernel"] if fault == "no bias" else linear(h, p["up"])
        active = jax.nn.gelu(up, approximate=fault == "gelu")
        if fault == "float32":
            active = active.astype(jnp.float32).astype(jnp.float64)
        if fault == "dropout":
            active = active / 0.9
        return x + linear(active, p["down"]), None

    def forward(p, ids):
        start = 1 if fault == "positions" else 0
        x = p["embedding"][ids] + p["positions"][jnp.arange(ids.shape[1]) + start]
        x, _ = jax.lax.scan(block, x, p["blocks"])
        return norm(x, p["norm"]) @ p["embedding"].T

    return forward


WEIGHTS = {
    "embedding": "embedding.weight",
    "positions": "positions.weight",
    "norm.scale": "norm.weight",
    "norm.bias": "norm.bias",
    **linear_rows("query", "key", "value", "output", "up", "down", ours="blocks.", theirs="blocks.{layer}."),
    **{
        f"blocks.norm_{number}.{mine}": f"blocks.{{layer}}.norm_{number}.{their}"
        for number in (1, 2)
        for mine, their in (("scale", "weight"), ("bias", "bias"))
    },
}


def asked(module, fault="", weights=WEIGHTS, **options):
    """Where the module and ours with this fault part."""
    return first_difference(ours(fault), module, weights, [TOKENS], **options)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    module = Decoder()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def test_an_equal_pair_is_equal(module):
    found = asked(module)
    assert not found
    assert str(found).endswith("the same")
    assert found.counts[0] > 100


@pytest.mark.parametrize(
    "fault, line, module_path, kind",
    [
        ("eps", "jnp.sqrt(variance + eps)", "blocks.0.norm_1", "another constant is added: 1e-06 in ours, 1e-05 in"),
        ("scale", "* scale", "blocks.0", "ours is 0.5"),
        ("leak", 'if fault == "leak"', "blocks.0", "only theirs masks key 1 from query 0"),
        ("heads", ".reshape(batch, length, width)", "blocks.0.output", "the same numbers in another order"),
        ("residual", 'if fault == "residual"', "blocks.0", ""),
        (
            "no bias",
            "jax.nn.gelu(up",
            "blocks.0.up",
            "theirs adds blocks.0.up.bias here; without that, theirs goes on as ours does",
        ),
        ("gelu", "jax.nn.gelu(up", "blocks.0", "another activation: GELU (tanh) in ours, GELU (erf) in theirs"),
        ("float32", "active.astype(jnp.float32)", "blocks.0.down", "ours lowers the type here: float64 to float32"),
        ("dropout", "active / 0.9", "blocks.0.down", "ours divides by 0.9 (a dropout of 0.1?)"),
        ("positions", 'p["positions"]', "", "; with `x = self.embedding(ids) + self.positions("),
    ],
)
def test_forward(module, fault, line, module_path, kind):
    found = asked(module, fault)
    assert found.stage == "forward"
    assert line in found.ours.source
    assert found.theirs.module == module_path
    assert found.sure
    assert kind in (found.kind or "")


def test_a_wrong_map_is_named_by_its_weights(module):
    transposed = WEIGHTS | {"blocks.output.kernel": "blocks.{layer}.output.weight"}
    found = asked(module, weights=transposed)
    assert found.stage == "parameters"
    assert found.parameters == ("blocks.output.kernel holds blocks.0.output.weight transposed",)


def exchanged(one, other):
    """The map with all weights of two projections exchanged."""
    turned = {one: other, other: one}
    return WEIGHTS | {
        f"blocks.{name}.{part}": WEIGHTS[f"blocks.{turned[name]}.{part}"]
        for name in turned
        for part in ("kernel", "bias")
    }


def test_exchanged_projections_are_named_where_their_products_meet(module):
    found = asked(module, weights=exchanged("key", "value"))
    assert found.stage == "parameters"
    assert found.parameters == (
        "ours reads blocks.0.value.weight, as blocks.key.kernel, where theirs reads blocks.0.key.weight",
    )


def test_queries_and_keys_exchanged_are_not_told_apart_by_numbers(module):
    """Their scores are each other's transposes: every number has an equal until the mask."""
    found = asked(module, weights=exchanged("query", "key"))
    assert not found.sure
    assert found.kind == "axes 2 and 3 are exchanged: perhaps two weights are"


@pytest.mark.parametrize(
    "theirs, ours, said",
    [
        (None, None, None),
        (None, np.transpose, "transposed"),
        (None, np.zeros_like, "zero"),
        (None, lambda w: 2 * w, "2 times as large"),
        (None, np.flipud, "the same numbers in another order"),
        (None, lambda w: w + 1, "its numbers are others"),
        (np.zeros_like, lambda w: w + 1, "its numbers are others"),
        (np.tril, lambda w: 2 * w + np.tril(w + 1, -1), "its numbers are others"),
    ],
)
def test_our_own_parameters_are_compared_by_name_first(module, theirs, ours, said):
    weight = module.blocks[1].query.weight
    if theirs is not None:
        weight.data = torch.from_numpy(theirs(weight.detach().numpy()))
    tensors = {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
    params = Weights(WEIGHTS, tensors).into(tensors)
    if ours is None:
        assert not asked(module, params=params, backward=False)
        return
    first, second = params["blocks"]["query"]["kernel"]
    params["blocks"]["query"]["kernel"] = np.stack([first, ours(second)])
    found = asked(module, params=params)
    assert found.stage == "parameters"
    (parameter,) = found.parameters
    assert parameter.startswith("blocks.1.query.weight is not what our parameters hold: ")
    assert parameter.endswith(said)


def test_outputs_of_other_shapes_are_refused(module):
    with pytest.raises(ParityError, match=r"shapes differ: ours \[2, 1, 31\], theirs \[2, 9, 31\]"):
        first_difference(lambda p, ids: ours()(p, ids)[:, :1], module, WEIGHTS, [TOKENS])


@pytest.mark.parametrize(
    "ours_takes, theirs_takes, said",
    [
        (optax.adamw(1e-3, weight_decay=0.01), partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1), "another decay"),
        (optax.sgd(2e-3), partial(torch.optim.SGD, lr=1e-3), "ours is 2 times theirs"),
        (optax.adamw(1e-3, weight_decay=0.01, eps=1e-6), partial(torch.optim.AdamW, lr=1e-3), "the step of"),
    ],
)
def test_the_step_of_an_optimizer(module, ours_takes, theirs_takes, said):
    found = asked(module, optimizer=(ours_takes, theirs_takes))
    assert found.stage == "optimizer"
    assert said in found.differing[0]
    assert "optim" in found.theirs.file


def test_the_same_optimizer_is_the_same(module):
    both = optax.adamw(1e-3, weight_decay=0.01), partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01)
    assert not asked(module, optimizer=both)


@pytest.mark.parametrize(
    "inputs, error, said",
    [
        (np.zeros((3, 4)), TypeError, "inputs is a ndarray; expected a list"),
        ([np.zeros((2, 9, 3))], ParityError, "ours failed"),
    ],
)
def test_bad_inputs_are_told_in_a_sentence(module, inputs, error, said):
    with pytest.raises(error, match=said):
        first_difference(ours(), module, WEIGHTS, inputs)
