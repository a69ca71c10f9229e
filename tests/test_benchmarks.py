"""The benchmarks as programs, on models of no size; the operations and bytes that they count; what a saved result says.

What they write is tested, not how fast anything is.
"""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from benchmarks import decoding, processes, startup, train_step
from benchmarks.bounds import cache_bytes, training_flops, weight_bytes
from benchmarks.session import Report, by_turns, run_benchmark, side_environment, spread
from benchmarks.sides import OURS, draw_prompts
from benchmarks.sides.reference import Reference
from benchmarks.training_cases import OPTIMIZER, BatchShape, draw_batch, small_gpt, tiny, without_dropout
from jax_tformer.config import IGNORED
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import init_state
from jax_tformer.training.step import train_step as make_step
from twin.sides import Alone, Here, SideFailed

ROOT = Path(__file__).parents[1]
BART = "BART (HF), own weights"


def numbers(tree):
    """All numbers in a tree of JSON, and its spreads whole."""
    if isinstance(tree, dict) and tree.keys() == {"median", "low", "high"}:
        assert 0 < tree["low"] <= tree["median"] <= tree["high"] < math.inf
    elif isinstance(tree, dict | list):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            numbers(branch)
    else:
        assert not isinstance(tree, float) or 0 <= tree < math.inf


@pytest.fixture
def figures(tmp_path, capsys):
    """Runs a benchmark, whose tables say what `said` has, and returns what it writes."""

    def run(program, *said):
        out = tmp_path / "new" / "figures.json"
        assert program.main(["--quick", "--out", str(out)]) == 0
        report = json.loads(out.read_text())
        assert report["machine"]["cores"] >= 1
        assert report["machine"]["versions"].keys() >= {"jax", "torch", "transformers"}
        numbers(report)
        shown = capsys.readouterr().out
        assert all(text in shown for text in said)
        return report

    return run


@pytest.mark.deep
def test_decoding(figures):
    report = figures(decoding, "gpt2, batch 2, greedy", "beam search", "HF, static cache", "GB/s")
    expected = {
        "gpt2, batch 2, greedy: 4 + 4 tokens": {"HF, dynamic cache", "HF, static cache", "torch_ref, no cache"},
        "gpt2, batch 2, greedy: 4 + 1 tokens": {"HF, dynamic cache"},
        "vaswani-base, batch 2, greedy: 4 + 4 tokens": {BART, "torch_ref, no cache"},
        "vaswani-base, batch 2, beam search, 2 beams: 4 + 4 tokens": {BART},
    }
    others = {name: set(case["sides"]) - {"jax_tformer"} for name, case in report["cases"].items()}
    assert others == expected
    for name, case in report["cases"].items():
        assert report["ours"][name] == case["sides"]["jax_tformer"]["step_seconds"]
        assert not case["absent"]
        assert case["agreement"].keys() == expected[name] - {BART}
        assert (case["bound_seconds"] is None) == (case["new_tokens"] == 1)
        assert min(case["memory"]["rate"], case["weight_bytes"], case["cache_bytes"], case["different_tokens"]) > 0
        for side in case["sides"].values():
            assert min(side["tokens_per_second"], side["peak_memory"]) > 0
        for agreement in case["agreement"].values():
            assert agreement["equal_rows"] == agreement["rows"] or agreement["largest_gap"] > 0


@pytest.mark.deep
def test_train_step(figures):
    cases = figures(train_step, "vaswani-base, 2 x 6 source and 8 tokens", "jax_tformer", "GFLOP/s")["cases"].values()
    assert [case["model"] for case in cases] == ["small gpt", "gpt2", "vaswani-base", "bert-base"]
    for case in cases:
        sides = case["sides"]
        theirs = BART if case["model"] == "vaswani-base" else "HF"
        assert list(sides) == ["jax_tformer", "torch_ref", theirs]
        assert case["agreed"]
        assert not case["absent"]
        assert case["disagreement"].keys() == {"torch_ref", theirs} - {BART}
        assert max(case["disagreement"].values()) < 1e-5
        assert sides["torch_ref"]["times_reference"] == 1
        # The common floor is that of the faster library.
        rates = {library: way["rate"] for library, way in case["products"].items()}
        assert case["floor_seconds"] == case["flops"]["needed"] / max(rates.values())
        for name, side in sides.items():
            rate, (first, second) = rates["jax" if name == "jax_tformer" else "torch"], side["losses"]
            assert side["times_own_floor"] == pytest.approx(side["times_floor"] * rate / max(rates.values()))
            # Of 50 ids none is known yet, and an update helps.
            assert abs(first - math.log(50)) < 0.1
            assert second < first
            assert min(side["peak_memory"], side["first_step_seconds"]) > 0


