"""A gate that cannot fail is a defect: the comparisons refuse what they should, and planted faults turn them red."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from jax_tformer.config import StackConfig, TransformerConfig
from parity_tests.bridge import Pair, Result, known_zeros
from parity_tests.cases import VOCABULARY, batch_for, weights_for
from parity_tests.measure import ParityError, Sample, assert_parity, assert_quality, relative_error
from torch_ref import reference

X = np.linspace(1.0, 2.0, 12).reshape(3, 4)


def test_what_is_equal_passes() -> None:
    assert assert_parity("gate", {"x": X}, {"x": X.copy()}).worst == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({"x": X}, {"x": X * (1 + 2e-12)}, "2.00e-12 >  1e-12"),
        ({"x": X}, {"x": X[:2]}, "shapes differ"),
        ({"x": X}, {"x": X.astype(np.float32)}, "dtypes differ"),
        ({"x": X}, {"x": np.where(X > 1.9, np.nan, X)}, "NaN at 0 places in ours and 2"),
        ({"x": np.where(X > 1.9, np.inf, X)}, {"x": X}, "infinity at 2 places in ours"),
        ({"x": X, "y": X}, {"x": X, "z": X}, r"only ours has \['y'\], only theirs has \['z'\]"),
        ({}, {}, "nothing to compare"),
        ({"x": X}, {"x": 0 * X}, "inf"),
    ],
)
def test_what_differs_is_refused(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ParityError, match=message):
        assert_parity("gate", ours, theirs)


def test_one_wrong_element_among_many_shows() -> None:
    """The maximum catches what the norm of a large tensor drowns."""
    large = np.ones(10**6)
    wrong = large.copy()
    wrong[7] += 1e-9
    assert relative_error(wrong, large) == pytest.approx(1e-9, rel=1e-3)


def quality(*errors: float) -> float:
    """Gate 3's figure for float32 results that are off by these relative errors, the reference's being off by 1e-6."""
    theirs = (X * (1 + 1e-6)).astype(np.float32)
    ours = [(X * (1 + error)).astype(np.float32) for error in errors]
    scales = {"x": float(np.linalg.norm(X))}
    return assert_quality("gate 3", [Sample({"x": x}, {"x": theirs}, {"x": X}, scales) for x in ours]).worst


def test_quality_is_measured_against_the_truth() -> None:
    assert quality(-2.5e-6) == pytest.approx(2.5 / 3.1, rel=0.1)
    with pytest.raises(ParityError):
        quality(4e-6)
    with pytest.raises(ParityError, match="gave float64"):
        assert_quality("gate 3", [Sample({"x": X}, {"x": X}, {"x": X}, {"x": 1.0})])


def test_quality_over_samples_is_the_root_of_the_mean_square() -> None:
    assert quality(3e-6, 1e-6) == pytest.approx(5**0.5 / 3.1, rel=0.1)
    with pytest.raises(ParityError):
        quality(6e-6, 1e-6)


STACK = StackConfig(
    num_layers=2,
    num_heads=4,
    feedforward_width=48,
    activation="gelu_erf",
    positions="rotary",
    norm_placement="pre",
    final_norm=True,
)
CONFIG = TransformerConfig(vocab_size=VOCABULARY, d_model=32, encoder=STACK, decoder=STACK, tied_head=True)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(CONFIG, weights_for(CONFIG, 0.02), "float64", optimised=False)


@pytest.fixture(scope="module")
def compare(pair: Pair) -> Callable[[], tuple[Result, Result]]:
    """Runs both sides, JAX once."""
    batch = batch_for(CONFIG, "right")
    kept: list[Result] = []

    def run() -> tuple[Result, Result]:
        if not kept:
            kept.append(pair.run_jax(batch))
        return kept[0], pair.run_torch(batch)

    return run


def red(ours: Result, theirs: Result) -> list[str]:
    """Which of gates 1 and 2 refuse."""
    gates = []
    for gate, a, b, zero in (
        ("1", ours.activations, theirs.activations, {}),
        ("2", ours.gradients, theirs.gradients, known_zeros(CONFIG, theirs.gradients)),
    ):
        try:
            assert_parity(gate, a, b, zero=zero)
        except ParityError:
            gates.append(gate)
    return gates


def test_without_a_fault_both_gates_are_green(compare: Callable[[], tuple[Result, Result]]) -> None:
    assert red(*compare()) == []


@pytest.mark.parametrize(
    "fault",
    [
        {"activation": "gelu_tanh"},
        {"norm_eps": 1e-6},
        {"attention_scale": "model_width"},
        {"norm_placement": "post"},
        {"positions": "none"},
        {"position_base": 10001.0},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_a_fault_in_the_reference_turns_the_gates_red(
    fault: dict[str, Any],
    pair: Pair,
    compare: Callable[[], tuple[Result, Result]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = reference(replace(pair.config, decoder=replace(STACK, **fault))).eval()
    faulty.load_state_dict(pair.module.state_dict())
    monkeypatch.setattr(pair, "module", faulty)
    assert red(*compare()) == ["1", "2"]


@pytest.mark.parametrize("name", ["query", "output"])
def test_swapped_weights_turn_the_gates_red(
    name: str, pair: Pair, compare: Callable[[], tuple[Result, Result]]
) -> None:
    """Two heads in each other's place, and a square matrix transposed: no check of shapes sees either."""
    before = {key: tensor.clone() for key, tensor in pair.module.state_dict().items()}
    weight = pair.module.get_parameter(f"decoder.blocks.1.cross_attention.{name}.weight")
    with torch.no_grad():
        weight.copy_(weight.T.clone() if name == "output" else weight.roll(8, dims=0))
    try:
        assert red(*compare()) == ["1", "2"]
    finally:
        pair.module.load_state_dict(before)
