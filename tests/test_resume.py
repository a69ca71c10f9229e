"""A run that is stopped and started again ends as one that was not: the same losses, to the bit.

tests/test_soak.py kills runs.
"""

import signal

import pytest

from jax_tformer.cli import train
from jax_tformer.files import read_json
from parity_tests.depth import deep
from tests.damages import flip_bit
from tests.several_processes import ROOT, finish, start, wait_for_rows
from tests.small_runs import losses, succeed

STEPS = 40
FLAGS = (
    "--model.d-model 16 --model.encoder.num-layers 1 --model.encoder.feedforward-width 16 "
    "--model.decoder.num-layers 1 --model.decoder.feedforward-width 16 --model.dropout.residual 0.1 "
    f"--training.steps {STEPS} --training.batch-size 4 --training.log-every 1 --training.checkpoint-every 10 "
    "--training.evaluate-every 16 --training.evaluate-batches 2"
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of a run in one go."""
    run = tmp_path_factory.mktemp("whole") / "run"
    succeed(train, f"dates --run {run} {FLAGS}")
    rows = losses(run)
    assert len(rows) == STEPS + 3
    return rows


@pytest.mark.parametrize(
    "number, at",
    [
        deep(signal.SIGINT, 3, id="ctrl-c before a checkpoint"),
        pytest.param(signal.SIGTERM, 13, id="sigterm, and the newest checkpoint is damaged"),
    ],
)
def test_stopped_and_started_again(number, at, tmp_path, uninterrupted, capsys):
    run = tmp_path / "run"
    process = start([ROOT / "train.py", "dates", "--run", run, *FLAGS.split()], 1)
    wait_for_rows(run, at, [process])
    process.send_signal(number)
    [(ended, output, errors)] = finish([process])
    assert (ended, errors) == (128 + number, "")
    assert "the same command continues" in output
    assert not (run / "summary.json").exists()
    assert len(losses(run)) < len(uninterrupted), "the run was over before it could be stopped"
    if number == signal.SIGTERM:
        newest = max(int(path.name) for path in (run / "checkpoints").iterdir())
        flip_bit(f"checkpoints/{newest}")(run)

    succeed(train, f"dates --run {run} {FLAGS}")
    assert number != signal.SIGTERM or f"step {newest}: " in capsys.readouterr().out
    assert losses(run) == uninterrupted
    summary = read_json(run / "summary.json")
    assert (summary["steps"], summary["val_loss"]) == (STEPS, uninterrupted[-1]["val_loss"])
