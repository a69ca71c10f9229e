"""The benchmark of decoding as a program, on models of no size: what it writes, not how fast anything is."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bounds import cache_bytes, weight_bytes
from benchmarks.decoding.__main__ import main
from benchmarks.decoding.measure import suites
from benchmarks.session import by_turns, side_environment, spread
from benchmarks.sides import OURS, draw_prompts
from jax_tformer.presets import ARCHITECTURES
from jax_tformer_comparison.sides import Alone, Here, SideFailed


def numbers(tree: Any) -> list[float]:
    """All numbers in a tree of JSON."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        return [number for branch in tree for number in numbers(branch)]
    return [tree] if isinstance(tree, int | float) and not isinstance(tree, bool) else []


@pytest.mark.deep
def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "decoding.json"
    assert main(["--quick", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert all(math.isfinite(number) and number >= 0 for number in numbers(report))

    assert report["machine"]["cores"] >= 1
    assert report["machine"]["versions"].keys() >= {"jax", "torch", "transformers"}
    for case in (case for suite in report["suites"] for case in suite["cases"]):
        assert case["bandwidth"]["way"] in case["bandwidth"]["ways"]
        assert min(numbers(case["bandwidth"])) > 0
    sides = {
        ("gpt2", 1): {"ours", "hugging face", "hugging face static", "reference"},
        ("vaswani-base", 1): {"ours", "hugging face", "reference"},
        ("vaswani-base", 2): {"ours", "hugging face"},
    }
    cases = {(suite["model"], case["beams"]): case for suite in report["suites"] for case in suite["cases"]}
    assert {name: set(case["sides"]) for name, case in cases.items()} == sides
    for case in cases.values():
        assert not case["absent"]
        assert min(case["weight_bytes"], case["cache_bytes"], case["bound_seconds"], case["different_tokens"]) > 0
        for side in case["sides"].values():
            for name in ("tokens_per_second", "tokens_per_second_without_prefill", "first_call_seconds", "peak_memory"):
                assert side[name] > 0, name
            for name in ("seconds", "first_token_seconds", "step_seconds"):
                assert 0 < side[name]["low"] <= side[name]["median"] <= side[name]["high"], name
        for agreement in case["agreement"].values():
            assert agreement["equal_rows"] == agreement["rows"] or agreement["largest_gap"] > 0
    assert cases["gpt2", 1]["agreement"].keys() == {"hugging face", "hugging face static", "reference"}
    assert report["suites"][0]["windows"]["positions"] == [5, 9]
    assert min(numbers(report["suites"][0]["windows"])) > 0
    [first] = report["suites"][0]["first_tokens"]
    assert (first["batch"], first["prompt"], set(first["sides"])) == (2, 4, {"ours", "hugging face"})
    assert min(numbers(first)) > 0
    for side in first["sides"].values():
        assert side["prompt_tokens_per_second"] == pytest.approx(8 / side["seconds"]["median"])

    shown = capsys.readouterr().out
    assert all(
        text in shown
        for text in ("gpt2, batch 2, greedy", "beam search", "HF, static cache", "GB/s", "ms to the first")
    )


def test_bytes_of_the_bound() -> None:
    gpt2, translator = ARCHITECTURES["gpt2"], ARCHITECTURES["vaswani-base"]
    assert weight_bytes(gpt2) == 4 * (124_439_808 - 1024 * 768)
    # 12 layers, keys and values of width 768, 128 + 64 tokens on average.
    assert cache_bytes(gpt2, 8, 128, 128, 1) == 4 * 8 * 12 * 2 * 768 * 192
    # Table, and in 6 layers: 4 + 2 attention matrices (keys and values of the source are kept), feed-forward, 3 norms.
    assert weight_bytes(translator) == 4 * (37000 * 512 + 6 * (6 * 512**2 + 2 * 512 * 2048 + 2048 + 512 + 3 * 2 * 512))
    assert cache_bytes(translator, 2, 64, 64, 4) == 4 * 6 * 2 * 512 * (2 * 4 * 33 + 2 * 64)


def test_turns_and_spreads() -> None:
    asked: list[str] = []

    def measure(name: str) -> int:
        asked.append(name)
        return len(asked)

    found = by_turns(["a", "b"], 3, measure)
    assert asked == ["a", "b"] * 3
    assert found == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert by_turns(["a"], 5, measure, seconds=0.0) == {"a": [7, 8]}
    assert spread([3.0, 1.0, 7.0]) == {"median": 3.0, "low": 1.0, "high": 7.0}


@pytest.mark.deep
def test_a_side_in_a_process_of_its_own() -> None:
    kind, config = f"{OURS}:Decoding", suites(quick=True)[0].config
    given, question = (config, "cpu"), ("decode", draw_prompts(50, 2, 4), 4, 4, 1)
    side = Alone(kind, *given, environment=side_environment("cpu"))
    try:
        with pytest.raises(SideFailed, match=r"AttributeError: .*'nothing'"):
            side.call("nothing")
        np.testing.assert_array_equal(side.call(*question).tokens, Here(kind, *given).call(*question).tokens)
        assert side.call("peak_memory") > side.call("libraries_memory") > 1e6
    finally:
        side.close()


def test_a_side_that_cannot_be_made_says_why() -> None:
    side = Alone(f"{OURS}:Nobody", environment={})
    with pytest.raises(SideFailed, match="Nobody"):
        side.call("decode")
    side.close()
