"""What a run says: metrics.jsonl and TensorBoard's files, damaged or on disks without room, and the progress line."""

import io
import itertools
import json
import math
import os
import re
import resource
import signal
import time
from contextlib import contextmanager
from struct import pack

import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from jax_tformer import EXPERIMENTS
from jax_tformer.files import write_text
from jax_tformer.runs.evaluation import draw_losses
from jax_tformer.runs.folder import RunFolder
from jax_tformer.runs.metrics import MetricsLog, ProgressLine, Spikes, read_metrics
from tests.refusals import refused

GOOD = [{"step": step, "loss": 1.5 - step} for step in range(1, 8)]
LINES = [json.dumps(row).encode() for row in GOOD]


def write(path, lines, end=b"\n"):
    path.write_bytes(b"\n".join(lines) + end)
    return path


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00 no text",
        b'{"step": 3, "loss": ' + b"[" * 100_000,
        b"",
        b"3",
        b'{"loss": 1.0}',
        b'{"step": true}',
        b'{"step": -1}',
        b'{"step": 3, "loss": "low"}',
        b'{"step": 3, "loss": null}',
        b'{"step": 3, "loss": 1e999}',
        LINES[2][:-1],
        LINES[2] + LINES[2],
    ],
    ids=lambda line: str(line[:24]),
)
def test_a_damaged_line_in_the_middle_costs_that_line_only(line, tmp_path):
    path = write(tmp_path / "metrics.jsonl", [*LINES[:2], line, *LINES[3:]])
    notes = []
    assert read_metrics(path, notes) == [*GOOD[:2], *GOOD[3:]]
    assert notes == ["metrics.jsonl is damaged in line 3: the other 6 are used"]


def test_what_a_kill_left_unfinished_is_no_damage_and_many_damaged_lines_are_one_note(tmp_path):
    notes = []
    assert read_metrics(tmp_path / "absent", notes) == []
    for end in (b'\n{"step": 8, "lo', b"\n\xff", b"\n", b""):
        assert read_metrics(write(tmp_path / "metrics.jsonl", LINES, end), notes) == GOOD
    assert notes == []
    read_metrics(write(tmp_path / "metrics.jsonl", [b"{", *LINES, *[b"{"] * 9]), notes)
    assert notes == ["metrics.jsonl is damaged in lines 1, 9, 10, 7 more: the other 7 are used"]


