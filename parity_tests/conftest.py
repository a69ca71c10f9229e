"""float64 for the gates, one thread, and the figures that the session's table is made of."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import pytest
import torch

from parity.differ.answer import sendable
from parity.gates.measure import Measured, ParityError
from parity.gates.pair import Bridge, Tensors
from parity_tests.report import TOLERANCES
from twin.bridge import where_they_part

NOT_ASKED: dict[str, bool | None] = dict.fromkeys(TOLERANCES)
"""Whether hand-picked tolerances would have let a fault pass, where there are neither logits nor losses to compare."""


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
def record(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """record(preset, measured): puts a figure into the table that the session ends with, then fails if it is red.

    Given the pair and the batch as well, it then says where the two part, in the report and below the error.
    """

    def note(preset: str, measured: Measured, models: Bridge | None = None, batch: Tensors | None = None) -> None:
        record_property("parity", (preset, measured.gate, float(measured.worst), measured.bar, measured.name))
        if measured.ulps:
            unit = next(iter(measured.ulps.values())).unit
            tensors = {name: each.as_json() for name, each in measured.ulps.items()}
            record_property("ulps", (preset, measured.gate, unit, tensors))
        try:
            measured.require()
        except ParityError as error:
            if models is not None and batch is not None:
                error.difference = where_they_part(models, batch, preset)
                error.add_note(str(error.difference))
                record_property("difference", sendable(error.difference))
            raise

    return note


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """report(fault, where, figures, passes): requires a red gate, and notes the first one for the table."""

    def note(
        fault: str, planted: str, measured: Sequence[Measured], passes: Mapping[str, bool | None] = NOT_ASKED
    ) -> None:
        red = [figure for figure in measured if not figure.passed]
        assert red, f"no gate sees {fault!r}: {'; '.join(map(str, measured))}"
        first = red[0]
        row = {"fault": fault, "planted": planted, "gate": first.gate, "figure": float(first.worst), "bar": first.bar}
        margin = float(first.worst) / first.bar if first.bar else float("inf")
        record_property("fault", row | {"margin": margin} | passes)

    return note


@pytest.fixture
def as_others_write() -> Iterator[None]:
    """Ports lean on broadcasting, which our own code does without."""
    with jax.numpy_rank_promotion("allow"):
        yield
