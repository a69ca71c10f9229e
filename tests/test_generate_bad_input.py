"""generate.py: what cannot be is refused with one line and status 2, and nothing is written."""

import subprocess
from pathlib import Path

import pytest

from tests.speaking import CONTEXT, Program, write_runs

LONG = "x" * CONTEXT


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder


@pytest.fixture
def program(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    monkeypatch.chdir(tmp_path)
    return Program(runs, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", LONG], "the prompt has 33 tokens with the start token; expected at most 31"),
        (["--prompt", LONG, "--slide"], "expected at most 32, the model's context; shorten it"),
        (["--prompt", "It", "--max-new-tokens", "30"], "--max-new-tokens is 30; expected at most 32 together"),
        (["--prompt", "It", "--max-new-tokens", "30"], "--slide"),
        (
            ["--prompt", "It", "--beam", "300", "--n-best", "300", "--max-new-tokens", "1"],
            "--n-best is 300, and the beam search has found",
        ),
        (["--prompt", "It", "--max-new-tokens", "0"], "--max-new-tokens is 0; expected a whole number"),
        (
            ["--prompt", "It", "--slide", "--max-new-tokens", "1e12"],
            "--max-new-tokens is 1000000000000; expected fewer",
        ),
        (
            ["--prompt", "It", "--min-new-tokens", "4", "--max-new-tokens", "3"],
            "--min-new-tokens is 4; expected at most 3",
        ),
        (["--prompt", "It", "--beam", "1e9"], "1,000,000,000 answers at once take "),
        (["--prompt", "It", "--num-samples", "1e9"], "ask for fewer at once (--batch-size, --beam,"),
        (["--prompt", "It", "--temperature", "-1"], "--temperature is -1"),
        (["--prompt", "It", "--top-p", "0"], "--top-p is 0.0; expected"),
        (["--prompt", "It", "--min-p", "2"], "--min-p is 2.0; expected"),
        (["--prompt", "It", "--top-k", "0"], "--top-k is 0"),
        (["--prompt", "It", "--top-k", "3", "--temperature", "0"], "--top-k is 3; expected None at temperature 0"),
        (["--prompt", "It", "--repetition-penalty", "0"], "--repetition-penalty is 0"),
        (["--prompt", "It", "--num-samples", "0"], "--num-samples is 0"),
        (
            ["--prompt", "It", "--num-samples", "2", "--temperature", "0"],
            "--num-samples is 2; expected 1 at temperature 0",
        ),
        (["--prompt", "It", "--num-samples", "2", "--beam", "2"], "--num-samples is 2 and --beam is 2"),
        (["--prompt", "It", "--beam", "0"], "--beam is 0"),
        (["--prompt", "It", "--n-best", "2"], "--n-best is 2; expected a beam search"),
        (["--prompt", "It", "--n-best", "3", "--beam", "2"], "--n-best is 3; expected at most 2, the number of beams"),
        (["--prompt", "It", "--beam", "2", "--temperature", "1"], "--temperature is 1; expected 0 with a beam search"),
        (["--prompt", "It", "--beam", "2", "--slide"], "--slide is given and --beam is 2"),
        (["--prompt", "It", "--early-stopping"], "--early-stopping is for a beam search; give --beam"),
        (["--prompt", "It", "--length-penalty-form", "power"], "--length-penalty-form is for a beam search"),
        (["--prompt", "It", "--stream", "--json", "--beam", "2"], "--stream and --beam and --json"),
        (["--prompt", "It", "--seed", "-1"], "--seed is -1"),
        (["--prompt", "It", "--batch-size", "0"], "--batch-size is 0"),
        (["--prompt", "It", "--source", "It"], "--prompt and --source are both given"),
        (["--prompt", "It\udcff"], "lone surrogate"),
        (["--source", "It"], "give --prompt, not --source"),
        (["--prompt", "It", "--reference", "file"], "--reference is for translations"),
        (["--file", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--file", "."], "cannot be read"),
        ([], "standard input is empty"),
        (["--prompt", "It", "--checkpoint", "newst"], "--checkpoint is 'newst'; expected newest, best, or the number"),
        (["--prompt", "It", "--checkpoint", "-1"], "--checkpoint"),
        (["--prompt", "It", "--checkpoint", "7"], "there is no checkpoint of step 7 in"),
        (["--prompt", "It", "--checkpoint", "7"], "the steps there are 0"),
        (["--prompt", "It", "--checkpoint", "best"], "has a held-out loss to be the best by; the steps there are 0"),
    ],
)
def test_prompts_that_cannot_be(program: Program, arguments: list[str], message: str) -> None:
    assert message in program.refuse("text", *arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; expected a text on each line"),
        (b"\n  \n", "is empty; expected a text on each line"),
        (b"one\ncaf\xe9 au lait\n", "line 2 of {} is not UTF-8: byte 0xe9 at byte 4 of the line"),
        (b"one\n" + LONG.encode(), "line 2 of {}: the prompt has 33 tokens"),
    ],
)
def test_lines_that_cannot_be(program: Program, tmp_path: Path, content: bytes, message: str) -> None:
    assert message.format("standard input") in program.refuse("text", typed=content)
    (tmp_path / "lines.txt").write_bytes(content)
    # A file is known before anything is said.
    assert message.format("lines.txt") in program.refuse("text", "--file", "lines.txt", "--batch-size", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", " "], "the source is empty"),
        (["--source", "source 12345678901"], "has 18 tokens; expected at most 15"),
        (["--source", "§"], "'§'"),
        (["--source", "source 1", "--max-new-tokens", "13"], "expected at most 12, the run's data.target_length"),
        (["--source", "source 1", "--slide"], "--slide is for continuing texts"),
        (["--source", "source 1", "--top-k", "3"], "--top-k is 3; expected None at temperature 0"),
        (["--prompt", "source 1"], "give --source, not --prompt"),
        (["--source", "source 1", "--reference", "two.txt"], "the sources end at line 1 and two.txt at line 2"),
        (["--source", "source 1", "--reference", "nowhere.txt"], "nowhere.txt cannot be read"),
    ],
)
def test_sources_that_cannot_be(program: Program, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "two.txt").write_text("one\ntwo\n")
    assert message in program.refuse("pairs", *arguments)


def test_runs_that_cannot_speak(program: Program, runs: Path, tmp_path: Path) -> None:
    assert "holds an encoder" in program.refuse("masked", "--prompt", "It")
    assert "there is no run" in program.refuse("nowhere", "--prompt", "It")
    subprocess.run(["cp", "-r", str(runs / "text"), str(tmp_path / "mute")], check=True)
    (tmp_path / "mute" / "tokenizer.json").unlink()
    assert "tokenizer.json does not exist" in program.refuse(str(tmp_path / "mute"), "--prompt", "It")
