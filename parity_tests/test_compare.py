"""compare.py from end to end, on models of a few hundred numbers: what it finds, refuses, and leaves behind."""

import csv
import dataclasses
import json
import os
import re
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from jax_tformer.config import DropoutConfig
from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for
from jax_tformer.terminal import run_program
from parity import Difference
from tests.small_models import assert_same_bits
from twin import compare, side_by_side
from twin.jax_side import JaxSide
from twin.options import read_plan
from twin.progress import LiveView
from twin.report_page import FILES
from twin.side_by_side import SAME, Batches
from twin.sides import Setting
from twin.torch_side import TorchSide

pytestmark = pytest.mark.usefixtures("single_precision")
STACK = "--model.{0}.num-layers 1 --model.{0}.num-heads 2 --model.{0}.feedforward-width 8"
STACKS = " ".join(STACK.format(side) for side in ("encoder", "decoder"))
TINY = f"dates {STACKS} --model.d-model 8 --training.batch-size 4 --optimizer.warmup-steps 2"
QUICK = f"{TINY} --no-memory --out report --steps"


def plan_of(command):
    return read_plan(command.split())


@pytest.fixture(autouse=True, scope="module")
def exact_arithmetic():
    """In place of the fixture of this name for all gates: compare.py sets its arithmetic itself; undone afterwards."""
    names = ("jax_enable_x64", "jax_default_matmul_precision", "jax_compilation_cache_dir")
    before = {name: getattr(jax.config, name) for name in names}
    precision = torch.get_float32_matmul_precision()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def run(own_folder, monkeypatch, capsys):
    """Runs compare.py in an empty folder; checks its exit status and returns what it printed."""

    def run(command, status=0):
        monkeypatch.setattr(sys, "argv", ["compare.py", *command.split()])
        with pytest.raises(SystemExit) as stop:
            run_program(compare.main, "compare.py")
        printed = capsys.readouterr()
        assert stop.value.code == status, printed.err
        return printed

    return run


def report():
    return json.loads(Path("report/report.json").read_text())


def gates_of(found):
    return [verdict["gate"] for verdict in found["verdicts"]]


def curves():
    """The rows of the curves, a step each."""
    return list(csv.DictReader(Path("report/curves.csv").read_text().splitlines()))


