"""Numbers of the module that nothing of ours holds: said so in the map, they are not compared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from parity import LEFT_OUT, Difference, ParityError, Weight, check_parity, first_difference, match_weights
from parity.gates.weight_map import Weights

IDS = np.random.default_rng(0).integers(0, 7, (3, 5))


class Theirs(nn.Module):
    """A table whose first two rows nothing reads, and a pooler that the output does not depend on."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 6), nn.Embedding(7, 6)
        self.up, self.pooler = nn.Linear(6, 4), nn.Linear(6, 6)

    def forward(self, ids):
        found = self.up(self.tokens(ids) + self.positions(torch.arange(2, 7)))
        return found


def ours(params, ids):
    hidden = params["tokens"][ids] + params["positions"][None]
    return hidden @ params["up"]["kernel"] + params["up"]["bias"][None, None]


HELD = {
    "tokens": "tokens.weight",
    "positions": Weight("positions.weight", "p i -> p i", part={"p": (2, 7)}),
    "up.kernel": ("up.weight", "o i -> i o"),
    "up.bias": "up.bias",
}
IDLE = Weight("positions.weight", "p i -> p i", part={"p": (0, 2)})
WEIGHTS = {**HELD, LEFT_OUT: [IDLE, "pooler.weight", "pooler.bias"]}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    return Theirs()


def test_what_is_left_out_is_not_compared(theirs):
    figures = check_parity(ours, theirs, WEIGHTS, [IDS], gates=["9", "1", "2", "5"])
    assert all(figure.passed for figure in figures)
    assert not first_difference(ours, theirs, WEIGHTS, [IDS])


def test_it_has_to_be_said(theirs):
    with pytest.raises(ParityError, match=r"misses \['pooler.bias', 'pooler.weight'\]"):
        check_parity(ours, theirs, HELD, [IDS])
    with pytest.raises(ParityError, match=r"the parts of positions.weight, .* leave out 12 of its 42 numbers"):
        first_difference(ours, theirs, {**HELD, LEFT_OUT: ["pooler.weight", "pooler.bias"]}, [IDS])


def test_what_is_held_is_compared_as_before(theirs):
    def without_bias(params, ids):
        return (params["tokens"][ids] + params["positions"][None]) @ params["up"]["kernel"]

    with pytest.raises(ParityError, match="gate 1 activations") as raised:
        check_parity(without_bias, theirs, WEIGHTS, [IDS])
    found = raised.value.difference
    assert isinstance(found, Difference)
    assert found.theirs.module == "up"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("pooler.weight", "expected a list of names of the module"),
        (["pooler.weight", "pooler.bias", "head.weight"], r"names \['head.weight'\], which the module lacks"),
        (["pooler.weight", "pooler.bias", "up.bias"], r"\['up.bias'\] more than once"),
        (["pooler.weight", "pooler.bias", IDLE, IDLE], "hold 12 more than once"),
    ],
)
def test_mistakes_are_told(theirs, left, said):
    shapes = {name: parameter.detach().numpy() for name, parameter in theirs.named_parameters()}
    with pytest.raises(ParityError, match=said):
        Weights({**HELD, LEFT_OUT: left}, shapes)


def test_match_weights_says_what_to_leave_out(theirs):
    shapes = {"tokens": (7, 6), "positions": (5, 6), "up": {"kernel": (6, 4), "bias": (4,)}}
    params = jax.tree.map(np.zeros, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    match = match_weights(params, theirs, ours=ours, inputs=[IDS])
    assert match.verified, match.table()
    idle = Weight("positions.weight", "o i -> o i", part={"o": (0, 2)})
    assert match.left_out == ("pooler.weight", "pooler.bias", idle)
    pasted = {}
    exec(match.python(), pasted)
    assert pasted["weights"] == match.weights
    assert check_parity(ours, theirs, match.weights, [IDS], gates=["9", "1"])


class Attention(nn.Module):
    """The bias of its keys adds the same to all scores of a query."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.softmax(self.query(x) @ self.key(x).transpose(-1, -2), -1)


def attention(params, x, late=0.0):
    query, key = (x @ params[name]["kernel"] + params[name]["bias"][None] for name in ("query", "key"))
    # Nothing shows at the beginning, where this bias is zero.
    gone = jax.nn.relu(jnp.abs(params["query"]["bias"][0]) - 0.01) * late
    return jax.nn.softmax(query @ key.T * (1 + gone))


ATTENTION = {
    f"{name}.{ours}": row
    for name in ("query", "key")
    for ours, row in (("kernel", (f"{name}.weight", "o i -> i o")), ("bias", f"{name}.bias"))
}


def attending():
    torch.manual_seed(1)
    module = Attention()
    with torch.no_grad():
        module.query.bias[0] = 0.0
    return module


def test_a_red_gate_5_names_gradients_of_rounding():
    x = np.random.default_rng(2).standard_normal((5, 4))
    with pytest.raises(ParityError, match="gate 5") as raised:
        check_parity(attention, attending(), ATTENTION, [x], gates=["1", "5"])
    assert "the gradients of key.bias; name them in zero_gradients" in str(raised.value.difference)
    assert check_parity(attention, attending(), ATTENTION, [x], gates=["1", "5"], zero_gradients=["key.bias"])


def test_a_red_gate_5_is_explained_with_the_weights_of_its_steps():
    x = np.random.default_rng(2).standard_normal((5, 4))
    with pytest.raises(ParityError, match="gate 5") as raised:
        check_parity(
            lambda params, x: attention(params, x, 1.0),
            attending(),
            ATTENTION,
            [x],
            gates=["1", "2", "5"],
            zero_gradients=["key.bias"],
        )
    assert "they part on the way forward" in str(raised.value.difference)
