"""The comparisons refuse what they should, and show both sides; test_faults.py turns whole gates red."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity.gates.measure import (
    BFLOAT16,
    FLOAT32,
    ParityError,
    Sample,
    assert_parity,
    numbers_lost,
    quality,
    relative_error,
)

X = np.linspace(1.0, 2.0, 12).reshape(3, 4)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (X, X.copy()),
        (jnp.ones((2, 3), jnp.float32), torch.ones(2, 3, requires_grad=True)),
        (jnp.ones(2, jnp.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    ],
)
def test_what_is_equal_passes_whichever_framework_has_it(ours, theirs):
    assert assert_parity("gate", {"x": ours}, {"x": theirs}).worst == 0


@pytest.mark.parametrize(
    "ours, theirs, message",
    [
        ({"x": X}, {"x": X * (1 + 2e-12)}, "2.00e-12 >  1e-12"),
        ({"x": X}, {"x": X[:2]}, "shapes differ"),
        ({"x": X}, {"x": X.astype(np.float32)}, "x: dtypes differ: ours float64, theirs float32"),
        (
            {"x": X},
            {"x": np.where(X > 1.9, np.nan, X)},
            r"NaN at 0 places in ours and 2 in theirs; at \[2, 2\] ours is 1.909, theirs nan",
        ),
        ({"x": np.where(X > 1.9, np.inf, X)}, {"x": X}, "infinity at 2 places in ours"),
        ({"x": X, "y": X}, {"x": X, "z": X}, r"only ours has \['y'\], only theirs has \['z'\]"),
        ({}, {}, "nothing to compare"),
        ({"x": X}, {"x": 0 * X}, "inf"),
        ({"x": X * 1j}, {"x": X * 1j}, "complex"),
    ],
)
def test_what_differs_is_refused(ours, theirs, message):
    with pytest.raises(ParityError, match=message):
        assert_parity("gate", ours, theirs)


def test_one_wrong_element_among_many_shows():
    """The maximum catches what the norm of a large tensor drowns."""
    large = np.ones(10**6)
    wrong = large.copy()
    wrong[7] += 1e-9
    assert relative_error(wrong, large) == pytest.approx(1e-9, rel=1e-3)


def test_numbers_that_are_lost_are_counted_and_nan_is_what_it_was():
    before = {"x": np.array([1.0, np.nan, 3.0, 0.0]), "n": np.arange(3)}
    assert numbers_lost(before, {name: array.copy() for name, array in before.items()}).passed
    assert numbers_lost(before, before | {"x": np.array([1.0, 2.0, np.nan, 0.0])}).worst == 2


def figure(*errors, theirs=1e-6, allowed=FLOAT32):
    """The figure of gate 3 or 4 for float32 results that are off by these relative errors, and the reference's."""
    scales = {"x": float(np.linalg.norm(X))}
    narrow = [{"x": np.float32(X * (1 + error))} for error in (theirs, *errors)]
    samples = [Sample(ours, narrow[0], {"x": X}, scales) for ours in narrow[1:]]
    return quality("3", samples, allowed).require().worst


@pytest.mark.parametrize(
    "errors, expected",
    [([-2.5e-6], 2.5 / 2.62), ([4e-6], None), ([1e-6, 2e-6, 9e-6], 2 / 2.62), ([1e-6, 4e-6, 9e-6], None)],
)
def test_quality_is_the_median_error_against_the_truth(errors, expected):
    if expected is None:
        with pytest.raises(ParityError):
            figure(*errors)
    else:
        assert figure(*errors) == pytest.approx(expected, rel=0.03)


def test_quality_is_of_the_type_that_it_says():
    with pytest.raises(ParityError, match="float64 on both sides"):
        quality("3", [Sample({"x": X}, {"x": X}, {"x": X}, {"x": 1.0})])


def test_errors_of_bfloat16_are_averaged_by_their_logarithms():
    """One sample of three with a kink doubles an error, whichever side of the median it is on."""
    kink = partial(figure, 1e-3, 1e-3, 8e-3, theirs=1e-3)
    assert kink(allowed=replace(BFLOAT16, factor=3.0)) == pytest.approx(2 / 3, rel=0.01)
    assert kink(allowed=replace(BFLOAT16, mean="median")) == pytest.approx(1 / 1.8, rel=0.01)
    with pytest.raises(ParityError):
        kink(allowed=BFLOAT16)
