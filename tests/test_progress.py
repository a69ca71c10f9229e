"""The line that a run shows on a terminal, at several widths."""

import io
import re

import pytest
from rich.console import Console

from jax_tformer.runs import metrics
from jax_tformer.runs.metrics import ProgressLine


@pytest.fixture
def clock(monkeypatch):
    """What time.perf_counter says, to be set."""
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
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
    assert shown(line, 16) == "step 0/150000"
    assert shown(line, 10) == "step 0/15…"
    line.update(100_000, 3.14159, None)
    clock[0] += 10
    line.update(100_100, 3.14159, 12_345.6)
    assert shown(line, 40) == "step 100100/150000  loss 3.1416"
    assert shown(line, 44) == "step 100100/150000  loss 3.1416  83:10 left"
    assert shown(line, 60) == "step 100100/150000  loss 3.1416  12,346 tokens/s  83:10 left"
    assert re.fullmatch(r"step 100100/150000  ━+ +loss 3.1416  12,346 tokens/s  83:10 left", shown(line, 80))
    short = ProgressLine(0, 1500, pytest.fail, terminal())
    short.update(10, 3.14159, None)
    clock[0] += 1
    short.update(20, 3.14159, 12_345.6)
    assert shown(short, 40) == "step 20/1500  loss 3.1416  2:28 left"


def test_labels_while_compiling_and_evaluating(clock):
    line = ProgressLine(0, 1500, pytest.fail, terminal())
    with line.during("compiling"):
        clock[0] += 12
        assert shown(line, 40) == f"step 0/1500{'':13}  compiling 12 s"  # the bar is still empty
    assert "compiling" not in shown(line, 80)
    line.update(100, 3.14159, None)
    clock[0] += 1
    line.update(101, 3.14159, 1000)
    with line.during("evaluating"):
        clock[0] += 2
        assert shown(line, 40) == "step 101/1500  evaluating 2 s"
        assert "evaluating 2 s  loss 3.1416  1,000 tokens/s" in shown(line, 80)
    assert "evaluating" not in shown(line, 80)


def test_plain_lines_now_and_then_without_a_terminal(clock):
    output = io.StringIO()
    with ProgressLine(0, 40, pytest.fail, Console(file=output, width=80)) as line, line.during("compiling"):
        for step in range(1, 13):
            line.update(step, 1.5, 100.0 if step > 1 else None)
            clock[0] += 1
    assert output.getvalue() == "step 1/40  loss 1.5000\nstep 11/40  loss 1.5000  100 tokens/s  29 s left\n"
