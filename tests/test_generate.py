"""generate.py: what it is asked for comes out, in each form."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_tformer.cli.generate_options import GenerateOptions
from jax_tformer.cli.texts import Reader, Room, Text, batched, read_references, read_standard_input
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import TextData
from jax_tformer.data.pipeline import build_tokenizer_for
from jax_tformer.data.tokenizers import load_tokenizer
from tests.speaking import CONTEXT, TARGET_LENGTH, Program, write_runs

ROOT = Path(__file__).parents[1]
SOURCES = "source 1\n source 12\nsource 3\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder


@pytest.fixture
def program(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    monkeypatch.chdir(tmp_path)
    return Program(runs, monkeypatch, capsys)


def objects(lines: str) -> list[dict[str, Any]]:
    # Not splitlines: a JSON string may hold other separators of lines.
    return [json.loads(line) for line in lines.removesuffix("\n").split("\n")]


# Prompts.


def test_a_prompt_is_continued(program: Program) -> None:
    text = program.say("text", "--prompt", "It was", "--max-new-tokens", "9")
    assert text.startswith("It was")
    assert text.endswith("\n")
    assert len(text) > len("It was\n")
    assert program.say("text", "--prompt", "It was", "--max-new-tokens", "9") == text
    assert program.say("text", "--prompt", "It was", "--max-new-tokens", "9", "--seed", "1") != text
    greedy = program.say("text", "--prompt", "It was", "--max-new-tokens", "9", "--temperature", "0")
    assert greedy not in (text, "It was\n")
    assert (
        program.say("text", "--prompt", "It was", "--max-new-tokens", "9", "--temperature", "0", "--seed", "1")
        == greedy
    )


def test_the_context_is_the_default_end(program: Program, runs: Path) -> None:
    for name in ("text", "learned"):
        (spoken,) = objects(program.say(name, "--prompt", "It was", "--json", "--top-k", "200"))
        (completion,) = spoken["completions"]
        # A start token, six bytes; an end token may come before, and is not among the tokens.
        assert len(completion["tokens"]) == CONTEXT - 7 or completion["finished"]
        assert completion["text"] == load_tokenizer(runs / name).decode(completion["tokens"])
        assert spoken["prompt"] == "It was"


def test_samples_are_separated(program: Program) -> None:
    options = ("--prompt", "It", "--max-new-tokens", "5", "--num-samples", "3", "--top-p", "0.9", "--min-p", "0.001")
    text = program.say("text", *options)
    for number in (1, 2, 3):
        assert f"--- sample {number} ---\nIt" in text
    (spoken,) = objects(program.say("text", *options, "--json"))
    texts = [completion["text"] for completion in spoken["completions"]]
    assert len(set(texts)) == 3
    assert text == "".join(f"--- sample {number} ---\nIt{each}\n\n" for number, each in enumerate(texts, 1))


def test_beams_come_best_first_with_their_scores(program: Program) -> None:
    options = ("--prompt", "It", "--max-new-tokens", "5", "--beam", "4", "--n-best", "3")
    (spoken,) = objects(program.say("text", *options, "--json"))
    scores = [completion["score"] for completion in spoken["completions"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    text = program.say("text", *options)
    for number, completion in enumerate(spoken["completions"], 1):
        assert f"--- beam {number}, score {completion['score']:.4f} ---\nIt{completion['text']}\n\n" in text
    assert (
        program.say("text", "--prompt", "It", "--max-new-tokens", "5", "--beam", "4")
        == f"It{spoken['completions'][0]['text']}\n"
    )


@pytest.mark.parametrize("name", ["text", "learned"])
def test_a_batch_says_what_each_prompt_says_alone(program: Program, tmp_path: Path, name: str) -> None:
    prompts = ["It", "A long prompt of 27 bytes", "你好", "So"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    together = program.say(name, "--file", "prompts.txt", "--json", "--batch-size", "3")
    assert [spoken["prompt"] for spoken in objects(together)] == prompts
    assert program.say(name, "--json", "--batch-size", "3", typed="\r\n".join(prompts)) == together
    alone = [program.say(name, "--json", "--prompt", prompt) for prompt in prompts[:2]]
    assert objects(together)[:2] == [
        {"line": n, **spoken} for n, each in enumerate(alone, 1) for spoken in objects(each)
    ]
    texts = [spoken["completions"][0]["text"] for spoken in objects(together)]
    readable = program.say(name, "--file", "prompts.txt")
    expected = [f"--- prompt {n} ---\n{p}{t}\n\n" for n, (p, t) in enumerate(zip(prompts, texts, strict=True), 1)]
    assert readable == "".join(expected)


@pytest.mark.parametrize("run", ["text", "learned"])
@pytest.mark.parametrize("flags", [[], ["--stream"], ["--beam", "2"], ["--slide"], ["--num-samples", "2"]])
@pytest.mark.deep
def test_one_compilation_serves_all_lengths_and_batches(program: Program, run: str, flags: list[str]) -> None:
    from jax_tformer.decoding import beam, loop

    parts = (loop.start, loop.advance, loop.restart, beam.start_search, beam.search)
    for part in parts:
        part.clear_cache()
    lines = "".join(f"{'x' * number} prompt {number}\n" for number in range(8))
    program.say(run, "--batch-size", "3", *flags, typed=lines)
    compiled = [part._cache_size() for part in parts]
    if "--slide" in flags:
        # Prompts that slide go by their length, rounded up to a quarter of the context: here three of 16 (twice), then
        # two of 16 and one of 24.
        assert compiled == [3, 3, 3, 0, 0]
    else:
        assert compiled == ([0, 0, 0, 1, 1] if "--beam" in flags else [1, 1, 0, 0, 0])


def test_standard_input_is_read_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Reader(Room.of_run(data := TextData(context_length=CONTEXT)), build_tokenizer_for(data), 9)
    reading, writing = os.pipe()
    with open(reading) as stream, open(writing, "wb", buffering=0) as sink:
        monkeypatch.setattr(sys, "stdin", stream)
        batches = batched(read_standard_input(read), 2)
        sink.write(b"one\ntwo\nthr")
        assert [line.text for line in next(batches)] == ["one", "two"]
        sink.write(b"ee\n")
        sink.close()
        assert [(line.text, line.number) for line in next(batches)] == [("three", 3)]


def test_blank_lines_are_left_out_and_counted(program: Program, tmp_path: Path) -> None:
    typed = "\n \t\nIt\n\r\nSo\n\n"
    (tmp_path / "prompts.txt").write_text(typed, newline="")
    options = ("--max-new-tokens", "3", "--temperature", "0")
    spoken = program.say("text", *options, "--json", typed=typed)
    assert [(each["line"], each["prompt"]) for each in objects(spoken)] == [(3, "It"), (5, "So")]
    assert program.say("text", *options, "--json", "--file", "prompts.txt") == spoken
    assert program.say("text", *options, "--json", "--file", "-", typed=typed) == spoken
    assert "--- prompt 3 ---\nIt" in program.say("text", *options, "--stream", typed=typed)


def test_who_types_goes_on_after_a_line_that_cannot_be(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerateOptions, "typed", True)
    lines = f"It\n\n{'x' * CONTEXT}\nSo\n"
    spoken = program.say("text", "--max-new-tokens", "3", "--temperature", "0", "--json", typed=lines)
    assert [each["prompt"] for each in objects(spoken)] == ["It", "So"]
    assert "line 3 of standard input: the prompt has 33 tokens" in program.errors


def test_references_stand_beside_the_lines_that_are_not_blank(tmp_path: Path) -> None:
    sources = [Text("one", [], 1, 2), Text("two", [], 1, 3), Text("four", [], 1, 5)]
    path = tmp_path / "references.txt"
    path.write_text("\nun\n\n\nquatre\n\n")
    assert read_references(path, sources) == ["un", "", "quatre"]
    for content, message in (
        ("\nun\ndeux\n", "the sources end at line 5 and .* at line 3"),
        ("\nun\n\n\nquatre\ncinq\n", "the sources end at line 5 and .* at line 6"),
        ("\nun\n\ntrois\nquatre\n", r"line 4 of .* belongs to a blank line"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            read_references(path, sources)


@pytest.mark.parametrize("options", [[], ["--slide", "--max-new-tokens", "90"], ["--temperature", "0"]])
def test_a_stream_is_what_comes_at_once(program: Program, options: list[str]) -> None:
    for seed in ("1", "2"):
        # Most of the bytes that this model says are no characters.
        whole = program.say("text", "--prompt", "Ça 🙂", "--seed", seed, *options)
        assert program.say("text", "--prompt", "Ça 🙂", "--seed", seed, *options, "--stream") == whole
    typed = "a\nPrompt\n你\n"
    assert program.say("text", *options, "--stream", typed=typed) == program.say("text", *options, typed=typed)


def test_sliding_goes_on_beyond_the_context(program: Program) -> None:
    for name in ("text", "learned"):
        options = ("--slide", "--max-new-tokens", "80", "--json", "--repetition-penalty", "1.1", "--seed", "4")
        spoken = objects(program.say(name, *options, typed="It was\nA\nA prompt of 31 characters, so ..\n"[:-4] + "\n"))
        assert all(len(each["completions"][0]["tokens"]) == 80 or each["completions"][0]["finished"] for each in spoken)
        assert max(len(each["completions"][0]["tokens"]) for each in spoken) > CONTEXT
        assert [{"line": 2, **each} for each in objects(program.say(name, *options, "--prompt", "A"))] == spoken[1:2]


# Translations.


def test_sources_are_translated(program: Program, tmp_path: Path) -> None:
    lines = program.say("pairs", typed=SOURCES)
    assert lines.count("\n") == 3
    assert program.say("pairs", "--stream", typed=SOURCES) == lines
    assert program.say("pairs", "--source", " source 12") == lines.split("\n")[1] + "\n"
    (tmp_path / "sources.txt").write_text(SOURCES)
    spoken = objects(program.say("pairs", "--file", "sources.txt", "--json", "--batch-size", "2"))
    assert [each["source"] for each in spoken] == ["source 1", "source 12", "source 3"]
    assert [each["completions"][0]["text"] for each in spoken] == lines.splitlines()
    assert all(len(each["completions"][0]["tokens"]) <= TARGET_LENGTH for each in spoken)
    beams = program.say("pairs", "--source", "source 1", "--beam", "3", "--n-best", "2", "--length-penalty", "1")
    assert "--- beam 2, score -" in beams


def test_references_are_scored(program: Program, tmp_path: Path) -> None:
    (tmp_path / "sources.txt").write_text(SOURCES)
    (tmp_path / "same.txt").write_text(program.say("pairs", typed=SOURCES))
    (tmp_path / "other.txt").write_text("target 1\ntarget 12\n\n")
    program.say("pairs", "--file", "sources.txt", "--reference", "same.txt")
    exact, bleu, chrf, _ = program.errors.splitlines()
    assert exact == "exact match 1.0000: 3 of 3"
    assert bleu == "no BLEU: 3 of 3 references have fewer than 4 tokens, and BLEU compares runs of 4"
    assert chrf.startswith("chrF2|nrefs:1|")
    assert " = 100.00" in chrf
    *_, scores = objects(program.say("pairs", "--json", "--reference", "other.txt", typed=SOURCES))
    assert list(scores) == ["exact_match", "bleu", "no_bleu", "chrf", "signatures"]
    assert (scores["exact_match"], scores["bleu"]) == (0, None)
    assert scores["no_bleu"] == "3 of 3 references have fewer than 4 tokens, and BLEU compares runs of 4"
    assert scores["chrf"] < 50
    assert all(signature.startswith("nrefs:1|") for signature in scores["signatures"])


# The real process.


def command(runs: Path, *arguments: str) -> list[str]:
    return [sys.executable, "generate.py", str(runs / "text"), *arguments]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Whoever runs the tests in the background of a shell has told them, and their children, to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_a_reader_that_leaves_and_ctrl_c_end_it_quietly(runs: Path, tmp_path: Path) -> None:
    # Prompts for minutes: a single text may end before the signal comes.
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("It\n" * 100_000)
    options = command(runs, "--file", str(prompts), "--max-new-tokens", "20")
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "cwd": ROOT,
    }
    for way in ("interrupt", "leave"):
        with subprocess.Popen(options, **pipes) as process:
            assert process.stdout
            assert process.stderr
            process.stdout.read(20)
            if way == "interrupt":
                process.send_signal(signal.SIGINT)
                process.stdout.read()
            process.stdout.close()
            errors = process.stderr.read()
            status = process.wait(timeout=60)
        assert errors == b""
        assert status == 128 + (signal.SIGINT if way == "interrupt" else signal.SIGPIPE)


def test_help_is_fast_and_imports_no_jax() -> None:
    code = (
        "import sys, generate\ntry: generate.main(['--help'])\nexcept SystemExit: pass\nassert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--n-best" in done.stdout
