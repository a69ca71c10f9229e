"""Where two sides part is named: the line in JAX, the line or the module in PyTorch; never another place for sure.

All faults whose place is known are asked about; `make test` takes a few of every kind, and `make test-deep` the others.
"""

from dataclasses import replace
from importlib import import_module

import pytest

from parity import Difference, check_parity
from parity.differ.first_difference import difference_of
from parity_tests import known_places
from parity_tests.depth import deep
from parity_tests.library_faults import COARSE_MOMENT
from parity_tests.localisation import CASES, asked, judged, verdict_of
from parity_tests.other_pairs.faults import FAULTS
from parity_tests.other_pairs.planting import PAIRS, planted

QUICK = {
    "convolutions: batch norm with another eps",
    "convolutions: a convolution frozen",
    "gru: reset before the product, not after",
    "gru: the row of padding frozen",
    "gru: a layer with another's weights",
    "gpt_neox: a token too many is seen",
    "gpt_neox: a tied head untied",
    "gpt_neox: one norm for both branches",
    "our two stacks: tied head untied",
    "our training: AdamW: eps inside the root",
}
NOT_SURE = {
    "our training: decay of biases and norms too",
    "our training: schedule off by one",
    "our training: learning rate rounded to float32",
}
"""What the tool says that it is not sure of, and calls by its kind; all else it names."""
pytestmark = pytest.mark.usefixtures("as_others_write")


@pytest.mark.parametrize("name", PAIRS)
def test_an_honest_port_is_the_same(name):
    """What is planted later is the only difference there is."""
    pair = import_module(f"parity_tests.other_pairs.{name}").pair()
    check_parity(pair.ours, pair.theirs, pair.weights, pair.inputs, gates=("9", "1", "2"), like=pair.like, name=name)
    assert not asked(pair)


@pytest.mark.parametrize("case", [case if case in QUICK else deep(case) for case in CASES])
def test_the_place_of_a_fault_is_named(case):
    found = CASES[case]()
    assert found.verdict == ("not sure" if case in NOT_SURE else "right")


def test_there_are_faults_enough_and_few_that_it_is_not_sure_of():
    assert len(CASES) == len(FAULTS) + len(known_places.OWN) >= 80
    assert CASES.keys() >= QUICK | NOT_SURE
    assert len(NOT_SURE) <= 0.05 * len(CASES)


@pytest.mark.parametrize("name", [*map(deep, known_places.MODELS)])
def test_our_own_models_are_called_equal(name):
    pair, batch = known_places.model(name)
    pair.share_masks(batch)
    found = difference_of(pair, batch)
    assert not found


def test_the_judge_is_no_friend():
    """Another line, another module, another stage and silence are told apart."""
    [fault] = [fault for fault in FAULTS if fault.name == "eps outside the root"]
    with planted(fault) as found:
        said = asked(found.pair)
        elsewhere = [
            replace(said, ours=replace(said.ours, line=said.ours.line - 4)),
            replace(said, theirs=replace(said.theirs, module="model.lm_head")),
            replace(said, ours=None),
            replace(said, stage="backward"),
        ]
        unsure = [replace(other, sure=False) for other in elsewhere]
        verdicts = [judged(other, fault, found) for other in (said, Difference("none"), *elsewhere, *unsure)]
    assert verdicts == ["right", "missed", *["wrong"] * 4, *["not sure"] * 4]


@pytest.mark.parametrize(
    "kind, kinds, verdict",
    [
        (None, "", "right"),
        ("ours is 8 times theirs", "", "wrong"),
        ("ours is 8 times theirs", "is 4", "wrong"),
        ("ours is 8 times theirs", "is 4 | is 8", "right"),
    ],
)
def test_no_kind_but_the_true_one_is_right(kind, kinds, verdict):
    assert verdict_of(Difference("forward", kind=kind), True, kinds) == verdict


@pytest.mark.deep
def test_what_no_step_shows_is_not_seen():
    with COARSE_MOMENT.plant():
        assert not known_places.difference_of_training(COARSE_MOMENT.name)
