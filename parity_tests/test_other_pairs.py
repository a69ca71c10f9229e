"""The six pairs that are not ours are the same: what is planted in them later is the only difference there is."""

from collections.abc import Iterator
from importlib import import_module

import jax
import pytest

from parity import check_parity
from parity_tests.other_pairs.planting import PAIRS


@pytest.fixture(autouse=True)
def as_others_write() -> Iterator[None]:
    """Others add a vector to an array of more axes; our own code has to name them."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", PAIRS)
def test_an_honest_port_is_the_same(name: str) -> None:
    pair = import_module(f"parity_tests.other_pairs.{name}").pair()
    check_parity(
        pair.ours,
        pair.theirs,
        pair.weights,
        pair.inputs,
        gates=("9", "1", "2"),
        zero_gradients=pair.zero_gradients,
        like=pair.like,
        name=name,
    )
