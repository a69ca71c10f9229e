"""Where two sides part is named: the line in JAX, the line or the module in PyTorch; never another place for sure.

All faults whose place is known are asked about; `make test` takes a few of every kind, `make test-deep`
half of the rest, and `make test-deeper` the other half.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import jax
import pytest

from parity import Difference
from parity.differ.first_difference import difference_of
from parity_tests import known_places, training_places
from parity_tests.faults import TRAINING
from parity_tests.known_kinds import KINDS
from parity_tests.library_faults import COARSE_MOMENT, LIBRARY_TRAINING
from parity_tests.localisation import Case, asked, cases, judged, located, verdict_of
from parity_tests.other_pairs.backward_faults import BACKWARD
from parity_tests.other_pairs.forward_faults import FORWARD
from parity_tests.other_pairs.planting import PAIRS, Change, PairFault, planted

CASES = cases()
QUICK = {
    ("encoder_layers", "GELU by tanh"),
    ("encoder_layers", "heads merged in the wrong order"),
    ("convolutions", "batch norm with another eps"),
    ("convolutions", "a convolution frozen"),
    ("gru", "reset before the product, not after"),
    ("gru", "the row of padding frozen"),
    ("gru", "a layer with another's weights"),
    ("distilbert", "dropout's factor left on"),
    ("distilbert", "a square matrix transposed"),
    ("gpt_neox", "a token too many is seen"),
    ("gpt_neox", "a tied head untied"),
    ("mixer", "the sum where the mean is meant"),
}
NOT_SURE = {
    ("our training", "L2 in the gradient instead of decoupled decay"),
    ("our training", "decay of biases and norms too"),
    ("our training", "schedule off by one"),
    ("our training", "learning rate rounded to float32"),
}
"""What the tool says that it is not sure of; all else it names. The last three it calls by their kind."""


@pytest.fixture(autouse=True)
def as_others_write() -> Iterator[None]:
    """Others add a vector to an array of more axes; our own code has to name them."""
    with jax.numpy_rank_promotion("allow"):
        yield


def marked(case: Case) -> object:
    quick = (case.pair, case.fault) in QUICK
    return pytest.param(case, id=f"{case.pair}: {case.fault}", marks=() if quick else pytest.mark.deep)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_the_place_of_a_fault_is_named(case: Case) -> None:
    found = case.ask()
    expected = "not sure" if (case.pair, case.fault) in NOT_SURE else "right"
    assert found.verdict == expected, str(found.difference)


def test_what_it_is_not_sure_of_is_little() -> None:
    names = {(case.pair, case.fault) for case in CASES}
    assert len(names) == len(CASES)
    assert names >= QUICK | NOT_SURE
    assert len(NOT_SURE) <= 0.05 * len(CASES)


def test_there_are_faults_enough_in_every_pair() -> None:
    forward = [fault.pair for fault in FORWARD]
    assert len(forward) >= 30
    assert min(forward.count(pair) for pair in PAIRS) >= 4
    assert len(BACKWARD) >= 12
    assert {fault.pair for fault in BACKWARD} == set(PAIRS)
    assert len(known_places.OWN) >= 35


@pytest.mark.parametrize("name", PAIRS)
def test_an_equal_pair_is_called_equal(name: str) -> None:
    found = asked(import_module(f"parity_tests.other_pairs.{name}").pair())
    assert not found, str(found)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.deep) for name in known_places.MODELS])
def test_our_own_models_are_called_equal(name: str) -> None:
    pair, batch = known_places.model(name)
    pair.share_masks(batch)
    found = difference_of(pair, batch)
    assert not found, str(found)


GELU = next(fault for fault in FORWARD if fault.name == "GELU by tanh" and fault.pair == "encoder_layers")


def test_the_judge_is_no_friend() -> None:
    """Another line, another module, another stage and silence are told apart."""
    with planted(GELU) as found:
        said = asked(found.pair)
        assert judged(said, GELU, found, "forward") == "right"
        assert said.ours is not None
        assert said.theirs is not None
        elsewhere = [
            replace(said, ours=replace(said.ours, line=said.ours.line - 4)),
            replace(said, theirs=replace(said.theirs, module="last")),
            replace(said, ours=None),
            replace(said, stage="backward"),
        ]
        assert [judged(other, GELU, found, "forward") for other in elsewhere] == ["wrong"] * 4
        assert [judged(replace(other, sure=False), GELU, found, "forward") for other in elsewhere] == ["not sure"] * 4
        assert judged(Difference("none"), GELU, found, "forward") == "missed"


def test_a_fault_that_is_not_planted_is_missed() -> None:
    nothing = PairFault("nothing", "gru", "ours", Change("new = jnp.tanh(xn", "new = jnp.tanh(0 + xn"))
    assert located(nothing, "forward").verdict == "missed"


@pytest.mark.parametrize(
    ("change", "said"), [(Change("not there", ""), "0 times; expected once"), (Change("linen.relu", ""), "2 times")]
)
def test_a_change_must_fit_its_file(change: Change, said: str) -> None:
    with (
        pytest.raises(ValueError, match=said),
        planted(PairFault("nothing", "convolutions", "ours", change)),
    ):
        pass


def test_a_verdict_needs_a_difference_and_no_kind_but_the_true_one() -> None:
    assert verdict_of(Difference("none"), True, ()) == "missed"
    assert verdict_of(Difference("forward"), False, ()) == "not sure"
    scaled = Difference("forward", kind="ours is 8 times theirs")
    assert [verdict_of(scaled, True, kinds) for kinds in ((), ("is 4",), ("is 4", "is 8"))] == [
        "wrong",
        "wrong",
        "right",
    ]


def test_every_kind_belongs_to_a_fault() -> None:
    assert {(case.pair, case.fault) for case in CASES} >= KINDS.keys()


def test_every_fault_of_training_has_a_place_or_a_reason() -> None:
    named = {fault.fault.name for fault in training_places.FAULTS}
    planted_ones = {fault.name for fault in (*TRAINING, *LIBRARY_TRAINING)}
    assert planted_ones <= named | training_places.UNSEEN.keys()
    assert not named & training_places.UNSEEN.keys()


@pytest.mark.deep
def test_what_no_step_shows_is_not_seen() -> None:
    with COARSE_MOMENT.plant():
        assert not training_places.difference_of_training(COARSE_MOMENT.name)
