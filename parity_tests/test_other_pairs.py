"""The pairs that are not ours are the same: what is planted in them later is the only difference there is."""

from importlib import import_module

import pytest

from parity import check_parity
from parity_tests.localisation import asked
from parity_tests.other_pairs.planting import PAIRS


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.usefixtures("as_others_write")
def test_an_honest_port_is_the_same(name):
    pair = import_module(f"parity_tests.other_pairs.{name}").pair()
    check_parity(pair.ours, pair.theirs, pair.weights, pair.inputs, gates=("9", "1", "2"), like=pair.like, name=name)
    found = asked(pair)
    assert not found
