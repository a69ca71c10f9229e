"""A run that is stopped and started again ends as one that was not: the same losses, to the bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jax_tformer.cli import train
from jax_tformer.runs.metrics import read_metrics
from tests.small_runs import losses

ROOT = Path(__file__).parents[1]
STEPS = 40
FLAGS = [
    *("--model.d-model", "16", "--model.encoder.num-layers", "1", "--model.decoder.num-layers", "1"),
    *("--model.encoder.feedforward-width", "16", "--model.decoder.feedforward-width", "16"),
    *("--model.dropout.residual", "0.1", "--training.steps", str(STEPS), "--training.batch-size", "4"),
    *("--training.log-every", "1", "--training.evaluate-every", "16", "--training.evaluate-batches", "2"),
    *("--training.checkpoint-every", "10"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of a run in one go."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train.main(["dates", "--run", str(run), *FLAGS]) == 0
    rows = losses(run)
    assert len(rows) == STEPS + 3
    return rows


def stop(run, number, at):
    """Sends the signal `number` to a training when it has done step `at`; returns the process and what it said."""
    process = subprocess.Popen(
        [sys.executable, "train.py", "dates", "--run", str(run), *FLAGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    while not any(row["step"] >= at for row in read_metrics(run / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    return process, *process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("number", "at", "status"),
    [
        pytest.param(signal.SIGINT, 3, 130, id="ctrl-c before a checkpoint", marks=pytest.mark.deep),
        pytest.param(signal.SIGTERM, 13, 143, id="sigterm"),
        pytest.param(signal.SIGKILL, 13, -9, id="kill -9", marks=pytest.mark.deep),
    ],
)
def test_stopped_and_started_again(number, at, status, tmp_path, uninterrupted):
    run = tmp_path / "run"
    process, output, errors = stop(run, number, at)
    assert process.returncode == status, errors
    if number != signal.SIGKILL:
        assert "the same command continues" in output
        assert not errors
    assert not (run / "summary.json").exists()
    stopped = losses(run)
    assert len(stopped) < len(uninterrupted), "the run was over before it could be stopped"

    assert train.main(["dates", "--run", str(run), *FLAGS]) == 0
    assert losses(run) == uninterrupted
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["val_loss"] == uninterrupted[-1]["val_loss"]
    assert all((run / name).stat().st_size for name in ("loss.png", "samples.txt", "config.json", "tokenizer.json"))


@pytest.mark.deep
def test_a_damaged_checkpoint_is_passed_over(tmp_path, uninterrupted, capsys):
    run = tmp_path / "run"
    stop(run, signal.SIGTERM, 23)
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert train.main(["dates", "--run", str(run), *FLAGS]) == 0
    assert newest.name in capsys.readouterr().out
    assert losses(run) == uninterrupted