@pytest.mark.deep
def test_startup(figures):
    report = figures(startup, "from the command to the first step")
    assert report["nothing"]["median"] < report["help"]["median"]
    [kinds] = report["experiments"].values()
    assert report["ours"] == {f"python-docs, tiny, {kind}": kinds[kind]["first_step"] for kind in ("cold", "warm")}
    for kind in ("cold", "warm", "torch"):
        assert report["help"]["median"] < kinds[kind]["first_step"]["median"] < kinds[kind]["whole"]["median"]


@pytest.mark.deep
def test_processes(figures):
    report = figures(processes, "two / one")
    one, two = report["trained"].values()
    for figure, ratio in report["two_over_one"].items():
        assert ratio == two[figure]["median"] / one[figure]["median"]
        assert report["ours"][f"2 processes of 2 devices, {figure}"] == two[figure]
    for shares in report["rows"].values():
        assert list(shares) == ["the whole batch", "one of 2 processes", "one of 4", "one of 8"]


def test_startup_says_which_program_fails(tmp_path):
    with pytest.raises(SideFailed, match=r"train\.py text: .*missing\.txt"):
        startup.Starts(tmp_path, "cpu", ["text", "--data.path", str(tmp_path / "missing.txt")]).take("cold")


@pytest.mark.deep
def test_losses_that_disagree_are_a_failure(tmp_path, monkeypatch):
    start = Reference.start
    moved = lambda weights: {name: np.flip(array) for name, array in weights.items()}  # noqa: E731
    monkeypatch.setattr(Reference, "start", lambda side, seed, weights: start(side, seed, moved(weights)))
    out = tmp_path / "train_step.json"
    assert train_step.main(["--quick", "--model", "small gpt", "--out", str(out)]) == 1
    [case] = json.loads(out.read_text())["cases"].values()
    assert not case["agreed"]
    assert case["disagreement"]["HF"] < case["tolerance"] < case["disagreement"]["torch_ref"]


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        (startup, ["--rounds", "0"], "rounds is 0; expected a whole number of at least 1"),
        (startup, ["--rounds", "two"], "two"),
        (startup, ["--device", "tpu"], "tpu"),
        (processes, ["--device", "gpu"], "expected cpu: the devices of this benchmark are virtual ones"),
        (train_step, ["--model", "gpt"], "expected one of 'small gpt', 'gpt2', 'vaswani-base', 'bert-base'"),
    ],
)
def test_bad_options_get_one_line(program, arguments, said, tmp_path, capsys):
    assert program.main(["--quick", "--out", str(tmp_path / "none.json"), *arguments]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith("python -m benchmarks.")
    assert said in told.err
    assert not list(tmp_path.iterdir())


def test_turns():
    asked = []
    calls = {name: lambda name=name: asked.append(name) or len(asked) for name in "ab"}
    assert by_turns(calls, 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert asked == ["a", "b"] * 3
    assert by_turns(calls, 5, seconds=0.0) == {"a": [7, 9], "b": [8, 10]}


@pytest.mark.deep
def test_a_side_in_a_process_of_its_own():
    kind, config = f"{OURS}:Decoding", decoding.suites(quick=True)[0].config
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


def test_torch_alone_loads_no_other_framework():
    code = "import sys, benchmarks.sides.reference; print({'jax', 'flax', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n", "its memory would be counted as PyTorch's"


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
    assert take(now, "--out", str(out), "--against", str(saved)) == status
    shown = capsys.readouterr().out.splitlines()[-len(said) :]
    assert all(line.startswith(start) for line, start in zip(shown, said, strict=True)), shown
    assert json.loads(out.read_text())["ours"].keys() == now.keys()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"cores": ', '"cores": 1', "was measured with cores 1"),
        ('"processor": "', '"processor": "another ', "was measured with processor 'another "),
        *(
            (old, new, "cannot be read as a result of this benchmark")
            for old, new in (
                ('"train_step"', '"decoding"'),
                ('"median": 1.0', '"median": 0.0'),
                ('"ours"', '"theirs"'),
                ("{", ""),
            )
        ),
    ],
)
def test_a_saved_result_of_something_else_is_refused_before_anything_is_measured(old, new, said, tmp_path, capsys):
    saved, out = tmp_path / "saved.json", tmp_path / "now.json"
    assert take({"step": 1.0}, "--out", str(saved)) == 0
    assert old in saved.read_text()
    saved.write_text(saved.read_text().replace(old, new, 1))
    assert take({"step": 1.0}, "--out", str(out), "--against", str(saved)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not out.exists()
    # Nor may the new result take the place of the saved one.
    assert take({"step": 9.0}, "--out", str(saved), "--against", str(saved)) == 2
    assert "expected two files" in capsys.readouterr().err


def counted(jaxpr):
    """Operations of all matrix products in a jaxpr: the bodies of loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * equation.outvars[0].aval.size
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += repeats * sum(map(counted, jaxprs_in_params(equation.params)))
    return total


GPT2 = tiny(ARCHITECTURES["gpt2"])
MODERN = replace(GPT2.decoder, key_value_heads=1, gated=True, positions="rotary", max_positions=None)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (GPT2, BatchShape(3, 10)),
        # What GPT-2 is not: heads that share keys, gates, rotation, a head of its own.
        (replace(GPT2, decoder=MODERN, tied_head=False), BatchShape(3, 10)),
        (tiny(ARCHITECTURES["bert-base"]), BatchShape(2, 9)),
        (tiny(ARCHITECTURES["vaswani-base"]), BatchShape(2, 8, 5)),
        (tiny(ARCHITECTURES["article-encoder-decoder"]), BatchShape(3, 4, 7)),
    ],
    ids=["gpt2", "modern", "bert", "vaswani", "article"],
)
def test_operations_are_those_of_the_program(config, shape):
    # Every product in the open, and none computed twice.
    compute = replace(config.compute, attention="einsum", remat="none")
    config = replace(without_dropout(config), compute=compute)
    net, tx = transformer(config), optimizer(OPTIMIZER, 10)
    state = jax.eval_shape(lambda: init_state(net, tx, jax.random.key(0)))
    program = jax.make_jaxpr(make_step(net, tx))(state, draw_batch(config, shape)).jaxpr
    # Without the logits, which nothing reads where the loss is computed from the hidden states.
    program, _ = dce_jaxpr(program, [True] * len(program.outvars))
    flops = training_flops(config, *shape)
    stack, length = config.decoder, shape.length
    # "einsum" also computes the half of causal attention that is masked.
    masked = 6 * stack.num_layers * stack.num_heads * config.head_width(stack) * shape.rows * length**2 if stack else 0
    assert counted(program) == flops.needed + masked


def test_bytes_of_known_models():
    gpt2, translator = ARCHITECTURES["gpt2"], ARCHITECTURES["vaswani-base"]
    assert weight_bytes(gpt2) == 4 * (124_439_808 - 1024 * 768)
    # 12 layers, keys and values of width 768, 128 + 64 tokens on average.
    assert cache_bytes(gpt2, 8, 128, 128, 1) == 4 * 8 * 12 * 2 * 768 * 192
    # Table, and in 6 layers: 4 + 2 attention matrices (keys and values of the source are kept), feed-forward, 3 norms.
    assert weight_bytes(translator) == 4 * (37000 * 512 + 6 * (6 * 512**2 + 2 * 512 * 2048 + 2048 + 512 + 3 * 2 * 512))
    assert cache_bytes(translator, 2, 64, 64, 4) == 4 * 6 * 2 * 512 * (2 * 4 * 33 + 2 * 64)


def test_batches_are_the_same_for_all_and_of_their_kind():
    text = draw_batch(small_gpt(), BatchShape(2, 300))
    np.testing.assert_array_equal(text["tokens"][:, 1:], text["labels"][:, :-1])
    np.testing.assert_array_equal(text["tokens"], draw_batch(small_gpt(), BatchShape(2, 300))["tokens"])
    masked = draw_batch(ARCHITECTURES["bert-base"], BatchShape(10, 500))
    assert 0.13 < (masked["labels"] != IGNORED).mean() < 0.17
    pairs = draw_batch(ARCHITECTURES["vaswani-base"], BatchShape(2, 5, 3))
    assert {name: ids.shape for name, ids in pairs.items()} == {"source": (2, 3), "target": (2, 5), "labels": (2, 5)}
    np.testing.assert_array_equal(pairs["target"][:, 1:], pairs["labels"][:, :-1])
