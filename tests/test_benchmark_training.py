"""The benchmarks of training as programs, on models of no size, and the operations that they count."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_jaxpr

from benchmarks import train_step
from benchmarks.bounds import Products, of_type, training_flops
from benchmarks.sides import OURS, REFERENCE
from benchmarks.sides.reference import Reference
from benchmarks.training_cases import OPTIMIZER, BatchShape, draw_batch, small_gpt, tiny, without_dropout
from jax_tformer.config import IGNORED, TransformerConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import init_state
from jax_tformer.training.step import train_step as make_step
from twin.sides import Here

EXACT: dict[str, Any] = {"attention": "einsum", "remat": "none"}
"""Every product in the open, and none computed twice."""
ROOT = Path(__file__).parents[1]


def figures(main: Any, out: Path) -> dict[str, Any]:
    """What a benchmark writes; all of its numbers are finite, and its spreads in order."""
    assert main(["--quick", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["machine"]["cores"] >= 1
    assert report["seconds"] > 0
    assert any("jax_tformer.runs.startup" in note for note in report["notes"])
    for branch in branches(report):
        if isinstance(branch, dict) and branch.keys() == {"median", "low", "high"}:
            assert 0 < branch["low"] <= branch["median"] <= branch["high"]
        assert not isinstance(branch, float) or (math.isfinite(branch) and branch >= 0)
    return report


def branches(tree: Any) -> Iterator[Any]:
    """A tree of JSON, and all that is in it."""
    yield tree
    for branch in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from branches(branch)


@pytest.mark.deep
def test_train_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = figures(train_step.main, tmp_path / "new" / "train_step.json")
    cases = {case["model"]: case for case in report["cases"]}
    assert set(cases) == {"small gpt", "gpt2", "vaswani-base", "bert-base"}
    for model, case in cases.items():
        sides = case["sides"]
        assert set(sides) == {"ours", "reference", "hugging face"}
        assert not case["absent"]
        assert case["agreed"]
        # The BART has weights of its own.
        compared = {"reference"} if model == "vaswani-base" else {"reference", "hugging face"}
        assert case["disagreement"].keys() == compared
        assert max(case["disagreement"].values()) < 1e-5
        assert case["products"]["operations_per_second"] > 0
        assert case["floor_seconds"] == case["flops"]["needed"] / case["products"]["operations_per_second"]
        assert case["faster_reference"] == "reference"
        assert sides["reference"]["times_reference"] == 1
        # The common floor is that of the faster library.
        own = {name: found["operations_per_second"] for name, found in case["own_products"].items()}
        assert max(own.values()) == case["products"]["operations_per_second"]
        for name, side in sides.items():
            rate = own["jax" if name == "ours" else "torch"]
            assert side["times_own_floor"] == pytest.approx(side["times_floor"] * rate / max(own.values()))
        for side in sides.values():
            first, second = side["losses"]
            # Of 50 ids none is known yet, and an update helps.
            assert abs(first - math.log(50)) < 0.1
            assert second < first
            assert side["of_rate"] * side["times_floor"] == pytest.approx(1)
            assert side["tokens_per_second"] == case["tokens"] / side["step_seconds"]["median"]
            assert min(side["peak_memory"], side["first_step_seconds"]) > 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("vaswani-base, 2 x 6 source and 8 tokens", "jax_tformer", "GFLOP/s"))


def test_train_step_of_one_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_step.main(["--quick", "--model", "gpt", "--out", str(tmp_path / "none.json")]) == 2
    assert "expected one of 'small gpt', 'gpt2', 'vaswani-base', 'bert-base'" in capsys.readouterr().err


@pytest.mark.deep
def test_losses_that_disagree_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Reference.start
    moved = lambda weights: {name: np.flip(array) for name, array in weights.items()}  # noqa: E731
    monkeypatch.setattr(Reference, "start", lambda side, seed, weights: start(side, seed, moved(weights)))
    out = tmp_path / "train_step.json"
    assert train_step.main(["--quick", "--model", "small gpt", "--out", str(out)]) == 1
    (case,) = json.loads(out.read_text())["cases"]
    assert not case["agreed"]
    assert case["disagreement"]["hugging face"] < case["tolerance"] < case["disagreement"]["reference"]


def test_torch_alone_loads_no_other_framework() -> None:
    code = "import sys, benchmarks.sides.reference; print({'jax', 'flax', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n", "its memory would be counted as PyTorch's"


def counted(jaxpr: Any) -> int:
    """Operations of all matrix products in a jaxpr: the bodies of loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * equation.outvars[0].aval.size
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                total += repeats * counted(inner) if hasattr(inner, "eqns") else 0
    return total


