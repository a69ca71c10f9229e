"""A run continues from its folder alone, and may change what its numbers so far do not depend on."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jax_tformer.runs.metrics import read_metrics

from jax_tformer.cli import generate, train
from jax_tformer.cli.train_options import train_options
from jax_tformer.config.errors import InputError
from jax_tformer.config.presets import EXPERIMENTS
from jax_tformer.runs.evaluation import Evaluator
from jax_tformer.runs.resume import permitted_changes

TINY = [
    *("--model.d-model", "16", "--model.decoder.num-layers", "1", "--model.decoder.num-heads", "2"),
    *("--model.decoder.feedforward-width", "16", "--model.dropout.residual", "0.1", "--data.context-length", "8"),
    *("--data.tokenizer.kind", "bytes", "--data.tokenizer.vocab-size", "None", "--batch-size", "2"),
    *("--optimizer.schedule", "constant", "--training.log-every", "1", "--training.evaluate-every", "2"),
    *("--training.evaluate-batches", "1", "--sample.max-new-tokens", "4", "--sample.count", "1"),
]


def losses(run):
    names = ("step", "loss", "gradient_norm", "learning_rate", "val_loss")
    return [{name: row[name] for name in names if name in row} for row in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 9)
    return path


@pytest.fixture(scope="module")
def ended(text):
    """A run of four steps."""
    run = text.parent / "ended"
    assert train.main(["text", "--data.path", str(text), "--run", str(run), *TINY, "--steps", "4"]) == 0
    return run


@pytest.fixture
def run(ended, tmp_path):
    """A copy of that run."""
    return Path(shutil.copytree(ended, tmp_path / "run"))


def test_more_steps_from_the_folder_alone(text, run, capsys):
    whole = run.with_name("whole")
    assert train.main(["text", "--data.path", str(text), "--run", str(whole), *TINY, "--steps", "6"]) == 0
    capsys.readouterr()
    arguments = ["--run", str(run), "--steps", "6", "--training.keep-checkpoints", "1"]
    assert train.main(arguments) == 0
    said = capsys.readouterr().out
    assert "steps 4 to 6" in said
    assert "changed training.steps: 4 -> 6: the learning rate follows the same schedule" in said
    assert "changed training.keep_checkpoints: 2 -> 1: the next save" in said
    assert losses(run) == losses(whole)
    assert json.loads((run / "summary.json").read_text())["steps"] == 6

    config = json.loads((run / "config.json").read_text())
    assert (config["training"]["steps"], config["training"]["keep_checkpoints"]) == (6, 1)
    first, second = map(json.loads, (run / "sessions.jsonl").read_text().splitlines())
    assert (first["experiment"], first["step"], first["changed"]) == ("text", 0, {})
    assert (second["experiment"], second["step"]) == (None, 4)
    assert second["changed"] == {"training.steps": [4, 6], "training.keep_checkpoints": [2, 1]}

    assert train.main(["--run", str(run)]) == 0
    assert "is complete; --steps N continues it" in capsys.readouterr().out
    # The end of the first session is not taken for that of the second.
    (run / "summary.json").write_text('{"steps": 4}')
    assert train.main(["--run", str(run)]) == 0
    assert "is complete" not in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["steps"] == 6


@pytest.mark.deep
def test_a_run_moves_to_other_devices(text, tmp_path):
    flags = ["text", "--data.path", str(text), *TINY, "--training.log-every", "1"]
    moving, whole = str(tmp_path / "moving"), str(tmp_path / "whole")
    sessions = [
        [*flags, "--run", moving, "--steps", "4", "--mesh.fsdp", "2", "--mesh.tensor", "2"],
        ["--run", moving, "--steps", "8", "--mesh.fsdp", "1"],
        ["--run", moving, "--steps", "12", "--mesh.tensor", "1", "--mesh.data", "1"],
        [*flags, "--run", whole, "--steps", "12", "--mesh.data", "1"],
    ]
    program = "import json, sys, train\nfor session in json.loads(sys.argv[1]): assert train.main(session) == 0"
    flag = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(sessions)],
        env=os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flag}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        cwd=Path(train.__file__).parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("changed mesh.")]
    assert [line.partition(":")[0] for line in said] == [
        "changed mesh.fsdp",
        "changed mesh.data",
        "changed mesh.tensor",
    ]
    told = map(json.loads, (tmp_path / "moving" / "sessions.jsonl").read_text().splitlines())
    assert [session["devices"] for session in told] == [f"{count} cpu device(s)" for count in (4, 4, 1)]
    for ours, theirs in zip(losses(Path(moving)), losses(Path(whole)), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_best_checkpoint_is_saved_when_it_appears(text, tmp_path, monkeypatch, capsys):
    judged = iter([3.0, 1.0, 2.0, 1.5, 1.6, 1.7])
    monkeypatch.setattr(Evaluator, "__call__", lambda self, params: {"val_loss": next(judged)})
    flags = ["--training.checkpoint-every", "5", "--training.keep-checkpoints", "1"]
    arguments = ["text", "--data.path", str(text), "--run", str(tmp_path / "run"), *TINY, *flags, "--steps", "7"]
    assert train.main(arguments) == 0
    assert "best: val_loss 1.0000 at step 4 (generate.py --checkpoint best)" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["val_loss"], summary["best_val_loss"], summary["best_step"]) == (1.5, 1.0, 4)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["4", "7"]  # 3.0 after step 2, 1.0 after 4, 2.0 after 6, 1.5 after 7
    # Another session knows it too: 1.6 after step 8 is not the best, and 7 is not deleted for it.
    assert train.main(["--run", str(tmp_path / "run"), "--steps", "9", "--training.keep-checkpoints", "2"]) == 0
    capsys.readouterr()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["4", "7", "9"]

    command = [str(tmp_path / "run"), "--prompt", "It", "--max-new-tokens", "3", "--checkpoint", "best"]
    assert generate.main(command) == 0
    assert capsys.readouterr().err.startswith("the checkpoint of step 4\n")
    (tmp_path / "run" / "checkpoints" / "4" / "extra.json").unlink()
    assert generate.main(command) == 0
    skipped, used, _ = capsys.readouterr().err.splitlines()
    assert "skipped a damaged checkpoint" in skipped
    assert "step 4: extra.json is missing" in skipped
    assert used == "the checkpoint of step 7"


def test_what_is_not_said_stays_as_it_is(ended):
    alone = train_options(["--run", str(ended)])
    assert alone.experiment == alone.before
    assert alone.experiment.training.steps == 4
    assert (alone.name, alone.notes) == (None, [])
    named = train_options(["text", "--run", str(ended), "--steps", "9", "--model.d_model=16"])
    assert dataclasses.replace(named.experiment.training, steps=4) == alone.experiment.training
    (note,) = named.notes
    assert note.startswith("the run keeps its own settings where text has others: model.decoder.num_layers 1, ")
    assert note.endswith(" more")
    afresh = train_options(["text", "--run", str(ended), "--resume", "no"])
    assert (afresh.before, afresh.experiment) == (None, EXPERIMENTS["text"].config)


def changed(**parts):
    dates = EXPERIMENTS["dates"].config
    return dataclasses.replace(
        dates, **{name: dataclasses.replace(getattr(dates, name), **fields) for name, fields in parts.items()}
    )


@pytest.mark.parametrize(
    ("parts", "meaning"),
    [
        ({"training": {"steps": 9999}}, "from here on the schedule is another one"),
        ({"training": {"log_every": 3}}, "existing rows of metrics.jsonl stay"),
        ({"training": {"evaluate_every": 3}}, "from here on, the held-out loss is measured at other steps"),
        ({"training": {"evaluate_batches": 3}}, "held-out losses are measured on other batches"),
        ({"training": {"checkpoint_every": 3}}, "checkpoints are saved at other steps"),
        ({"training": {"keep_checkpoints": 3}}, "the next save deletes"),
        ({"training": {"accumulation": 2}}, "by rounding, and by what dropout draws"),
        ({"sample": {"count": 9}}, "end of the run samples with it"),
        ({"mesh": {"fsdp": 2}}, "may differ from one long run by rounding"),
        ({"data": {"held_out": 0.2}}, None),
        ({"training": {"seed": 1}}, None),
        ({"training": {"batch_size": 8}}, None),
        ({"training": {"label_smoothing": 0.1}}, None),
        ({"optimizer": {"learning_rate": 1.0}}, None),
        ({"model": {"d_model": 64}}, None),
    ],
)
def test_what_may_change_and_what_it_means(parts, meaning):
    ((part, (field, *_)),) = parts.items()
    if meaning is None:
        with pytest.raises(InputError, match=rf"would be different with {part}\.{field}: .*; leave that out"):
            permitted_changes(changed(), changed(**parts))
        return
    changes, (note,) = permitted_changes(changed(), changed(**parts))
    assert list(changes) == [f"{part}.{field}"]
    assert meaning in note


def test_arithmetic_may_not_change_but_its_order():
    def computed(**compute):
        model = EXPERIMENTS["dates"].config.model
        return changed(model={"compute": dataclasses.replace(model.compute, **compute)})

    for order in ({"attention": "einsum"}, {"remat": "full"}, {"unroll": 3}):
        _, (note,) = permitted_changes(changed(), computed(**order))
        assert "by rounding" in note
    for type_ in ({"dtype": "bfloat16"}, {"parameter_dtype": "bfloat16"}):
        with pytest.raises(InputError, match="would be different"):
            permitted_changes(changed(), computed(**type_))


def test_a_report_of_a_run_that_was_stopped(text, run, capsys):
    for name in ("loss.png", "samples.txt", "summary.json"):
        (run / name).unlink()
    # Neither the data nor the training is needed.
    hidden = text.rename(text.with_suffix(".gone"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    try:
        assert train.main(["--run", str(run), "--report", "--sample.count", "2"]) == 0
    finally:
        hidden.rename(text)
    said = capsys.readouterr().out
    assert said.count("--- sample") == 2
    assert "step 4 of 4  loss " in said
    assert "val_loss" in said
    assert "sampled at step 4" in said
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert (run / "loss.png").stat().st_size > 1000
    assert (run / "samples.txt").read_text() in said
    assert set(after) - set(before) == {run / "loss.png", run / "samples.txt"}
    assert before.items() <= after.items()

    shutil.rmtree(run / "checkpoints")
    assert train.main(["--run", str(run), "--report"]) == 0
    assert "no samples: there is no checkpoint" in capsys.readouterr().out
