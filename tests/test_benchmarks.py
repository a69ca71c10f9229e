"""The benchmarks as programs, on models of no size; the operations and bytes that they count; what a saved result says.

What they write is tested, not how fast anything is.
"""

import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from benchmarks import compiled, corpus, decoding, optimizers, processes, startup, train_step
from benchmarks.session import Report, name_device, run_benchmark, spread
from benchmarks.sides import OURS
from benchmarks.sides.reference import Reference
from benchmarks.training_cases import OPTIMIZER, BatchShape, draw_batch, without_dropout
from jax_tformer import ARCHITECTURES, transformer
from jax_tformer.files import read_json
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.prepare import training_flops
from jax_tformer.training.step import init_state
from jax_tformer.training.step import train_step as make_step
from tests.several_processes import run_alone
from tests.small_runs import succeed
from twin.cases import reduced
from twin.sides import Alone, SideFailed


def branches(tree):
    """A tree of JSON, and all that is in it."""
    yield tree
    for branch in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from branches(branch)


@pytest.mark.deep
@pytest.mark.parametrize(
    "program, shown",
    [
        (decoding, ("gpt2, batch 2, greedy", "beam search", "HF, static cache", "BART (HF)", "torch_ref", "GB/s")),
        (train_step, ("vaswani-base, 2 x 6 source and 8 tokens", "jax_tformer", "torch_ref", "HF", "GFLOP/s")),
        (startup, ("from the command to the first step",)),
        (processes, ("two / one",)),
        (optimizers, ("muon", "sgd", "by learning rate", "processor ms a step", "MiB")),
        (corpus, ("encode_batch / tokenize", "memory of train.py, MiB")),
    ],
)
def test_every_benchmark_measures_all_of_its_sides_which_agree(program, shown, tmp_path, capsys):
    out = tmp_path / "new" / "figures.json"
    succeed(program, f"--quick --out {out}")
    said, report = capsys.readouterr().out, read_json(out)
    assert all(text in said for text in shown)
    assert report["ours"]
    for branch in branches(report):
        if isinstance(branch, dict):
            assert not branch.get("absent"), "a side that failed"
            low, median, high = (branch.get(name, 1) for name in ("low", "median", "high"))
            assert 0 < low <= median <= high
        assert not isinstance(branch, float) or (math.isfinite(branch) and branch >= 0)


@pytest.mark.deep
def test_losses_that_disagree_are_a_failure(tmp_path, monkeypatch):
    start = Reference.start
    moved = lambda weights: {name: np.flip(array) for name, array in weights.items()}  # noqa: E731
    monkeypatch.setattr(Reference, "start", lambda side, seed, weights: start(side, seed, moved(weights)))
    out = tmp_path / "train_step.json"
    assert train_step.main(["--quick", "--model", "small gpt", "--out", str(out)]) == 1
    [case] = read_json(out)["cases"].values()
    assert not case["agreed"]
    assert case["disagreement"]["HF"] < case["tolerance"] < case["disagreement"]["torch_ref"]


def test_what_cannot_be_started_says_why(tmp_path):
    side = Alone(f"{OURS}:Nobody", environment={})
    with pytest.raises(SideFailed, match="Nobody"):
        side.call("decode")
    side.close()
    missing = ["--data.path", str(tmp_path / "missing.txt")]
    with pytest.raises(SideFailed, match=r"train\.py text: .*missing\.txt"):
        startup.Starts(tmp_path, "cpu", ["text", *missing]).take("cold")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("h200 dates", "the first word must be a chip: h100, v5e"),
        ("h100 dates", "expected --model.vocab-size"),
        ("h100 dates --model.vocab-size 50", "this JAX compiles for no such chip"),
    ],
)
def test_a_step_for_other_chips_says_what_it_needs(arguments, message, capsys):
    if message.endswith("no such chip") and find_spec("jax_plugins"):
        pytest.skip("this JAX may compile for it")
    assert compiled.main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_figures_name_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (name_device("cpu"), name_device("gpu")) == ("cpu", "gpu")
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA A100\n")
    driver.chmod(0o755)
    assert (name_device("cpu"), name_device("gpu")) == ("cpu", "gpu: NVIDIA H200")
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert name_device("gpu") == "gpu"