def modern(config: TransformerConfig) -> TransformerConfig:
    """What GPT-2 is not: heads that share keys, gates, rotation, a head of its own."""
    stack = replace(config.output_stack, key_value_heads=1, gated=True, positions="rotary", max_positions=None)
    return replace(config, decoder=stack, tied_head=False)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (tiny(ARCHITECTURES["gpt2"]), BatchShape(3, 10)),
        (modern(tiny(ARCHITECTURES["gpt2"])), BatchShape(3, 10)),
        (tiny(ARCHITECTURES["bert-base"]), BatchShape(2, 9)),
        (tiny(ARCHITECTURES["vaswani-base"]), BatchShape(2, 8, 5)),
        (tiny(ARCHITECTURES["article-encoder-decoder"]), BatchShape(3, 4, 7)),
    ],
    ids=["gpt2", "modern", "bert", "vaswani", "article"],
)
def test_operations_are_those_of_the_program(config: TransformerConfig, shape: BatchShape) -> None:
    config = replace(without_dropout(config), compute=replace(config.compute, **EXACT))
    net, tx = transformer(config), optimizer(OPTIMIZER, 10)
    state = jax.eval_shape(lambda: init_state(net, tx, jax.random.key(0)))
    program = jax.make_jaxpr(make_step(net, tx))(state, draw_batch(config, shape)).jaxpr
    # Without the logits, which nothing reads where the loss is computed from the hidden states.
    program, _ = dce_jaxpr(program, [True] * len(program.outvars))
    flops = training_flops(config, *shape)
    # "einsum" computes all of causal attention.
    assert counted(program) == flops.needed + flops.hidden
    assert (flops.hidden > 0) == (config.decoder is not None)


def test_operations_of_known_models() -> None:
    gpt2 = training_flops(ARCHITECTURES["gpt2"], 2, 256)
    # All parameters but biases, norms and positions; 12 layers of 12 heads of 64, half of 256 x 256 each.
    assert gpt2.projections == 6 * 512 * (12 * 12 * 768**2 + 50257 * 768)
    assert gpt2.attention == gpt2.hidden == 2 * 12 * 12 * 768 * 256 * 256 // 2
    translator = training_flops(ARCHITECTURES["vaswani-base"], 1, 64, 32)
    square, inner = 512**2, 2 * 512 * 2048
    # The decoder's cross-attention makes keys and values of the source.
    of_source, of_target = 6 * (4 * square + inner) + 6 * 2 * square, 6 * (6 * square + inner) + 37000 * 512
    assert translator.projections == 6 * (32 * of_source + 64 * of_target)
    assert translator.attention == 12 * 6 * 512 * (32 * 32 + 64 * 64 // 2 + 64 * 32)


def test_batches_are_the_same_for_all_and_of_their_kind() -> None:
    text = draw_batch(small_gpt(), BatchShape(2, 300))
    np.testing.assert_array_equal(text["tokens"][:, 1:], text["labels"][:, :-1])
    np.testing.assert_array_equal(text["tokens"], draw_batch(small_gpt(), BatchShape(2, 300))["tokens"])
    masked = draw_batch(ARCHITECTURES["bert-base"], BatchShape(10, 500))
    assert 0.13 < (masked["labels"] != IGNORED).mean() < 0.17
    pairs = draw_batch(ARCHITECTURES["vaswani-base"], BatchShape(2, 5, 3))
    assert {name: ids.shape for name, ids in pairs.items()} == {"source": (2, 3), "target": (2, 5), "labels": (2, 5)}
    np.testing.assert_array_equal(pairs["target"][:, 1:], pairs["labels"][:, :-1])


def test_products() -> None:
    found = Products("cpu", ((8, 4, 2), (3, 3, 3)), ("float32",)).measure()
    assert set(found) == {f"{by} float32 {shape}" for by in ("jax", "torch") for shape in ("8 x 4 x 2", "3 x 3 x 3")}
    assert all(len(rates) == 1 and min(rates) > 0 for rates in found.values())
    assert of_type(found, "float32") == found
    assert not of_type(found, "bfloat16")


@pytest.mark.deep
def test_three_steps_of_both_are_the_same() -> None:
    given = (tiny(small_gpt()), BatchShape(2, 8), "cpu")
    losses = []
    for kind in (OURS, REFERENCE):
        side = Here(f"{kind}:training", *given)
        assert min(side.call("steps", 3)) > 0
        losses.append(side.call("loss"))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
