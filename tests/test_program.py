"""What a program says, and its exit status, where there is no memory, no device, or nobody who takes its output.

Control characters in the texts of others: shown on a terminal and in messages, untouched everywhere else.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys

import jax
import pytest

from jax_tformer import InputError, terminal
from jax_tformer.cli.answer import JsonOutput, TextOutput
from jax_tformer.config.errors import TrainingFailed
from jax_tformer.decoding.texts import Completion, Prompt
from jax_tformer.runs.metrics import ProgressLine
from jax_tformer.terminal import Interruption, one_line, run_program, say, visible
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


# Control characters in the texts of others.

TITLE = "\x1b]0;mine\x07"
SHOWN = r"\u001b]0;mine\u0007"
TEXT = Prompt(f"It {TITLE}", [0], 9, 1, "line 1")
ANSWER = Completion(f"was\u009b2J\n\ta{TITLE}", [1], False, None)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_is_shown():
    plain = "a\tb\n\N{LATIN SMALL LETTER E WITH ACUTE} \u4f60 \U0001f469\u200d\U0001f52c ~"
    assert visible(plain) == plain
    assert visible(f"{TITLE}\r\x00\x7f\x9b\u202e\u2066\udcff") == SHOWN + r"\u000d\u0000\u007f\u009b\u202e\u2066\udcff"
    assert one_line("a\nb\r\tc\x1b") == r"a\nb\r\tc\u001b"
    everything = "".join(map(chr, range(0x3000)))
    assert json.loads(visible(json.dumps(everything, ensure_ascii=False))) == everything


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_what_is_said_on_a_terminal_and_in_a_pipe(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    text = TextOutput("prompt", alone=False)
    text.answers(TEXT, [ANSWER])
    assert text.stream(TEXT, iter(["wa", "s\x1b"])) == ["wa", "s\x1b"]
    say(TITLE)
    ProgressLine(0, 1, unheard=pytest.fail).say("runs/\x1b[2Jname")
    answers = f"--- prompt 1 ---\nIt {TITLE}{ANSWER.text}\n\n--- prompt 1 ---\nIt {TITLE}was\x1b\n\n"
    raw = f"{answers}{TITLE}\nruns/\x1b[2Jname\n"
    assert stream.getvalue() == (visible(raw) if stream.isatty() else raw)
    before = len(stream.getvalue())
    JsonOutput("prompt").answers(TEXT, [ANSWER])
    told = stream.getvalue()[before:]
    assert json.loads(told)["completions"][0]["text"] == ANSWER.text
    assert ("\x9b" in told) != stream.isatty()


@pytest.mark.parametrize("error", [InputError, TrainingFailed, OSError])
def test_errors_are_one_visible_line(error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def program(_):
        raise error(f"runs/a\nb{TITLE} is a file")

    with pytest.raises(SystemExit):
        run_program(program, "train.py")
    assert capsys.readouterr().err.endswith(rf"runs/a\nb{SHOWN} is a file" + "\n")
