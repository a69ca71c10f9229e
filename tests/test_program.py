"""What a program says, and its exit status, where there is no memory, no device, or nobody who takes its output."""

import contextlib
import io
import os
import signal
import subprocess
import sys

import jax
import pytest

from jax_tformer import terminal
from jax_tformer.runs.metrics import ProgressLine
from jax_tformer.terminal import Interruption, run_program
from tests.several_processes import ROOT


def outcome(program, capsys):
    """The exit status, and what stands on standard error."""
    with pytest.raises(SystemExit) as stop:
        run_program(program, "program.py", smaller="make it smaller")
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "error, said",
    [
        (MemoryError("Unable to allocate 29.1 TiB for an array with shape (4, 1)"), "memory: 29.1 TiB more"),
        (MemoryError(), "there is not enough memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Failed to allocate request for 1.50GiB (1610612736B)"), "memory: 1.50 GiB"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes."),
            "4.0 GiB",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."), "20.00 GiB more could not be allocated"),
        (OverflowError("int too large to convert"), "a size is larger than any computer has room for"),
    ],
    ids=["numpy", "python", "XLA on a GPU", "torch", "torch on a GPU", "overflow"],
)
def test_memory_that_cannot_be_had(error, said, capsys):
    def program(arguments):
        raise error

    status, line = outcome(program, capsys)
    assert status == 2
    assert line.startswith("program.py: error: ")
    assert said in line
    assert line.endswith("; make it smaller\n")
    assert line.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("a fault"), ValueError("a fault")])
def test_a_fault_of_the_program_keeps_its_traceback(error):
    def program(arguments):
        raise error

    with pytest.raises(type(error), match="a fault"):
        run_program(program, "program.py")


def test_real_memory_that_cannot_be_had(capsys):
    def program(arguments):
        return int(jax.numpy.zeros((2**20, 2**26))[0, 0])

    status, line = outcome(program, capsys)
    assert (status, line.count("\n")) == (2, 1)
    assert "262,144.0 GiB more could not be allocated" in line


PROGRAM = """
import sys
import warnings
from jax_tformer.terminal import run_program
def program(arguments):
    print("an answer", flush=arguments == ["at once"])
    return 0
run_program(program, "program.py")
"""


@pytest.mark.parametrize("when", ["at once", "at the end"])
@pytest.mark.parametrize(
    "output, status, said",
    [
        ("> /dev/full", 2, "program.py: error: standard output: No space left on device\n"),
        (">&-", 2, "program.py: error: standard output is closed; redirect it to a file, or to /dev/null\n"),
        ("2>&- >&-", 2, ""),
        ("> /dev/full 2> /dev/full", 2, ""),
        ("2>&- | sleep 0", 141, ""),
        ("| true", 141, ""),
        ("> /dev/null", 0, ""),
    ],
    ids=["full", "closed", "both closed", "both full", "no errors", "gone", "well"],
)
def test_output_that_nobody_takes(output, status, said, when, tmp_path):
    program = tmp_path / "program.py"
    # A reader that has gone before anything is written.
    program.write_text(PROGRAM.replace("import sys", "import sys, time; time.sleep(0.2)") if "|" in output else PROGRAM)
    command, _, reader = output.partition("|")
    line = (
        f'"{sys.executable}" program.py "{when}" {command} {f"| {reader}" if reader else ""}; exit ${{PIPESTATUS[0]}}'
    )
    where = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, **where)
    assert (done.returncode, done.stderr, done.stdout) == (status, said, "")


def test_every_character_can_be_printed(monkeypatch, capsys):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))

    def program(arguments):
        print("\N{BOX DRAWINGS HEAVY HORIZONTAL} \udc80")
        return 0

    status, _ = outcome(program, capsys)
    assert (status, printed.getvalue().decode()) == (0, "\N{BOX DRAWINGS HEAVY HORIZONTAL} \\udc80\n")


def test_a_run_whose_lines_reach_nobody_is_asked_to_save_and_end(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    for place in ("/dev/full", write):
        monkeypatch.setattr(sys, "stdout", open(place, "w"))  # noqa: SIM115
        with Interruption() as stop, ProgressLine(0, 2, stop.unheard) as line:
            line.say("hello")
            assert stop.status == 141
            line.update(1, 2.0, None)
            line.say("hello again")
        monkeypatch.undo()


# Signals that end a run after its step.


@pytest.fixture
def send():
    """Sends a signal to this process, whose handlers come back afterwards."""
    # Under nohup the tests begin with one of them ignored.
    before = {kind: signal.signal(kind, signal.SIG_DFL) for kind in (signal.SIGHUP, signal.SIGTERM)}
    yield lambda kind: os.kill(os.getpid(), kind)
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.mark.parametrize("kind", [signal.SIGHUP, signal.SIGTERM])
def test_the_first_signal_is_kept_and_the_handlers_come_back(kind, send):
    before = signal.getsignal(kind)
    with Interruption() as stop:
        assert stop.signal is None
        send(kind)
        # A second one at once is the same.
        send(kind)
        assert (stop.signal, stop.status) == (kind, 128 + kind)
    assert signal.getsignal(kind) is before


def test_one_that_was_swallowed_before_the_training_is_heard(send, capsys):
    """As Ctrl-C is while the garbage collector calls JAX."""

    def train(arguments):
        with contextlib.suppress(KeyboardInterrupt):
            send(signal.SIGINT)
        with Interruption() as stop:
            return stop.status

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status, _ = outcome(train, capsys)
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 128 + signal.SIGINT


def test_a_second_one_breaks_off_but_a_terminal_that_closes_may_say_so_twice(send, monkeypatch):
    monkeypatch.setattr(terminal, "_AT_ONCE", 0.0)
    with Interruption() as stop:
        send(signal.SIGHUP)
        send(signal.SIGHUP)
        assert stop.signal == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


def test_under_nohup_a_closing_terminal_stays_ignored(send):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as stop:
        send(signal.SIGHUP)
        assert stop.signal is None