@pytest.mark.deep
def test_float64_with_shared_dropout_parts_and_seeds(run):
    run(f"{QUICK} 4 --dtype float64 --dropout shared --training.accumulation 2 --seeds 2")
    found = report()
    assert gates_of(found) == ["5, loss", "5, parameters"]
    assert found["passed"] is True
    assert found["experiment"]["model"]["dropout"]["attention"] == 0.1
    rows = curves()
    assert [(row["seed"], row["step"]) for row in rows] == [(f"{s}", f"{n}") for s in (0, 1) for n in (1, 2, 3, 4)]
    for name in ("loss", "gradient_norm"):
        ours, theirs = (np.array([float(row[f"{name}_{side}"]) for row in rows]) for side in ("jax", "torch"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=0)
    assert len({row["loss_jax"] for row in rows}) == 8
    assert found["spread"]["jax"]["standard_deviation"] > 0
    page = Path("report/report.html").read_text()
    assert "The loss curves coincide" in page
    assert "mean &plusmn; deviation" in page
    assert not re.search(r"https?:|src=|<script|<link|@import|url\((?!#)", page)
    assert sorted(FILES) == sorted(path.name for path in Path("report").iterdir())


def test_float32_is_judged_against_the_truth(run):
    run(f"{QUICK} 3")
    found = report()
    assert gates_of(found) == ["6"]
    assert found["seeds"][0]["judged_steps"] == 3
    assert {error["torch"] is None for error in found["parameter_errors"].values()} == {False}
    # Once more into the same folder: the older report goes.
    printed = run(f"{QUICK} 2 --truth no")
    assert report()["verdicts"] == []
    assert "not known which side is nearer to the truth" in printed.out
    assert report()["passed"] is None


def test_bfloat16_has_no_gate_and_a_terminal_a_table(run, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    printed = run(f"{QUICK} 2 --dtype bfloat16")
    assert report()["verdicts"] == []
    assert "No gate judges trajectories" in printed.out
    for words in ("JAX - PyTorch", "from the float64 truth", "tokens/s", "peak memory, MB"):
        assert words in printed.out


def planted(monkeypatch, model, optimizer):
    """Makes PyTorch train another model, or by another optimizer, than JAX."""
    init = TorchSide.__init__

    def faulty(side, name, setting, *rest):
        changed = dataclasses.replace(setting.model, **model), dataclasses.replace(setting.optimizer, **optimizer)
        init(side, name, Setting(*changed, *setting[2:]), *rest)

    monkeypatch.setattr(TorchSide, "__init__", faulty)


@pytest.mark.parametrize("dtype, eps", [("float64", 1.0001e-8), ("float32", 1e-6)])
def test_a_planted_fault_turns_the_verdict_red(run, monkeypatch, dtype, eps):
    planted(monkeypatch, {}, {"eps": eps})
    if dtype == "float32":  # The search is the same for both, and takes its time.
        monkeypatch.setattr(side_by_side, "where_they_part", lambda *given: Difference("none"))
    printed = run(f"{QUICK} 4 --dtype {dtype}", status=1)
    assert report()["passed"] is False
    assert "Beyond the bar." in printed.out
    assert 'class="red"' in Path("report/report.html").read_text()
    # The model is the same: what differs is the step.
    assert SAME in " ".join(printed.out.split())
    assert report()["where"] == SAME
    assert "ulps" not in report()["verdicts"][0]


def test_a_fault_of_the_model_is_found_where_it_is(run, monkeypatch):
    decoder = plan_of(f"{QUICK} 2").experiment.model.decoder
    planted(monkeypatch, {"decoder": dataclasses.replace(decoder, norm_eps=1e-3)}, {})
    printed = run(f"{QUICK} 2 --dtype float64", status=1)
    found = report()["where"]
    assert found["stage"] == "forward"
    assert found["theirs"]["file"].endswith("torch_ref/layers.py")
    assert "0.001 in theirs" in found["kind"]
    assert "torch_ref/layers.py" in printed.out
    assert "Where they part" in Path("report/report.html").read_text()


def test_other_shapes_stop_at_once(run, monkeypatch):
    planted(monkeypatch, {"head_bias": True}, {})
    printed = run(f"{QUICK} 2", status=1)
    assert printed.err == "compare.py: gate 5: only ours has [], only theirs has ['head.bias']\n"
    assert not Path("report").exists()


def test_a_nan_on_one_side_stops_and_keeps_what_was_done(run, monkeypatch):
    step, losses = JaxSide.step, iter([{}, {"loss": float("nan")}])
    monkeypatch.setattr(JaxSide, "step", lambda *given: step(*given)._replace(**next(losses)))
    printed = run(f"{QUICK} 3", status=1)
    assert re.fullmatch(r"compare.py: the loss of step 2 is nan in JAX and [0-9.]+ in PyTorch\n", printed.err)
    assert report()["seeds"][0]["steps"] == 1
    assert report()["passed"] is None
    assert "Stopped: the loss of step 2 is nan in JAX" in Path("report/report.html").read_text()


def test_a_nan_on_both_sides_is_a_failed_training(run):
    hot = "--optimizer.learning-rate 1e30 --optimizer.clip-norm None"
    printed = run(f"{QUICK} 4 --truth no {hot}", status=1)
    assert "in JAX and nan in PyTorch; try a lower --optimizer.learning-rate" in printed.err
    assert printed.err.count("\n") == 1


def test_an_interrupted_run_leaves_its_report(run, monkeypatch):
    update = LiveView.update

    def interrupted(view, record):
        update(view, record)
        if record.steps == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(LiveView, "update", interrupted)
    run(f"{QUICK} 4 --seeds 3", status=130)
    assert report()["stopped"] == "interrupted after 2 of 12 steps"
    assert report()["parameter_errors"]
    assert len(Path("report/curves.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "command, message",
    {
        "nothing": "there is no experiment 'nothing'; expected one of python-docs, dates",
        "dates --model.depth 3": "--model.depth",
        "dates --steps 0": "steps is 0; expected a whole number of at least 1",
        "dates --steps 1501": "the training ends after 1500",
        "dates --seeds 0": "seeds is 0; expected a whole number of at least 1",
        f"dates --seeds 2 --training.seed {2**32 - 1}": "expected seeds up to 2^32 - 1",
        "dates --dtype float16": "float16",
        "dates --dtype float64 --truth yes": "float64 is the truth already",
        "dates --model.compute.dtype bfloat16": "give --dtype",
        "dates --model.dropout.residual 0.1": "give --dropout shared",
        "dates --dropout-rate 0.1": "give --dropout shared",
        "dates --dropout shared --dropout-rate 0": "expected a rate above 0",
        "dates --training.batch-size 3 --training.accumulation 2": "that accumulation divides",
        "dates --out file": "file is a file; expected a folder",
        "dates --out file/below": "file (Not a directory); choose another folder",
        "dates --out /proc/x": "cannot write to /proc (",
        "dates --out full": "full holds notes.txt, which is no part of a report",
        "text --data.path missing.txt": "missing.txt",
    }.items(),
)
def test_bad_input_is_one_line_and_nothing_is_written(run, command, message):
    Path("file").write_text("")
    Path("full").mkdir()
    Path("full/notes.txt").write_text("")
    before = sorted(Path().rglob("*"))
    printed = run(command, status=2)
    assert printed.err.startswith("compare.py: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before


def test_a_device_that_pytorch_has_not(run, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    printed = run(f"{QUICK} 1 --dtype float64", status=2)
    assert "JAX runs on tpu and this PyTorch" in printed.err
    assert "JAX_PLATFORMS=cpu" in printed.err


@pytest.mark.parametrize(
    "command, rates",
    [
        ("dates", (0.0, 0.0, 0.0, 0.0)),
        ("dates --dropout shared", (0.1, 0.1, 0.1, 0.1)),
        ("pairs --data.path x.tsv --dropout shared", (0.1, 0.0, 0.1, 0.0)),
        ("pairs --data.path x.tsv --dropout shared --dropout-rate 0.3", (0.3, 0.3, 0.3, 0.3)),
    ],
)
def test_dropout_rates(command, rates):
    assert plan_of(command).experiment.model.dropout == DropoutConfig(*rates)


@pytest.mark.parametrize(
    "options, parameters, needed",
    [
        ("", 10_000_000, True),
        ("", 10_000_001, False),
        ("--steps 1001", 1, False),
        ("--steps 1001 --truth yes", 10**9, True),
        ("--dtype float64", 1, False),
    ],
)
def test_truth_where_it_is_affordable(options, parameters, needed):
    assert plan_of(f"dates {options}").needs_truth(parameters) == needed


def test_batches_are_those_of_a_training():
    experiment = plan_of(TINY).experiment
    training = dataclasses.replace(experiment.training, seed=5)
    trained_on = build_pipeline(experiment.data, training, build_tokenizer_for(experiment.data)).train_iterator()
    for ours, theirs in zip(Batches(experiment, 3)(5), trained_on, strict=False):
        assert_same_bits(ours, theirs)


@pytest.mark.deep
def test_each_framework_alone(run):
    run(f"{TINY} --out report --steps 3")
    for needs in report()["alone"].values():
        assert 50e6 < needs["memory_before"] <= needs["peak_memory"] < 5e9
        assert needs["step_seconds"] > 0
        assert needs["product_rate"] > 1e9
        assert needs["device_memory"] is None
