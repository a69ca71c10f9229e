"""generate.py: what it is asked for comes out in each form; what cannot be is refused in one line, with status 2, and
nothing is written."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from jax_tformer.cli.answer import read_prompts, read_references
from jax_tformer.cli.generate import GenerateOptions
from jax_tformer.config.experiment import TextData
from jax_tformer.data.pipeline import build_tokenizer_for
from jax_tformer.data.tokenizers import load_tokenizer
from jax_tformer.decoding.texts import Prompt, PromptReader
from jax_tformer.files import batched
from tests.refusals import refused
from tests.several_processes import ROOT, start
from tests.speaking import CONTEXT, TARGET_LENGTH, Program, write_runs

SOURCES = "source 1\n source 12\nsource 3\n"
LONG = "x" * CONTEXT


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    write_runs(folder := tmp_path_factory.mktemp("runs"))
    return folder


@pytest.fixture
def program(runs, end_of):
    return Program(runs, end_of)


def test_a_prompt_is_continued(program):
    def say(flags=""):
        return program.say(f"text --max-new-tokens 9 {flags} --prompt", "It was")

    text, greedy = say(), say("--temperature 0")
    assert (text[:6], text[-1]) == ("It was", "\n")
    assert say() == text != say("--seed 1")
    assert greedy not in (text, "It was\n")
    assert say("--temperature 0 --seed 1") == greedy


@pytest.mark.parametrize("name", ["text", "learned"])
def test_the_context_is_the_default_end(program, runs, name):
    [spoken] = program.answer(f"{name} --top-k 200 --prompt", "It was")
    [completion] = spoken["completions"]
    # A start token, six bytes; an end token may come before, and is not among the tokens.
    assert len(completion["tokens"]) == CONTEXT - 7 or completion["finished"]
    assert completion["text"] == load_tokenizer(runs / name).decode(completion["tokens"])
    assert spoken["prompt"] == "It was"


def test_samples_and_beams_have_headings(program):
    short = "text --prompt It --max-new-tokens 5"
    for flags in ("--num-samples 3 --top-p 0.9 --min-p 0.001", "--beam 4 --n-best 3"):
        [spoken] = program.answer(f"{short} {flags}")
        expected, scores = "", []
        for number, found in enumerate(spoken["completions"], 1):
            scores.append(found.get("score"))
            heading = f"sample {number}" if scores[-1] is None else f"beam {number}, score {scores[-1]:.4f}"
            expected += f"--- {heading} ---\nIt{found['text']}\n\n"
        assert len({str(found["tokens"]) for found in spoken["completions"]}) == 3
        assert program.say(f"{short} {flags}") == expected
    assert scores == sorted(scores, reverse=True)
    assert program.say(f"{short} --beam 4") == f"It{spoken['completions'][0]['text']}\n"


@pytest.mark.parametrize("name", ["text", "learned"])
def test_a_batch_says_what_each_prompt_says_alone(program, tmp_path, name):
    prompts = ["It", "A long prompt of 27 bytes", "你好", "So"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    together = program.answer(f"{name} --file prompts.txt --batch-size 3")
    assert program.answer(f"{name} --batch-size 3", typed="\r\n".join(prompts)) == together
    alone = [{"line": n, **program.answer(f"{name} --prompt", prompt)[0]} for n, prompt in enumerate(prompts, 1)]
    assert together == alone
    expected = [f"--- prompt {x['line']} ---\n{x['prompt']}{x['completions'][0]['text']}\n\n" for x in alone]
    assert program.say(f"{name} --file prompts.txt") == "".join(expected)


def test_standard_input_is_read_as_it_comes(monkeypatch):
    read = PromptReader(build_tokenizer_for(TextData()), 9, translates=False, max_length=CONTEXT)
    reading, writing = os.pipe()
    with open(reading) as stream, open(writing, "wb", buffering=0) as sink:
        monkeypatch.setattr(sys, "stdin", stream)
        batches = batched(read_prompts(GenerateOptions(Path("run")), read), 2)
        sink.write(b"one\ntwo\nthr")
        assert [line.text for line in next(batches)] == ["one", "two"]
        sink.write(b"ee\n")
        sink.close()
        assert [(line.text, line.number) for line in next(batches)] == [("three", 3)]


def test_blank_lines_are_left_out_and_counted(program, tmp_path):
    typed = "\n \t\nIt\n\r\nSo\n\n"
    (tmp_path / "prompts.txt").write_text(typed, newline="")
    command = "text --max-new-tokens 3 --temperature 0"
    spoken = program.answer(command, typed=typed)
    assert [(each["line"], each["prompt"]) for each in spoken] == [(3, "It"), (5, "So")]
    assert program.answer(f"{command} --file prompts.txt") == spoken
    assert program.answer(f"{command} --file -", typed=typed) == spoken
    assert "--- prompt 3 ---\nIt" in program.say(f"{command} --stream", typed=typed)


def test_who_types_goes_on_after_a_line_that_cannot_be(program, monkeypatch):
    monkeypatch.setattr(GenerateOptions, "typed", True)
    spoken = program.answer("text --max-new-tokens 3 --temperature 0", typed=f"It\n\n{LONG}\nSo\n")
    assert [each["prompt"] for each in spoken] == ["It", "So"]
    assert "line 3 of standard input: the prompt has 33 tokens" in program.errors


@pytest.mark.parametrize("options", ["", "--slide --max-new-tokens 90", "--temperature 0"])
def test_a_stream_is_what_comes_at_once(program, options):
    # Most of the bytes that this model says are no characters.
    typed = "Ça 🙂\nPrompt\n你\n"
    assert program.say(f"text {options} --stream", typed=typed) == program.say(f"text {options}", typed=typed)
    prompt = ("--prompt", "Ça 🙂")
    assert program.say(f"text {options} --stream", *prompt) == program.say(f"text {options}", *prompt)


def test_sources_are_translated(program, tmp_path):
    lines = program.say("pairs", typed=SOURCES)
    assert program.say("pairs --stream", typed=SOURCES) == lines
    assert program.say("pairs --source", " source 12") == lines.splitlines(True)[1]
    (tmp_path / "sources.txt").write_text(SOURCES)
    spoken = program.answer("pairs --file sources.txt --batch-size 2")
    assert [each["source"] for each in spoken] == ["source 1", "source 12", "source 3"]
    assert [each["completions"][0]["text"] for each in spoken] == lines.splitlines()
    assert all(len(each["completions"][0]["tokens"]) <= TARGET_LENGTH for each in spoken)
    beams = program.say("pairs --beam 3 --n-best 2 --length-penalty 1 --source", "source 1")
    assert "--- beam 2, score -" in beams


def test_references_are_scored(program, tmp_path):
    (tmp_path / "sources.txt").write_text(SOURCES)
    (tmp_path / "same.txt").write_text(program.say("pairs", typed=SOURCES))
    (tmp_path / "other.txt").write_text("target 1\ntarget 12\n\n")
    program.say("pairs --file sources.txt --reference same.txt")
    exact, bleu, chrf, _ = program.errors.splitlines()
    why = "3 of 3 references have fewer than 4 tokens, and BLEU compares runs of 4"
    assert (exact, bleu) == ("exact match 1.0000: 3 of 3", f"no BLEU: {why}")
    assert re.match(r"chrF2\|nrefs:1\|.* = 100.00", chrf)
    *_, scores = program.answer("pairs --reference other.txt", typed=SOURCES)
    [signature], chrf = scores.pop("signatures"), scores.pop("chrf")
    assert scores == {"exact_match": 0, "bleu": None, "no_bleu": why}
    assert (chrf < 50, signature[:8]) == (True, "nrefs:1|")


def test_references_stand_beside_the_lines_that_are_not_blank(tmp_path):
    sources = [Prompt("one", [], 1, 2), Prompt("two", [], 1, 3), Prompt("four", [], 1, 5)]
    path = tmp_path / "references.txt"
    path.write_text("\nun\n\n\nquatre\n\n")
    assert read_references(path, sources) == ["un", "", "quatre"]
    for content, message in (
        ("\nun\ndeux\n", "the sources end at line 5 and .* at line 3"),
        ("\nun\n\n\nquatre\ncinq\n", "the sources end at line 5 and .* at line 6"),
        ("\nun\n\ntrois\nquatre\n", r"line 4 of .* belongs to a blank line"),
    ):
        path.write_text(content)
        with refused(message):
            read_references(path, sources)


def test_a_reader_that_leaves_and_ctrl_c_end_it_quietly(runs, tmp_path):
    # Prompts for minutes: a single text may end before the signal comes.
    (prompts := tmp_path / "prompts.txt").write_text("It\n" * 100_000)
    program = [ROOT / "generate.py", runs / "text", "--file", prompts, "--max-new-tokens", 20]
    # Whoever runs the tests in the background of a shell has told them, and their children, to ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for ending in (signal.SIGINT, signal.SIGPIPE):
            with start(program, 1, stdin=subprocess.DEVNULL) as process:
                process.stdout.read(20)
                if ending == signal.SIGINT:
                    process.send_signal(signal.SIGINT)
                    process.stdout.read()
                process.stdout.close()
                assert process.stderr.read() == ""
                assert process.wait(timeout=60) == 128 + ending
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "call, message",
    {
        # Run and flags in one string; PROMPT is one of two bytes, LONG one of as many as the context.
        "text": "standard input is empty",
        "text --prompt=": "the prompt is empty",
        "text --prompt LONG": "the prompt has 33 tokens with the start token, and one new token follows; "
        "expected at most 32 together",
        "text --prompt LONG --slide": "expected at most 32, the model's context; shorten it",
        "text PROMPT --max-new-tokens 30": "--max-new-tokens is 30; expected at most 32 together, the model's context;",
        "text PROMPT --max-new-tokens 31": "or let the model write beyond its context with --slide",
        "text PROMPT --max-new-tokens 0": "--max-new-tokens is 0; expected a whole number",
        "text PROMPT --slide --max-new-tokens 1e12": "--max-new-tokens is 1000000000000; expected fewer",
        "text PROMPT --min-new-tokens 4 --max-new-tokens 3": "--min-new-tokens is 4; expected at most 3",
        "text PROMPT --beam 300 --n-best 300 --max-new-tokens 1": "--n-best is 300, and the beam search has found 2",
        "text PROMPT --beam 1e9": "1,000,000,000 answers at once take ",
        "text PROMPT --num-samples 1e9": "ask for fewer at once (--batch-size, --beam,",
        "text PROMPT --temperature -1": "--temperature is -1",
        "text PROMPT --temperature nan": "--temperature is nan",
        "text PROMPT --top-k 0": "--top-k is 0",
        "text PROMPT --top-k 3 --temperature 0": "--top-k is 3; expected none at temperature 0",
        "text PROMPT --repetition-penalty 0": "--repetition-penalty is 0",
        "text PROMPT --num-samples 0": "--num-samples is 0",
        "text PROMPT --num-samples 2 --temperature 0": "--num-samples is 2; expected 1 at temperature 0",
        "text PROMPT --num-samples 2 --beam 2": "--beam and --num-samples are both given; expected",
        "text PROMPT --beam 0": "--beam is 0",
        "text PROMPT --n-best 2": "--n-best is given without --beam; expected both",
        "text PROMPT --n-best 3 --beam 2": "--n-best is 3; expected at most 2, the number of beams",
        "text PROMPT --beam 2 --temperature 1": "--temperature is 1; expected 0 with a beam search",
        "text PROMPT --beam 2 --slide": "--beam and --slide are both given",
        "text PROMPT --early-stopping": "--early-stopping is given without --beam",
        "text PROMPT --length-penalty-form power": "--length-penalty-form is given without --beam",
        "text PROMPT --stream --json --beam 2": "--stream and --beam are both given",
        "text PROMPT --seed -1": "--seed is -1",
        "text PROMPT --batch-size 0": "--batch-size is 0",
        "text PROMPT --source It": "holds a language model; give --prompt, not --source",
        "text PROMPT --words 3": "--words",
        "text PROMPT --dtype int8": "invalid choice 'int8' for argument '--dtype'; expected one of None, bfloat16, ",
        "text --prompt": "--prompt has no value; see generate.py --help",
        "text --prompt It\udcff": "a lone surrogate (U+DCFF) at character 2; expected valid Unicode",
        "text --source It": "give --prompt, not --source",
        "text PROMPT --reference file": "--reference is for translations",
        "text PROMPT --chat": "has no chat template; --chat is for",
        "text PROMPT --dtype float32": "--dtype is for Hugging Face folders",
        "text --file .": "cannot be read",
        "text PROMPT --checkpoint newst": "--checkpoint is 'newst'; expected newest, best, average, last-N, or the",
        "text PROMPT --checkpoint -1": "--checkpoint",
        "text PROMPT --checkpoint 7": "there is no checkpoint of step 7 in",
        "text PROMPT --checkpoint 8": "the steps there are 0",
        "text PROMPT --checkpoint best": "has a held-out loss to be the best by; the steps there are 0",
        "pairs --source=\N{NO-BREAK SPACE}": "the source is empty",
        "pairs --source source12345678901": "has 17 tokens; expected at most 15",
        "pairs --source §": "'§'",
        "pairs --source 1 --max-new-tokens 13": "expected at most 12, the run's data.target_length",
        "pairs --source 1 --slide": "--slide is for continuing texts",
        "pairs --source 1 --top-k 3": "--top-k is 3; expected none at temperature 0",
        "pairs PROMPT": "give --source, not --prompt",
        "pairs --source 1 --reference two.txt": "the sources end at line 1 and two.txt at line 2",
        "pairs --source 1 --reference nowhere.txt": "nowhere.txt cannot be read",
        "masked PROMPT": "holds an encoder; only decoder-only and encoder-decoder models generate",
        "~nobody-of-this-name/run PROMPT": "~nobody-of-this-name",
    }.items(),
)
def test_what_cannot_be_is_refused(refuse, runs, tmp_path, call, message):
    (tmp_path / "two.txt").write_text("one\ntwo\n")
    run, *flags = call.replace("PROMPT", "--prompt It").replace("LONG", LONG).split(" ")
    assert message in refuse(str(runs / run), *flags, program="generate.py")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty; expected a text on each line"),
        (b"\n  \n", "is empty; expected a text on each line"),
        (b"one\ncaf\xe9 au lait\n", "line 2 of {} is not UTF-8: byte 0xe9 at byte 4 of the line"),
        (b"one\n" + LONG.encode(), "line 2 of {}: the prompt has 33 tokens"),
    ],
)
def test_lines_that_cannot_be(refuse, runs, tmp_path, content, message):
    ask = partial(refuse, str(runs / "text"), program="generate.py")
    assert message.format("standard input") in ask(typed=content)
    (tmp_path / "lines.txt").write_bytes(content)
    # A file is known before anything is said.
    assert message.format("lines.txt") in ask("--file", "lines.txt", "--batch-size", "1")
