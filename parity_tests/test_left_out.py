"""Numbers of the module that nothing of ours holds: said so in the map, they are not compared."""

import numpy as np
import pytest
import torch
from torch import nn

from parity import LEFT_OUT, Weight, check_parity, first_difference, match_weights
from parity.gates.torch_side import tensors_of
from parity.gates.weight_map import Weights
from parity_tests.errors import parity_error
from parity_tests.matched import linear_shapes, shape
from parity_tests.small_modules import Module, linear_rows

IDS = np.random.default_rng(0).integers(0, 7, (3, 5))


def ours(params, ids):
    hidden = params["tokens"][ids] + params["positions"][None]
    return hidden @ params["up"]["kernel"] + params["up"]["bias"][None, None]


HELD = {
    "tokens": "tokens.weight",
    "positions": Weight("positions.weight", "p i -> p i", part={"p": (2, 7)}),
    **linear_rows("up"),
}
IDLE = Weight("positions.weight", "p i -> p i", part={"p": (0, 2)})
POOLER = ["pooler.weight", "pooler.bias"]
WEIGHTS = {**HELD, LEFT_OUT: [IDLE, *POOLER]}


@pytest.fixture(scope="module")
def theirs():
    """A table whose first two rows nothing reads, and a pooler that the output does not depend on."""
    return Module(
        lambda self, ids: self.up(self.tokens(ids) + self.positions(torch.arange(2, 7))),
        **dict.fromkeys(("tokens", "positions"), lambda: nn.Embedding(7, 6)),
        up=lambda: nn.Linear(6, 4),
        pooler=lambda: nn.Linear(6, 6),
    )


def test_what_is_left_out_is_not_compared(theirs):
    check_parity(ours, theirs, WEIGHTS, [IDS], gates=["9", "1", "2", "5"])
    assert not first_difference(ours, theirs, WEIGHTS, [IDS])


def test_it_has_to_be_said(theirs):
    with parity_error(r"misses \['pooler.bias', 'pooler.weight'\]"):
        check_parity(ours, theirs, HELD, [IDS])


def test_what_is_held_is_compared_as_before(theirs):
    def without_bias(params, ids):
        return (params["tokens"][ids] + params["positions"][None]) @ params["up"]["kernel"]

    with parity_error("gate 1 activations") as raised:
        check_parity(without_bias, theirs, WEIGHTS, [IDS])
    assert raised.value.difference.theirs.module == "up"


@pytest.mark.parametrize(
    "left, said",
    [
        ("pooler.weight", "expected a list of names of the module"),
        (POOLER, r"the parts of positions.weight, .* leave out 12 of its 42 numbers"),
        ([*POOLER, "head.weight"], r"names \['head.weight'\], which the module lacks"),
        ([*POOLER, "up.bias"], r"\['up.bias'\] more than once"),
        ([*POOLER, IDLE, IDLE], "hold 12 more than once"),
    ],
)
def test_mistakes_are_told(theirs, left, said):
    with parity_error(said):
        Weights({**HELD, LEFT_OUT: left}, tensors_of(theirs)[0])


def test_match_weights_says_what_to_leave_out(theirs):
    shapes = {"tokens": shape(7, 6), "positions": shape(5, 6), "up": linear_shapes(6, 4)}
    match = match_weights(shapes, theirs, ours=ours, inputs=[IDS])
    assert match.verified, match.table()
    idle = Weight("positions.weight", "o i -> o i", part={"o": (0, 2)})
    assert match.left_out == ("pooler.weight", "pooler.bias", idle)
    pasted = {}
    exec(match.python(), pasted)
    assert pasted["weights"] == match.weights
    check_parity(ours, theirs, match.weights, [IDS], gates=["9", "1"])
