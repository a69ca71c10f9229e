"""A run continues from its folder alone, and may change what its numbers so far do not depend on."""

import dataclasses
import importlib
import json
import re
import shutil
import sys
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from jax_tformer import EXPERIMENTS
from jax_tformer.cli import generate, train
from jax_tformer.cli.train import train_options
from jax_tformer.config.errors import TrainingFailed
from jax_tformer.files import read_json
from jax_tformer.runs.evaluation import Evaluator
from jax_tformer.runs.folder import RunFolder, load_trained, parse_checkpoint
from jax_tformer.runs.metrics import read_metrics
from jax_tformer.runs.session import permitted_changes
from tests.refusals import refused
from tests.small_models import assert_same_bits
from tests.small_runs import TEXT, TINY, contents, lose, losses, names, succeed

FLAGS = (
    f"{TINY} --data.tokenizer.kind bytes --model.dropout.residual 0.1 --optimizer.schedule constant "
    "--training.log-every 1 --training.evaluate-every 2"
)


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    """Trains on a text in a folder, as flags say."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT)
    return lambda run, flags: succeed(train, f"text --data.path {text} --run {run} {FLAGS} {flags}")


@pytest.fixture(scope="module")
def ended(begin, tmp_path_factory):
    """A run of four steps."""
    run = tmp_path_factory.mktemp("ended") / "run"
    begin(run, "--steps 4")
    return run


@pytest.fixture
def run(ended, tmp_path):
    """A copy of that run."""
    return shutil.copytree(ended, tmp_path / "run")


def params_of(run, step):
    return load_trained(RunFolder(run), step).params


@pytest.mark.parametrize(
    "flags",
    [
        *(f"--optimizer.name {name}" for name in ("lion", "adafactor", "muon", "sgd")),
        "--lora.rank 2 --lora.targets value,down --lora.dropout 0.1",
    ],
)
def test_every_optimizer_and_adapters_go_on_where_they_were(begin, tmp_path, flags):
    run, flags = tmp_path / "run", f"{flags} --steps 4 --training.checkpoint-every 2"
    begin(run, flags)
    whole, params = losses(run), params_of(run, 4)
    lose(run, 4)
    begin(run, flags)
    assert losses(run) == whole
    assert_same_bits(params_of(run, 4), params)


@pytest.fixture(autouse=True)
def float64_ends_with_the_test():
    """A program that computes in float64 says so to all of JAX."""
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def averaged(begin, tmp_path_factory):
    """A run in float64 with an average and three checkpoints, and a copy that was killed after the first."""
    whole = tmp_path_factory.mktemp("averaged") / "whole"
    flags = "--training.average 0.9 --training.checkpoint-every 2 --training.keep-checkpoints 3 --steps 6 "
    flags += "--model.compute.dtype float64 --model.compute.parameter-dtype float64"
    begin(whole, flags)
    run = shutil.copytree(whole, whole.with_name("run"))
    lose(run, 4, 6)
    begin(run, flags)
    return run, whole


def test_an_average_goes_on_where_it_was(averaged):
    run, whole = averaged
    assert losses(run) == losses(whole)
    assert_same_bits(*(params_of(path, "average") for path in averaged))
    last = [row for row in read_metrics(run / "metrics.jsonl") if "val_loss" in row][-1]
    assert last["average_val_loss"] != last["val_loss"]
    assert read_json(run / "summary.json")["average_val_loss"] == last["average_val_loss"]


def test_the_mean_of_the_last_checkpoints_is_numpys(averaged, capsys):
    run, _ = averaged
    each = [params_of(run, step) for step in (2, 4, 6)]
    mean = params_of(run, parse_checkpoint("last-3"))
    expected = jax.tree.map(lambda *x: np.mean(x, axis=0), *each)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), mean, expected)
    command = f"{run} --prompt It --max-new-tokens 3 --checkpoint"
    succeed(generate, command, "last-3")
    assert "the mean of the checkpoints of steps 2, 4, 6\n3 new tokens" in capsys.readouterr().err
    with refused(r"last-9 is the mean of 9 checkpoints, and .* has 3; expected as many: "):
        succeed(generate, command, "last-9")


def test_means_and_spikes_go_on_where_they_were(begin, tmp_path):
    """Those of what was not logged yet, too, when the run was stopped."""
    flags = "--training.accumulation 2 --training.log-noise-scale --training.log-every 3 --training.evaluate-every 99"
    flags += " --training.checkpoint-every 1 --training.keep-checkpoints 9 --steps 6"
    run = tmp_path / "run"
    begin(run, flags)

    def told():
        rows = read_metrics(run / "metrics.jsonl")
        figures = [{name: x for name, x in row.items() if "per_second" not in name} for row in rows]
        return figures, read_json(run / "checkpoints/6/extra.json")["remembered"]

    whole = told()
    lose(run, 5, 6)
    begin(run, flags)
    assert told() == whole
    assert whole[1][0] == 6


def test_what_is_logged_if_asked_changes_no_loss(begin, tmp_path):
    runs, rows = (tmp_path / "plain", tmp_path / "asked"), []
    for run, asked in zip(runs, ("", "--training.log-norms --training.log-noise-scale"), strict=True):
        begin(run, f"--training.accumulation 2 --training.log-every 2 --steps 4 {asked}")
        rows.append(read_metrics(run / "metrics.jsonl"))
    for ours, theirs in zip(*map(losses, runs), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    norms = {f"{kind}_norm/{of}" for kind in ("gradient", "update") for of in ("embedding.tokens", "decoder.blocks.0")}
    for plain, asked in zip(*(each[::2] for each in rows), strict=True):
        assert norms | {"squared_gradient", "gradient_variance"} <= asked.keys() - plain.keys()


def test_trackio_gets_the_rows_of_the_log(begin, tmp_path, monkeypatch):
    """A stand-in has what is used of a package that the tests do not install."""
    monkeypatch.setitem(sys.modules, "trackio", None)
    with refused("--track needs trackio; pip install"):
        begin(run := tmp_path / "run", "--steps 2 --track ours")
    assert not run.exists()
    trackio = Mock(__spec__=importlib.machinery.ModuleSpec("trackio", None))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    begin(run, "--steps 2 --track ours")
    _, told = trackio.init.call_args
    assert told.pop("config")["training"]["steps"] == 2
    assert told == {"project": "ours", "name": "run", "resume": "allow"}
    tracked = trackio.init.return_value
    assert [{**call.kwargs, **call.args[0]} for call in tracked.log.mock_calls] == read_metrics(run / "metrics.jsonl")
    tracked.finish.assert_called_once_with()
    # It concerns no result, so that the run goes on without it.
    begin(run, "--steps 3")
    tracked.finish.assert_called_once_with()


def test_a_run_without_an_average_says_so(run):
    with refused(r"has no average of weights: it was trained without --training\.average"):
        params_of(run, "average")


def test_more_steps_from_the_folder_alone(begin, run, capsys):
    whole = run.with_name("whole")
    begin(whole, "--steps 6")
    capsys.readouterr()
    succeed(train, f"--run {run} --steps 6 --training.keep-checkpoints 1")
    said = capsys.readouterr().out
    assert "steps 4 to 6" in said
    assert "changed training.steps: 4 -> 6: the learning rate follows the same schedule" in said
    assert "changed training.keep_checkpoints: 2 -> 1: the next save" in said
    assert losses(run) == losses(whole)
    configured, summary = (read_json(run / name) for name in ("config.json", "summary.json"))
    assert configured["training"]["steps"] == summary["steps"] == 6
    told = map(json.loads, (run / "sessions.jsonl").read_text().splitlines())
    changed = {"training.steps": [4, 6], "training.keep_checkpoints": [2, 1]}
    sessions = [(session["experiment"], session["step"], session["changed"]) for session in told]
    assert sessions == [("text", 0, {}), (None, 4, changed)]

    # The end of the first session is not taken for that of the second.
    (run / "summary.json").write_text('{"steps": 4}')
    succeed(train, f"--run {run}")
    assert "is complete" not in capsys.readouterr().out
    assert read_json(run / "summary.json")["steps"] == 6


def test_the_best_checkpoint_is_saved_when_it_appears(begin, tmp_path, monkeypatch, capsys):
    run, held_out = tmp_path / "run", iter([3.0, 1.0, 2.0, 1.5, 1.6, 1.7])
    monkeypatch.setattr(Evaluator, "__call__", lambda self, params: {"val_loss": next(held_out)})
    begin(run, "--steps 7 --training.checkpoint-every 5 --training.keep-checkpoints 1")
    assert "best: val_loss 1.0000 at step 4 (generate.py --checkpoint best)" in capsys.readouterr().out
    summary = read_json(run / "summary.json")
    assert (summary["val_loss"], summary["best_val_loss"], summary["best_step"]) == (1.5, 1.0, 4)
    # 3.0 after step 2, 1.0 after 4, 2.0 after 6, 1.5 after 7.
    assert names(run / "checkpoints") == ["4", "7"]
    # Another session knows it too: 1.6 after step 8 is not the best, and 7 is not deleted for it.
    succeed(train, f"--run {run} --steps 9 --training.keep-checkpoints 2")
    assert names(run / "checkpoints") == ["4", "7", "9"]

    command = f"{run} --prompt It --max-new-tokens 3 --checkpoint best"
    capsys.readouterr()
    succeed(generate, command)
    assert capsys.readouterr().err.startswith("the checkpoint of step 4\n")
    (run / "checkpoints" / "4" / "extra.json").unlink()
    succeed(generate, command)
    skipped, used, _ = capsys.readouterr().err.splitlines()
    assert skipped.startswith("skipped a damaged checkpoint")
    assert (skipped.split(": ", 1)[1], used) == ("step 4: extra.json is missing", "the checkpoint of step 7")


def test_where_an_evaluation_fails_the_checkpoint_before_its_step_counts(begin, tmp_path, monkeypatch):
    run, held_out = tmp_path / "run", iter([3.0, float("nan")])
    monkeypatch.setattr(Evaluator, "__call__", lambda self, params: {"val_loss": next(held_out)})
    with pytest.raises(TrainingFailed, match=r"^the held-out loss after step 4 is nan; .*saved checkpoints"):
        begin(run, "--steps 6 --training.checkpoint-every 1 --training.keep-checkpoints 6")
    # Step 4 was finite, so that 3 counts; 4 was not saved yet.
    assert names(run / "checkpoints") == ["1", "2", "3"]


def test_what_is_not_said_stays_as_it_is(ended):
    alone = train_options(["--run", str(ended)])
    assert alone.experiment == alone.before
    assert (alone.experiment.training.steps, alone.name, alone.notes) == (4, None, [])
    named = train_options(["text", "--run", str(ended), "--steps", "9", "--model.d_model=16"])
    assert dataclasses.replace(named.experiment.training, steps=4) == alone.experiment.training
    told = "the run keeps its own settings where text has others: model.decoder.num_layers 1, .* more"
    assert re.fullmatch(told, *named.notes)
    afresh = train_options(["text", "--run", str(ended), "--resume", "no"])
    assert (afresh.before, afresh.experiment) == (None, EXPERIMENTS["text"].config)


MAY_CHANGE = {
    "training.steps 9999": "from here on the schedule is another one",
    "training.log-every 3": "existing rows of metrics.jsonl stay",
    "training.evaluate-every 3": "from here on, the held-out loss is measured at other steps",
    "training.evaluate-batches 3": "held-out losses are measured on other batches",
    "training.checkpoint-every 3": "checkpoints are saved at other steps",
    "training.keep-checkpoints 3": "the next save deletes",
    "training.accumulation 2": "by rounding, and by what dropout draws",
    "sample.count 9": "end of the run samples with it",
    "mesh.fsdp 2": "may differ from one long run by rounding",
    "model.compute.attention einsum": "by rounding",
    "model.compute.remat full": "by rounding",
    "model.compute.unroll 3": "by rounding",
}
MAY_NOT_CHANGE = [
    "model.compute.dtype bfloat16",
    "model.compute.parameter-dtype bfloat16",
    "model.d-model 64",
    "data.held-out 0.2",
    "training.seed 1",
    "training.batch-size 8",
    "training.loss.label-smoothing 0.2",
    "training.average 0.9",
    "training.loss.z-loss 1e-4",
    "optimizer.learning-rate 1.0",
]


@pytest.mark.parametrize("flag", [*MAY_CHANGE, *MAY_NOT_CHANGE])
def test_what_may_change_and_what_it_means(flag, folder):
    run, name = EXPERIMENTS["dates"].config, flag.split()[0].replace("-", "_")
    wanted = train_options(["dates", *f"--{flag}".split()]).experiment
    if flag in MAY_CHANGE:
        changes, (note,) = permitted_changes(run, wanted)
        assert (list(changes), MAY_CHANGE[flag] in note) == ([name], True)
    else:
        with refused(rf"would be different with {name}: .*; leave that out"):
            permitted_changes(run, wanted)


def test_a_report_of_a_run_that_was_stopped(run, capsys):
    drawn = [run / "loss.png", run / "samples.txt"]
    for path in (*drawn, run / "summary.json"):
        path.unlink()
    before = contents(run)
    # Neither the data nor the training is needed.
    command = f"--run {run} --report --sample.count 2 --data.path gone.txt"
    succeed(train, command)
    said = capsys.readouterr().out
    assert said.count("--- sample") == 2
    assert all(part in said for part in ("step 4 of 4  loss ", "val_loss", "sampled at step 4", drawn[1].read_text()))
    assert drawn[0].stat().st_size > 1000
    assert contents(run) == before | {str(path): path.read_bytes() for path in drawn}

    shutil.rmtree(run / "checkpoints")
    succeed(train, command)
    assert "no samples: there is no checkpoint" in capsys.readouterr().out