def test_torch_alone_loads_no_other_framework():
    code = "import sys, compare, benchmarks.sides.reference; print({'jax', 'flax', 'transformers'} & set(sys.modules))"
    assert run_alone(["-c", code])[0] == "set()\n", "its memory would be counted as PyTorch's"


@pytest.fixture
def take(tmp_path, capsys):
    """Runs a benchmark in which ours takes `seconds` in each case; returns its status and what it says last."""

    def run(seconds, *arguments):
        ours = {name: spread([0.9 * median, median, 3 * median]) for name, median in seconds.items()}
        capsys.readouterr()
        status = run_benchmark("train_step", None, arguments, lambda session: Report({}, ours, [], []))
        told = capsys.readouterr()
        return status, (told.err or told.out).splitlines()

    saved = tmp_path / "saved.json"
    assert run({"step": 1.0, "other": 0.01}, "--out", str(saved))[0] == 0
    return run, saved, str(tmp_path / "now.json")


@pytest.mark.parametrize(
    "now, status, said",
    [
        ({"step": 1.2, "other": 0.01}, 1, ["step: SLOWER, 1200.0 ms now and 1000.0 ms saved, 1.20", "other: as fast"]),
        ({"step": 1.09, "other": 0.008}, 0, ["step: as fast", "other: faster"]),
        # What is new is named, and a floor that holds nothing is no floor.
        ({"step": 1.0, "new": 9.0}, 0, ["step: as fast", "new: nothing is saved"]),
        ({"new": 9.0}, 1, ["new: nothing is saved"]),
    ],
)
def test_a_saved_result_is_a_floor_under_speed(now, status, said, take):
    run, saved, out = take
    found, shown = run(now, "--out", out, "--against", str(saved))
    assert found == status
    assert all(line.startswith(start) for line, start in zip(shown[-len(said) :], said, strict=True)), shown
    # The new result may not take the place of the saved one.
    assert run(now, "--out", str(saved), "--against", str(saved))[0] == 2


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('"cores": ', '"cores": 1', "was measured with cores 1"),
        ('"processor": "', '"processor": "another ', "was measured with processor 'another "),
        ('"train_step"', '"decoding"', "cannot be read as a result of this benchmark"),
        ('"median": 1.0', '"median": 0.0', "cannot be read as a result of this benchmark"),
        ("{", "", "cannot be read as a result of this benchmark"),
    ],
)
def test_a_saved_result_of_something_else_is_refused_before_anything_is_measured(old, new, said, take):
    run, saved, out = take
    saved.write_text(saved.read_text().replace(old, new, 1))
    status, [error] = run({"step": 1.0}, "--out", out, "--against", str(saved))
    assert status == 2
    assert said in error
    assert not Path(out).exists()


def count_products(jaxpr):
    """Operations of all matrix products in a jaxpr: the bodies of loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * equation.outvars[0].aval.size
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += repeats * sum(map(count_products, jaxprs_in_params(equation.params)))
    return total


GPT2 = reduced(ARCHITECTURES["gpt2"])
MODERN = replace(GPT2.decoder, key_value_heads=1, gated=True, positions="rotary", max_positions=None)


@pytest.mark.parametrize(
    "config, shape",
    [
        (GPT2, BatchShape(3, 10)),
        # What GPT-2 is not: heads that share keys, gates, rotation, a head of its own.
        (replace(GPT2, decoder=MODERN, tied_head=False), BatchShape(3, 10)),
        (reduced(ARCHITECTURES["bert-base"]), BatchShape(2, 9)),
        (reduced(ARCHITECTURES["vaswani-base"]), BatchShape(2, 8, 5)),
    ],
    ids=["gpt2", "modern", "bert", "vaswani"],
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
    # "einsum" also computes the half of causal attention that is masked.
    stack, length = config.decoder, shape.length
    masked = 6 * stack.num_layers * stack.num_heads * config.head_width(stack) * shape.rows * length**2 if stack else 0
    assert count_products(program) == flops.needed + masked
