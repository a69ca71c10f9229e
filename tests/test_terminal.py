"""Control characters in the texts of others: shown on a terminal and in messages, untouched everywhere else."""

import io
import json
import sys

import pytest

from jax_tformer import InputError
from jax_tformer.cli.answer import JsonOutput, TextOutput
from jax_tformer.config.errors import TrainingFailed
from jax_tformer.decoding.texts import Completion, Prompt
from jax_tformer.runs.metrics import ProgressLine
from jax_tformer.terminal import one_line, run_program, say, visible

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
