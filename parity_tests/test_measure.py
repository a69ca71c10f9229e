"""The comparisons refuse what they should, and show both sides; test_faults.py turns whole gates red."""

from dataclasses import replace

import numpy as np
import pytest

from parity.gates.measure import BFLOAT16, ParityError, Sample, assert_parity, quality, relative_error

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


def figure(*errors: float) -> float:
    """Gate 3's figure for float32 results that are off by these relative errors, the reference's being off by 1e-6."""
    theirs = (X * (1 + 1e-6)).astype(np.float32)
    ours = [(X * (1 + error)).astype(np.float32) for error in errors]
    scales = {"x": float(np.linalg.norm(X))}
    return quality("3", [Sample({"x": x}, {"x": theirs}, {"x": X}, scales) for x in ours]).require().worst


def test_quality_is_measured_against_the_truth() -> None:
    assert figure(-2.5e-6) == pytest.approx(2.5 / 2.62, rel=0.03)
    with pytest.raises(ParityError):
        figure(4e-6)
    with pytest.raises(ParityError, match="float64 on both sides"):
        quality("3", [Sample({"x": X}, {"x": X}, {"x": X}, {"x": 1.0})])


def test_errors_of_bfloat16_are_averaged_by_their_logarithms() -> None:
    """One sample of three with a kink doubles an error, whichever side of the median it is on."""
    samples = [
        Sample({"x": np.float32(X * (1 + e))}, {"x": np.float32(X * 1.001)}, {"x": X}, {"x": float(np.linalg.norm(X))})
        for e in (1e-3, 1e-3, 8e-3)
    ]
    assert quality("4", samples, replace(BFLOAT16, factor=3.0)).worst == pytest.approx(2 / 3, rel=0.01)
    assert quality("4", samples, replace(BFLOAT16, mean="median")).worst == pytest.approx(1 / 1.8, rel=0.01)
    with pytest.raises(ParityError):
        quality("4", samples, BFLOAT16).require()


def test_quality_over_samples_is_the_median() -> None:
    assert figure(1e-6, 2e-6, 9e-6) == pytest.approx(2 / 2.62, rel=0.03)
    with pytest.raises(ParityError):
        figure(1e-6, 4e-6, 9e-6)
