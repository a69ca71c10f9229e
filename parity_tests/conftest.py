"""float64 for the gates, one thread, and the figures that the run's table is made of."""

import jax
import pytest
import torch

from jax_tformer.model import fast
from twin.pair import identity, where_they_part

TOLERANCES = ("softmax, 1e-2", "logits, 1e-4", "logits, 1e-5")
"""Comparisons by a tolerance picked by hand."""


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The models are small, and threads that wait for each other beside another worker take ten times as long."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def exact_arithmetic():
    """float64 on, and products in full precision on every platform."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def short_blocks(monkeypatch):
    """Attention in blocks of 4 queries: short sequences would otherwise fit into one block."""
    monkeypatch.setattr(fast, "block_length", lambda length: 4)


@pytest.fixture
def record(parity):
    """record(preset, measured): puts a figure into the table that the run ends with, then fails if it is red."""
    return lambda preset, measured: parity.figure(measured, row=preset)


@pytest.fixture
def hold(parity):
    """hold(preset, models, batch): records gates 1 and 2 on a batch; the report says where the two sides part."""

    def note(preset, models, batch):
        for figure in identity(models, batch):
            parity.figure(figure, row=preset, search=lambda: where_they_part(models, batch, preset))

    return note


@pytest.fixture
def report(parity):
    """report(fault, where, figures, passes): requires a red gate, and notes the first one for the table of faults.

    `passes` says which TOLERANCES would have let the fault pass; they say nothing without logits or losses.
    """

    def note(fault, planted, measured, passes=None):
        words = {True: "missed", False: "seen", None: ""}
        missed = {title: words[(passes or {}).get(title)] for title in TOLERANCES}
        parity.fault(fault, measured, planted, **missed)

    return note


@pytest.fixture
def single_precision():
    """float64 is on where a program asks for it: as in a new process."""
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def as_others_write():
    """Ports lean on broadcasting, which our own code does without."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """The test runs in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
