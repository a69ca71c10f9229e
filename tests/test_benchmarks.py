"""The benchmarks of decoding and start-up as programs, on models of no size, and what a saved result says of a new one.

What they write is tested, not how fast anything is.
"""

import json
import math

import numpy as np
import pytest

from benchmarks.bounds import cache_bytes, weight_bytes
from benchmarks.decoding.__main__ import main
from benchmarks.decoding.measure import suites
from benchmarks.session import Report, by_turns, run_benchmark, side_environment, spread
from benchmarks.sides import OURS, draw_prompts
from benchmarks.startup import __main__ as startup
from jax_tformer.config.presets import ARCHITECTURES
from twin.sides import Alone, Here, SideFailed


def numbers(tree):
    """All numbers in a tree of JSON."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        return [number for branch in tree for number in numbers(branch)]
    return [tree] if isinstance(tree, int | float) and not isinstance(tree, bool) else []


@pytest.mark.deep
def test_quick_run(tmp_path, capsys):
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
    assert report["ours"]["gpt2, batch 2, greedy: 4 + 4 tokens"] == cases["gpt2", 1]["sides"]["ours"]["step_seconds"]
    assert report["ours"].keys() >= {"vaswani-base, batch 2, beam search, 2 beams: 4 + 4 tokens"}
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


def test_bytes_of_the_bound():
    gpt2, translator = ARCHITECTURES["gpt2"], ARCHITECTURES["vaswani-base"]
    assert weight_bytes(gpt2) == 4 * (124_439_808 - 1024 * 768)
    # 12 layers, keys and values of width 768, 128 + 64 tokens on average.
    assert cache_bytes(gpt2, 8, 128, 128, 1) == 4 * 8 * 12 * 2 * 768 * 192
    # Table, and in 6 layers: 4 + 2 attention matrices (keys and values of the source are kept), feed-forward, 3 norms.
    assert weight_bytes(translator) == 4 * (37000 * 512 + 6 * (6 * 512**2 + 2 * 512 * 2048 + 2048 + 512 + 3 * 2 * 512))
    assert cache_bytes(translator, 2, 64, 64, 4) == 4 * 6 * 2 * 512 * (2 * 4 * 33 + 2 * 64)


def test_turns_and_spreads():
    asked: list[str] = []

    def measure(name):
        asked.append(name)
        return len(asked)

    found = by_turns(["a", "b"], 3, measure)
    assert asked == ["a", "b"] * 3
    assert found == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert by_turns(["a"], 5, measure, seconds=0.0) == {"a": [7, 8]}
    assert spread([3.0, 1.0, 7.0]) == {"median": 3.0, "low": 1.0, "high": 7.0}


@pytest.mark.deep
def test_a_side_in_a_process_of_its_own():
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


def test_a_side_that_cannot_be_made_says_why():
    side = Alone(f"{OURS}:Nobody", environment={})
    with pytest.raises(SideFailed, match="Nobody"):
        side.call("decode")
    side.close()


@pytest.mark.deep
def test_startup(tmp_path, capsys):
    out = tmp_path / "startup.json"
    assert startup.main(["--quick", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert all(math.isfinite(number) and number >= 0 for number in numbers(report))
    assert 0 < report["nothing_seconds"]["median"] < report["help_seconds"]["median"]
    assert report["experiments"].keys() == {"python-docs"}
    found = report["experiments"]["python-docs"]
    kinds = [f"python-docs, tiny, {kind}" for kind in ("cold", "warm")]
    assert report["ours"] == {name: found[name.split()[-1]]["first_step"] for name in kinds}
    for kind in ("cold", "warm"):
        assert 0 < found[kind]["own_first_step"]["median"] < found[kind]["first_step"]["median"]
        assert found[kind]["first_step"]["median"] < found[kind]["whole"]["median"]
        assert found[f"{kind}_over_torch"] > 0
    assert found["torch"]["first_step"]["median"] > found["torch"]["imports"]["median"] > 0
    chapters = report["chapters"]["warm"]
    for name in ("import jax", "tokenizer", "data", "initialisation: compile or load", "step: compile or load"):
        assert chapters[name] >= 0, name
    parts = sum(seconds for name, seconds in chapters.items() if name != "in all")
    assert parts >= chapters["in all"] * 0.999
    assert "chapter by chapter" in capsys.readouterr().out


def test_startup_says_which_program_fails(tmp_path):
    programs, missing = startup.Programs(tmp_path, "cpu"), ["--data.path", str(tmp_path / "missing.txt")]
    with pytest.raises(SideFailed, match=r"train\.py text: .*missing\.txt"):
        programs.first_step("text", missing, "cold")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "argument --rounds: '0' is not a whole number of at least 1; see"),
        (["--rounds", "two"], "argument --rounds: 'two' is not a whole number of at least 1; see"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_bad_options_get_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        startup.main(arguments)
    told = capsys.readouterr()
    assert (stopped.value.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert told.err.startswith(f"python -m benchmarks.startup: error: {said}")


def take(seconds, *arguments):
    """Runs a benchmark in which ours takes `seconds` in each case."""
    ours = {name: spread([0.9 * median, median, 3 * median]) for name, median in seconds.items()}
    return run_benchmark("train_step", None, arguments, lambda session: Report({}, ours, [], []))


@pytest.mark.parametrize(
    ("now", "status", "said"),
    [
        ({"step": 1.2, "other": 0.01}, 1, ["step: SLOWER, 1200.0 ms now and 1000.0 ms saved, 1.20", "other: as fast"]),
        ({"step": 1.09, "other": 0.008}, 0, ["step: as fast", "other: faster"]),
        # What is new is named, and a floor that holds nothing is no floor.
        ({"step": 1.0, "new": 9.0}, 0, ["step: as fast", "new: nothing is saved"]),
        ({"new": 9.0}, 1, ["new: nothing is saved"]),
    ],
)
def test_a_saved_result_is_a_floor_under_speed(now, status, said, tmp_path, capsys):
    saved, out = tmp_path / "saved.json", tmp_path / "now.json"
    assert take({"step": 1.0, "other": 0.01}, "--out", str(saved)) == 0
    capsys.readouterr()
    assert take(now, "--out", str(out), "--against", str(saved)) == status
    shown = capsys.readouterr().out.splitlines()[-len(said) :]
    assert all(line.startswith(start) for line, start in zip(shown, said, strict=True)), shown
    assert json.loads(out.read_text())["ours"].keys() == now.keys()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"cores": ', '"cores": 1', "was measured with cores 1"),
        ('"processor": "', '"processor": "another ', "was measured with processor 'another "),
        ('"train_step"', '"decoding"', "cannot be read as a result of this benchmark"),
        ('"median": 1.0', '"median": 0.0', "cannot be read as a result of this benchmark"),
        ('"ours"', '"theirs"', "cannot be read as a result of this benchmark"),
        ("{", "", "cannot be read as a result of this benchmark"),
    ],
)
def test_a_saved_result_of_something_else_is_refused_before_anything_is_measured(old, new, said, tmp_path, capsys):
    saved, out = tmp_path / "saved.json", tmp_path / "now.json"
    assert take({"step": 1.0}, "--out", str(saved)) == 0
    assert old in saved.read_text()
    saved.write_text(saved.read_text().replace(old, new, 1))
    capsys.readouterr()
    assert take({"step": 1.0}, "--out", str(out), "--against", str(saved)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not out.exists()
    # Nor may the new result take the place of the saved one.
    assert take({"step": 9.0}, "--out", str(saved), "--against", str(saved)) == 2
    assert "expected two files" in capsys.readouterr().err
