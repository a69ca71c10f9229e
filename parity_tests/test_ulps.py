"""Distances in units in the last place: against numbers counted by hand, and as the page and the JSON show them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16

from parity.gates.measure import BFLOAT16, FLOAT32, Sample, quality
from parity.gates.ulps import EDGES, MOST, Ulps, distances, histogram, median, together
from parity.plugin import PROPERTY, Parity
from parity.report.checks import Checks
from parity.report.figures import Figures, with_ulps
from parity.report.ulps_histograms import histograms
from parity_tests.report import Results

RNG = np.random.default_rng(0)


def away(numbers: np.ndarray, steps: int) -> np.ndarray:
    """The numbers so many neighbours further from zero; a type's bits count its numbers."""
    integers: np.ndarray = numbers.view({2: np.int16, 4: np.int32}[numbers.dtype.itemsize]) + steps
    return integers.view(numbers.dtype)


@pytest.mark.parametrize(("dtype", "unit"), [(np.float32, "float32"), (bfloat16, "bfloat16"), (np.float16, "float16")])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_neighbours_are_one_ulp_apart(dtype: Any, unit: str, steps: int) -> None:
    """At every size, on both sides of zero: 1 + 7 neighbours stay within one power of two."""
    truth = np.array([1.0, -1.0, 1.5, 3.0, 0.3, -1e-3, 200.0, 6.2e-5])
    nearest = truth.astype(dtype)
    found = distances(away(nearest, steps), truth, unit)
    assert found.tolist() == [steps] * len(truth)


def test_the_nearest_number_is_at_zero_and_its_neighbour_at_one() -> None:
    """However near to the middle of the two the truth may be."""
    truth = np.array([1 + 2.0**-24 - 2.0**-40, 1 + 2.0**-24 + 2.0**-40])
    assert distances(np.ones(2, np.float32), truth, "float32").tolist() == [0, 1]


@pytest.mark.parametrize(
    ("number", "truth", "distance"),
    [
        (0.0, 0.0, 0),
        (2.0**-149, 0.0, 1),  # the smallest there is
        (3 * 2.0**-149, 2.0**-149, 2),
        (2.0**-126, 2.0**-126 + 2.0**-148, 2),  # where they begin to be equally far apart
        (np.inf, 1.0, np.inf),
        (np.nan, 1.0, np.inf),
        (1.0, 1e300, np.inf),
        (-1.0, 1.0, 2.0**24),
    ],
)
def test_the_edges_of_a_type(number: float, truth: float, distance: float) -> None:
    assert distances(np.array([number], np.float32), np.array([truth]), "float32").tolist() == [distance]


def test_a_wide_result_of_a_narrow_computation_counts_in_ulps_of_the_narrow_type() -> None:
    """Logits are float32 in gate 4, and of no more worth than their bfloat16 inputs."""
    numbers = np.array([1.0 + 2.0**-7, 1.0 + 2.0**-9, 1.0], np.float32)
    assert distances(numbers, np.ones(3), "bfloat16").tolist() == [1, 0.25, 0]


def test_counts_by_bin() -> None:
    truth = np.ones(10)
    steps = [0, 0, 1, 2, 3, 4, 5, 8, 4096, 4097]
    ours = np.array([1 + step * 2.0**-23 for step in steps], np.float32)
    found = histogram([(ours, truth.astype(np.float32), truth)], "float32")
    assert dict(zip(EDGES, found.ours, strict=False)) == dict.fromkeys(EDGES, 0) | {
        0: 2,
        1: 1,
        2: 1,
        4: 2,
        8: 2,
        4096: 1,
    }
    assert found.ours[-1] == 1
    assert found.theirs == (10, *[0] * len(EDGES))
    assert (median(found.ours), median(found.theirs)) == (4, 0)
    assert median((1, *[0] * (len(EDGES) - 1), 9)) is None
    assert Ulps.read("float32", found.as_json()) == found
    assert found.as_json()[1] == [10]
    assert together([found, found]).ours == tuple(2 * count for count in found.ours)


def test_of_many_numbers_every_second_is_looked_at() -> None:
    truth = np.ones(MOST + 1)
    found = histogram([(truth.astype(np.float32), truth.astype(np.float32), truth)], "float32")
    assert sum(found.ours) == sum(found.theirs) == MOST // 2 + 1


def narrow(noise: float, dtype: Any = np.float32) -> np.ndarray:
    return (TRUTH * (1 + noise * RNG.standard_normal(TRUTH.shape))).astype(dtype)


TRUTH = RNG.standard_normal((40, 50))


def test_gate_3_comes_with_histograms_of_ours_and_theirs() -> None:
    """Ours is worse by a factor of eight, and the histograms say whose is whose."""
    tensors = {"x": narrow(8e-7), "scalar": np.float32(1), "zero": np.ones(3, np.float32)}
    theirs = tensors | {"x": narrow(1e-7)}
    truth = {"x": TRUTH, "scalar": np.float64(1), "zero": np.full(3, 1e-20)}
    scales = {"x": float(np.linalg.norm(TRUTH)), "scalar": 1.0, "zero": 1.0}
    measured = quality("3", [Sample(tensors, theirs, truth, scales)] * 2, FLOAT32)
    assert not measured.passed
    assert measured.ulps.keys() == {"x"}
    found = measured.ulps["x"]
    assert sum(found.ours) == sum(found.theirs) == 2 * TRUTH.size
    here, there = median(found.ours), median(found.theirs)
    assert here is not None
    assert there is not None
    assert here >= 4 * max(there, 1)


