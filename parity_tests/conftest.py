"""float64 for the gates, one thread, and the figures that the session's table is made of."""

from collections.abc import Callable, Iterator

import jax
import pytest
import torch

from parity_tests.measure import Measured


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models are small, and threads that wait for each other beside another worker take ten times as long."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def exact_arithmetic() -> Iterator[None]:
    """float64 on, and products in full precision on every platform."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[[str, Measured], None]:
    """record(preset, measured): puts a figure into the table that the session ends with, then fails if it is red."""

    def note(preset: str, measured: Measured) -> None:
        record_property("parity", (preset, measured.gate, float(measured.worst), measured.bar, measured.name))
        measured.require()

    return note