def test_a_log_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with refused("expected the log of a run"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_run_that_continues_keeps_the_good_lines_and_the_damaged_file(tmp_path, synced):
    path = write(tmp_path / "metrics.jsonl", [*LINES[:2], b"{", *LINES[3:]])
    before, log = path.read_bytes(), MetricsLog(RunFolder(tmp_path), 5)
    row = {"step": 6, "loss": 9.0, "no_bleu": "too short"}
    log.write(row | {"update_norm/head": math.inf, "gradient_norm": math.nan})
    synced.clear()
    log.sync()
    log.close()
    assert synced == [str(path)], "rows are on the disk when a checkpoint follows"
    # Figures that are not finite are left out.
    assert read_metrics(path) == [*GOOD[:2], *GOOD[3:5], row]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == before
    assert re.search(r"line 3\b.*; the original file is metrics.jsonl.damaged$", log.notes[0])
    again = MetricsLog(RunFolder(tmp_path), 6)
    again.close()
    assert again.notes == []


def events_in(folder):
    """The events of all files, in the order in which TensorBoard reads them: by name."""
    content = b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
    # A record: its length (8 bytes), a checksum (4), the event, a checksum (4).
    while content:
        end = 12 + int.from_bytes(content[:8], "little")
        event, checksums = content[12:end], content[8:12] + content[end : end + 4]
        assert checksums == pack("<II", masked_crc32c(content[:8]), masked_crc32c(event))
        yield Event.FromString(event)
        content = content[end + 4 :]


def test_tensorboard_reads_what_was_written_even_if_the_clock_goes_back(tmp_path, monkeypatch):
    for start, now in enumerate((2_000_000_000, 1_900_000_000, 1_800_000_000)):
        clock = itertools.count(now, -1)
        monkeypatch.setattr(time, "time", lambda clock=clock: float(next(clock)))
        monkeypatch.setattr(time, "time_ns", lambda clock=clock: next(clock) * 10**9)
        log = MetricsLog(RunFolder(tmp_path), start * 100)
        log.write({"step": start * 100 + 1, "loss": start + 0.5, "huge": -1e60, "no_bleu": "too short"})
        # Read before the log is closed.
        events = [*events_in(tmp_path / "tensorboard")]
        log.close()
    times = [event.wall_time for event in events]
    assert times == sorted(times)
    # Each file says its version, the first step of its session, and figures.
    told = [(event.step, event.file_version, event.session_log.status) for event in events]
    expected = [[(0, "brain.Event:2", 0), (step, "", 1), (step, "", 0)] for step in (1, 101, 201)]
    assert told == [*itertools.chain(*expected)]
    figures = [{value.tag: value.simple_value for value in event.summary.value} for event in events[2::3]]
    assert figures == [{"loss": loss, "huge": -math.inf} for loss in (0.5, 1.5, 2.5)]


@contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_an_error_and_no_end_of_waiting(tmp_path):
    with files_of_at_most(500):
        log = MetricsLog(RunFolder(tmp_path), 0)
        with refused(r"cannot write to .*metrics.jsonl: .*; make room, and the same command"):
            all(log.write({"step": step, "loss": 1.0}) is None for step in range(100))


def test_a_file_that_a_full_disk_stops_is_named(tmp_path):
    run = RunFolder(tmp_path)
    writes = {
        run.samples: lambda: write_text(run.samples, "a" * 501),
        run.sessions: lambda: run.record_session(EXPERIMENTS["dates"].config, name="a" * 501),
        run.picture: lambda: draw_losses(GOOD, run),
    }
    for path, write_it in writes.items():
        with files_of_at_most(500), pytest.raises(OSError, match="File too large") as caught:
            write_it()
        assert caught.value.filename == str(path)


def test_a_loss_far_above_those_before_is_a_spike_and_those_at_the_start_are_none():
    spikes, rng = Spikes(), np.random.default_rng(0)
    losses = 6 * np.exp(-np.arange(400) / 30) + 2 + 0.05 * rng.standard_normal(400)
    losses[[20, 300]] += 1.0
    found = {step: deviations for step, loss in enumerate(losses) if (deviations := spikes.deviations(loss))}
    assert found.keys() == {300}
    assert 10 < found[300] < 30


# The line that a run shows on a terminal, at several widths.


@pytest.fixture
def clock(monkeypatch):
    """What time.perf_counter says, to be set."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def shown(line, width):
    """The one line that there is."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(line)
    (text,) = capture.get().splitlines()
    assert len(text) <= width
    return text.rstrip()


def terminal():
    return Console(file=io.StringIO(), width=80, force_terminal=True)


def test_what_there_is_room_for(clock):
    line = ProgressLine(0, 150_000, pytest.fail, terminal())
    assert (shown(line, 16), shown(line, 10)) == ("step 0/150000", "step 0/15…")
    line.update(100_000, 3.14159, None)
    clock[0] += 10
    line.update(100_100, 3.14159, 12_345.6)
    whole = ["step 100100/150000", "loss 3.1416", "83:10 left", "12,346 tokens/s"]
    assert shown(line, 40) == "  ".join(whole[:2])
    assert shown(line, 44) == "  ".join(whole[:3])
    assert shown(line, 60) == "  ".join(whole)
    assert re.fullmatch(rf"{whole[0]}  ━+ +{'  '.join(whole[1:])}", shown(line, 80))


def test_plain_lines_now_and_then_without_a_terminal(clock):
    output = io.StringIO()
    with ProgressLine(0, 40, pytest.fail, Console(file=output, width=80)) as line, line.during("compiling"):
        for step in range(1, 13):
            line.update(step, 1.5, 100.0 if step > 1 else None)
            clock[0] += 1
    assert output.getvalue() == "step 1/40  loss 1.5000\nstep 11/40  loss 1.5000  100 tokens/s  29 s left\n"