def test_gate_4_counts_in_ulps_of_bfloat16() -> None:
    sides = {"x": narrow(0, bfloat16)}, {"x": narrow(2.0**-7, bfloat16)}
    measured = quality("4", [Sample(*sides, {"x": TRUTH}, {"x": float(np.linalg.norm(TRUTH))})], BFLOAT16)
    found = measured.ulps["x"]
    assert found.unit == "bfloat16"
    assert found.ours[0] == TRUTH.size
    assert 0.1 < found.theirs[0] / TRUTH.size < 0.9


def report_of(tensors: Any, outcome: str = "passed") -> Any:
    properties = [
        ("parity", ("gpt2", "3 float32 / allowed", 0.5, 1.0, "x")),
        ("ulps", ("gpt2", "3 float32 / allowed", *tensors)),
    ]
    passed = outcome == "passed"
    return SimpleNamespace(
        nodeid="test", failed=not passed, passed=passed, skipped=False, when="call", user_properties=properties
    )


def test_histograms_of_several_tests_add_up_and_stand_in_the_json() -> None:
    results = Results()
    for _ in range(2):
        results.add(report_of(("float32", {"decoder.0.hidden": [[3, 1], [4]], "logits": [[0, 0, 5], [5]]})))
    document = json.loads(results.as_json({"date": "today"}))
    assert document["verdict"] == "green"
    assert document["ulps"]["edges"] == list(EDGES)
    assert document["ulps"]["of"] == [
        {"row": "gpt2", "gate": "3 float32 / allowed", "unit": "float32"}
        | {"tensors": {"decoder.0.hidden": [[6, 2], [8]], "logits": [[0, 0, 10], [10]]}}
    ]
    assert "ulps" not in json.loads(Results().as_json({}))
    assert with_ulps('{\n  "a": 1\n}\n', Figures()) == '{\n  "a": 1\n}\n'


def test_the_page_draws_each_tensor_from_both_sides() -> None:
    figures = Figures()
    assert histograms(figures) == ""
    bins = [0] * len(EDGES)
    figures.put_ulps("gpt2", "3 float32 / allowed", {"a<b": Ulps("float32", (2, 2, *bins[1:]), (4, 0, *bins[1:]))})
    figures.put_ulps("gpt2", "4 bfloat16 / allowed", {"x": Ulps("bfloat16", (*bins, 8), (8, *bins))})
    page = histograms(figures)
    assert "a&lt;b" in page
    assert "a<b" not in page
    assert (
        "float32: half within 0 / 0, nearest 50% / 100%; bfloat16: half within &gt; 4096 / 0, nearest 0% / 100%" in page
    )
    assert page.count("<details>") == 1
    # Of each gate all tensors together, and each by itself; half as high where half as many are.
    ours, theirs = re.findall(r'<path class="o" d="([^"]*)"', page), re.findall(r'<path class="t" d="([^"]*)"', page)
    assert ours == ["M2 32V16M10 32V16"] * 2 + ["M114 32V0"] * 2
    assert theirs == ["M5 32V0"] * 4


def test_a_rare_bin_is_still_drawn() -> None:
    figures = Figures()
    rare = (9999, *[0] * (len(EDGES) - 1), 1)
    figures.put_ulps("gpt2", "3", {"x": Ulps("float32", rare, rare)})
    assert 'd="M2 32V0M114 32V31"' in histograms(figures)


def test_the_plugins_page_and_json_have_them_too(tmp_path: Path) -> None:
    module, notes = torch.nn.Linear(4, 6), []
    weights = {"kernel": ("weight", "o i -> i o"), "bias": "bias"}
    x = RNG.standard_normal((5, 4))
    Parity(notes.append).check(lambda p, x: x @ p["kernel"] + p["bias"][None], module, weights, [x], gates=["1", "3"])
    sent = json.loads(json.dumps([(PROPERTY, note) for note in ({}, *notes)]))
    checks = Checks()
    checks.add(SimpleNamespace(nodeid="test", when="call", failed=False, skipped=False, user_properties=sent), PROPERTY)
    for _ in range(2):
        checks.settle()  # again, where tests run again: nothing counts twice
    checks.write(tmp_path)
    document = json.loads((tmp_path / "parity.json").read_text())
    assert document["verdict"] == "green"
    [of] = document["ulps"]["of"]
    assert (of["row"], of["gate"], of["unit"]) == ("test", "3 float32 / allowed", "float32")
    assert {name: [sum(side) for side in sides] for name, sides in of["tensors"].items()} == {
        "output": [9 * 30] * 2,
        "weight": [9 * 24] * 2,
        "bias": [9 * 6] * 2,
    }
    page = (tmp_path / "parity.html").read_text()
    assert page.count("<svg") == 4
    assert ".ulps" in page
