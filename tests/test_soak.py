"""A run that is killed again and again, at any moment, ends as one that was left alone: not one bit is lost."""

import random
import re
import shutil
import signal
import time
from collections import Counter

import jax
import numpy as np
import pytest

from jax_tformer.files import read_json
from jax_tformer.runs.checkpoints import find_damage, list_steps, orbax, restore
from tests.several_processes import finish, train, wait_for_rows
from tests.small_runs import losses

MANY = (
    "--steps 100 --training.evaluate-every 25 --training.evaluate-batches 1 --training.checkpoint-every 4 "
    "--model.d-model 16 --model.decoder.num-layers 1 --model.decoder.num-heads 2 --model.decoder.feedforward-width 16 "
    "--model.dropout.residual 0.1 --data.context-length 8 --sample.max-new-tokens 4 --sample.count 1 --mesh.fsdp 2 "
    "--distributed.timeout 20"
)
VICTIMS = {1: [(0,)], 2: [(0, 1), (0, 1), (0, 1), (0,), (1,)]}
"""Who is killed: both processes in three of five rounds, as where a machine goes down; the other must end by itself."""
ENDED = r"error: (the first process has ended|process 1 has died or hangs|the other processes did not come)"


def result_of(run):
    """All that a finished run leaves which does not depend on the clock, to the bit."""
    checkpoints = run / "checkpoints"
    newest = checkpoints / str(list_steps(checkpoints)[-1])
    with jax.enable_x64(True):
        saved = {name: orbax().metadata(newest, name).metadata for name in ("params", "opt_state", "step", "key")}
        arrays = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)
        found = restore(checkpoints, arrays)
        leaves = jax.tree_util.tree_leaves_with_path(found.state)
        bits = [(jax.tree_util.keystr(path), str(leaf.dtype), np.asarray(leaf).tobytes()) for path, leaf in leaves]
    held_out, samples = read_json(run / "summary.json")["val_loss"], (run / "samples.txt").read_text()
    return losses(run), bits, found.extra | {"seconds": None}, held_out, samples


def rows_in(run):
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def saves_in(run):
    """The unfinished saves and deletions."""
    return {(path.name, path.stat().st_ino) for path in (run / "checkpoints").glob("*.*")}


def wait_for_a_moment(run, children, draw, rows, start):
    """Waits until some moment of the start, of the steps and their saves, or after the last of `rows`; says which."""
    over = rows_in(run) == rows
    if draw.random() < 0.25 or over:
        time.sleep(draw.uniform(0, 3 * start if over else start))
        return "at the end" if over else "at the start"
    goal = min(rows_in(run) + draw.randint(1, 24), rows)
    while rows_in(run) < goal and all(child.poll() is None for child in children):
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 2 if goal == rows else 0.2))
    return "at the end" if goal == rows else "at a step"


def assert_documented(statuses, ends):
    """Each process was killed, or has finished, or says that another one has gone."""
    for status, (_, _, errors) in zip(statuses, ends, strict=True):
        alone = status in (-signal.SIGABRT, 2) and re.match(ENDED, errors.splitlines()[-1])
        assert status in (0, -signal.SIGKILL) or (-signal.SIGKILL in statuses and alone), errors


@pytest.mark.deep
@pytest.mark.parametrize("count, kills, soak", [(1, 4, 200), (2, 10, 50)])
def test_kills_at_random_moments_lose_nothing(count, kills, soak, tmp_path, request):
    seed = request.config.getoption("--soak")
    # Of the moments that are always the same, one leaves the first process waiting for a heartbeat.
    wanted, draw = (kills, random.Random(215)) if seed is None else (soak, random.Random(seed))
    began, devices = time.monotonic(), 2 // count
    children = train(tmp_path / "alone", count, devices, MANY)
    wait_for_rows(tmp_path / "alone", 1, children)
    start = time.monotonic() - began
    assert [status for status, *_ in finish(children)] == [0] * count
    expected = result_of(tmp_path / "alone")
    rows, run, found = len(expected[0]), tmp_path / "killed", Counter()
    while found["kills"] < wanted or run.exists():
        before, victims = saves_in(run), ()
        children = train(run, count, devices, MANY)
        if found["kills"] < wanted:
            moment = wait_for_a_moment(run, children, draw, rows, start)
            victims = draw.choice(VICTIMS[count])
        for victim in victims:
            children[victim].kill()
        ends = finish(children)
        statuses = [status for status, *_ in ends]
        assert_documented(statuses, ends)
        checkpoints = run / "checkpoints"
        assert all(find_damage(checkpoints / str(step)) is None for step in list_steps(checkpoints))
        found["in a save"] += bool(saves_in(run) - before)
        if statuses == [0] * count:
            assert result_of(run) == expected
            shutil.rmtree(run)
            print(f"\nseed {seed}, {count} processes, {time.monotonic() - began:.0f} s: {dict(found)}", flush=True)
        else:
            assert -signal.SIGKILL in statuses, ends
            found.update({"kills": 1, moment: 1})
    assert found["in a save"]
