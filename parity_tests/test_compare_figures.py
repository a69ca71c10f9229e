"""What a comparison finds in its figures: gate 6, errors of parameters, sentences, and what is no comparison."""

import io
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from rich.console import Console

from jax_tformer.terminal import Interruption
from parity_tests.errors import parity_error
from twin import side_by_side
from twin.machine import Machine
from twin.options import read_plan
from twin.progress import describe, make_table
from twin.record import ParameterError, Record, SeedRecord, gate6, parameter_errors
from twin.report import Findings
from twin.report_plots import parameter_table
from twin.sides import Setting, StepFigures, require_same_step, step_figures


def figures(loss, tokens=7, norm=1.0):
    return StepFigures(loss, norm, tokens, 0.1)


def seed_of(*losses):
    """A seed in which JAX, PyTorch and the truth have these losses."""
    sides = zip(("jax", "torch", "truth"), losses, strict=True)
    return SeedRecord(0, {side: [figures(float(loss)) for loss in curve] for side, curve in sides})


def test_steps_that_cannot_be_compared():
    require_same_step(1, figures(1.0), figures(2.0))
    with parity_error("step 3: JAX read 7 tokens, PyTorch 8"):
        require_same_step(3, figures(1.0), figures(1.0, tokens=8))
    with parity_error(r"gradient norm of step 1 is 1\.0 in JAX and inf in PyTorch"):
        require_same_step(1, figures(1.0), figures(1.0, norm=float("inf")))
    with parity_error("JAX gives the loss in float32; expected float64"):
        step_figures("JAX", SimpleNamespace(loss=np.float32(1)), "float64", 0.1)


def test_parameters_that_cannot_be_compared():
    config = read_plan(["dates"]).experiment.model
    ones = {"a": np.ones(3)}
    assert parameter_errors(config, ones, {"a": np.full(3, 2.0)}, None)["a"].difference == 0.5
    with parity_error("NaN at 1 places in ours and 0 in theirs"):
        parameter_errors(config, {"a": np.array([1.0, np.nan, 1.0])}, ones, None)


def test_gate_6_stops_where_trainings_part():
    truth = [4.0, 3.0, 2.0, 1.0]
    together = seed_of([4.0, 3.00002, 2.5, 1.5], [4.0, 3.00001, 2.01, 1.2], truth)
    assert together.judged() == 2
    assert gate6(together).passed
    assert gate6(together).name == "seed 0, step 2"
    apart = seed_of([4.0, 3.0004, 2.5, 1.5], [4.0, 3.0001, 2.01, 1.2], truth)
    assert not gate6(apart).passed


def test_gate_6_does_not_allow_at_the_first_step_what_the_last_one_needs():
    truth = np.linspace(4, 1, 90)
    grown = 1e-7 * 1.12 ** np.arange(90)
    seed = seed_of(truth + 1e-4, truth + grown, truth)
    assert seed.judged() > 70
    assert 3 * grown[seed.judged() - 1] > 1e-4, "the largest distance of all would allow it"
    assert not gate6(seed).passed


def test_the_first_sentence_says_the_largest_distance_beside_the_tightest():
    """The tightest alone reads as if it were that of the run."""
    steps = np.arange(60)
    theirs = np.where(steps < 40, 1e-6, 5e-4)
    ours = np.where(steps < 37, 0.0, np.where(steps < 40, 3.9e-6, 1.2e-4))
    said = findings(Record("float32", [seed_of(1 + ours, 1 + theirs, np.ones(60))])).statements()[0].text
    assert "by at most 1.2e-04 nats (seed 0, step 41), PyTorch's by 5.0e-04 nats (seed 0, step 41)" in said
    assert "nearest to its bar at seed 0, step 38, 3.9e-06 nats by then, where 4.0e-06 is allowed" in said


def findings(record):
    plan = read_plan(["dates"])
    machine = Machine("cpu", "Some Processor", "SomeVendor", 2, "", {})
    return Findings(plan, record, 1, machine, 2, {}, None)


def timed(other_work):
    def steps(seconds):
        return [StepFigures(1.0, 1.0, 100, seconds) for _ in range(5)]

    return SeedRecord(0, {"jax": steps(0.01), "torch": steps(0.04), "truth": steps(0.1)}, other_work=other_work)


@pytest.mark.parametrize("other_work", [0.05, 0.5, None])
def test_no_ratio_while_other_work_runs(other_work, monkeypatch):
    """Neither while it goes nor in the report; and none where nobody knows what else runs."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    # In place of a side, of which the live view asks this alone.
    side = SimpleNamespace(device_memory=lambda: None)
    console = Console(width=120, file=io.StringIO())
    console.print(make_table(timed(other_work), "", (side, side)))
    live = console.file.getvalue()
    said = findings(Record("float32", [timed(other_work)])).statements()[-1].text
    assert "10.0 ms in JAX and 40.0 ms in PyTorch" in said
    assert said.endswith("Measured on 2 cores of Some Processor (SomeVendor).")
    quiet = other_work == 0.05
    assert ("JAX needs 0.25 times PyTorch's time" in said) == quiet
    assert ("-75%" in live, "+300%" in live) == (quiet, quiet)
    assert (other_work == 0.5) == ("other work 50%" in live) == ("other work took 50%" in said)
    assert (other_work is None) == ("not known how much other work ran" in said)
    assert ("(other work 50%)" in describe(timed(other_work))) == (other_work == 0.5)


def test_parameters_by_layer():
    bias = "feedforward.up.bias"
    names = ["source_embedding.tokens.weight", f"encoder.blocks.0.{bias}", f"decoder.blocks.1.{bias}"]
    errors = {name: ParameterError(float(number), None, None) for number, name in enumerate(names)}
    layers, kinds, table = parameter_table(errors)
    assert layers == ["no layer", "encoder\n0", "decoder\n1"]
    assert kinds == ["source_embedding.tokens.weight", bias]
    assert table == [[0.0, None, None], [None, 1.0, 2.0]]


def test_a_signal_ends_the_measurement_of_each_alone(monkeypatch):
    alone = MagicMock()
    monkeypatch.setattr(side_by_side, "Alone", alone)
    stop = Interruption()
    stop.signal = 2
    experiment = read_plan(["dates"]).experiment
    setting = Setting(experiment.model, experiment.optimizer, experiment.training, "cpu")
    found = side_by_side.measure_alone(setting, {}, [{}], False, stop)
    assert found == {"jax": {"error": "interrupted"}, "torch": {"error": "interrupted"}}
    assert {call.args[0] for call in alone.return_value.call.mock_calls} <= {"start"}
    assert alone.return_value.close.call_count == 2
