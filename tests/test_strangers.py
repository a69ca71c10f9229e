"""A run folder that a stranger made: whatever is in it, one line says what is wrong, without a look outside of it."""

import json
import os
from dataclasses import replace

import pytest

from jax_tformer import StackConfig
from jax_tformer.config.experiment import ExperimentConfig, TextData, TokenizerConfig
from jax_tformer.data.tokenizers import build_tokenizer
from jax_tformer.files import from_dict, parse_json, read_json, read_text
from jax_tformer.runs.folder import RunFolder
from tests.damages import link, pipe, write
from tests.refusals import refused
from tests.several_processes import run_alone
from tests.small_models import GPT

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"a":' * 100_000, "more than 64 deep"),
        ("[" * 66 + "]" * 66, "more than 64 deep"),
        ("[Infinity]", "NaN or too large"),
        ('{"a": NaN}', "NaN or too large"),
        ("-1e999", "too large"),
        ("1" * 400, "too large"),
        ("1" * 5000, "Exceeds the limit"),
        ("{", "Expecting"),
    ],
)
def test_json_that_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json_that_is_read():
    assert parse_json("[" * 64 + "]" * 64)
    values = {"a": [1, -2.5e300, None, True, "\N{GREEK SMALL LETTER MU}", 2**64], "b": {}}
    assert parse_json(json.dumps(values)) == values
    # A whole number may stand in place of another, but a string may not.
    assert type(from_dict(StackConfig, {"norm_eps": 2**64}, where="a file").norm_eps) is float
    with refused("a file is not a valid StackConfig"):
        from_dict(StackConfig, {"norm_eps": "1"}, where="a file")


@pytest.mark.parametrize(
    "name, message",
    [("a\0b", "a NUL in its name"), ("large", "more than 100 bytes")],
)
def test_files_that_are_none(tmp_path, name, message):
    (tmp_path / "large").write_bytes(b" " * 101)
    with refused(message):
        read_text(tmp_path / name, most=100)


def write_run(folder):
    """A run of a tiny model, without checkpoints."""
    tokenizer = build_tokenizer(TokenizerConfig("characters"), ["ab"], {})
    RunFolder(folder).create(
        ExperimentConfig(model=replace(GPT, vocab_size=2), data=TextData(context_length=8)), tokenizer
    )


@pytest.mark.parametrize(
    "other, kind", [(pipe, "a pipe"), (link, "a link"), (lambda name: link(name, "/dev"), "a link")]
)
@pytest.mark.parametrize(
    "name",
    ["lock", "config.json.partial", "metrics.jsonl", "checkpoints", "tensorboard", "checkpoints/5.pending", "origin/x"],
)
def test_what_training_would_write_to_is_in_the_folder(tmp_path, other, kind, name):
    write_run(tmp_path / "run")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    RunFolder(tmp_path / "run").check()
    other(name)(tmp_path / "run")
    with refused(f"{name} is {kind}; expected a file or a folder"):
        RunFolder(tmp_path / "run").check()


def vocabulary(tokens):
    """Gives a tokenizer these tokens, with their ids."""

    def damage(folder):
        values = read_json(folder / "tokenizer.json")
        values["model"]["vocab"] = tokens
        write("tokenizer.json", json.dumps(values))(folder)

    return damage


DAMAGES = [
    (write("config.json", DEEP), "nested more than 64 deep"),
    (write("config.json", ""), "config.json is damaged: it is not JSON"),
    (write("config.json", b"caf\xe9"), "byte 0xe9 at byte 3 is not UTF-8"),
    (write("config.json", '{"model": {}}'), "is not a valid ExperimentConfig"),
    (pipe("config.json"), "config.json is a pipe"),
    (link("config.json"), "config.json is a device"),
    (link("config.json", "."), "config.json is a folder"),
    (pipe("tokenizer.json"), "tokenizer.json is a pipe"),
    (write("tokenizer.json", None), "tokenizer.json does not exist"),
    (write("tokenizer.json", DEEP), "tokenizer.json is not a tokenizer"),
    (link("tokenizer_config.json"), "tokenizer_config.json is a device"),
    (write("special_tokens_map.json", DEEP), "special_tokens_map.json is damaged"),
    (vocabulary({"ab": 0, "c": 1}), "tokenizer.json is not a tokenizer (the token 'ab' is not one character"),
    (vocabulary({"": 0, "c": 1}), "the token '' is not one character"),
    (vocabulary({"a": 2**31}), "a token has the id 2147483648; expected ids below 2147483647"),
    (vocabulary({"a": -1}), "tokenizer.json is not a tokenizer"),
]

PROGRAM = """
import json, sys, generate, train
from jax_tformer.terminal import run_program
for program, *arguments in json.loads(sys.argv[1]):
    sys.argv = [program, *arguments]
    try:
        run_program(generate.main if program == "generate.py" else train.main, program)
    except SystemExit as stop:
        assert stop.code == (0 if "--help" in arguments else 2), arguments
    assert "jax" not in sys.modules, arguments
"""


def test_help_and_what_is_no_run_come_before_jax_is_imported(tmp_path):
    for name in ("hugging-face", "code"):
        (tmp_path / name).mkdir()
    write("hugging-face/config.json", '{"model_type": "gpt2"}')(tmp_path)
    write("code/train.py", "import jax")(tmp_path)
    write("lines.txt", "ab\n\nab\nabc\n")(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    write_run(tmp_path / "run")
    # HERE is the folder.
    expected = {
        "generate.py HERE/code --prompt ab": "holds no run (no config.json); expected a folder that train.py or",
        "generate.py HERE/run/checkpoints --prompt ab": "there is no run in",
        "generate.py HERE/lines.txt --prompt ab": "is a file, not a run",
        "generate.py /proc/x --prompt a": "/proc/x; expected a folder that train.py or save_pretrained",
        "generate.py HERE/. --prompt ab": "(no config.json); did you mean",
        "generate.py HERE/run --file HERE/lines.txt": "line 4 of",
        "generate.py HERE/run --file HERE/nowhere.txt": "cannot be read",
        "generate.py HERE/run --prompt abababab": "expected at most 8 together",
        "train.py dates --run /proc/x": "); choose another folder, or change its permissions",
        "train.py dates --run HERE/hugging-face": "holds a Hugging Face model",
        "train.py text --data.path HERE/code": f"are named by a pattern: '{tmp_path}/code/**/*.py'",
        "train.py text --data.path HERE/nowhere.txt": "does not exist",
        "train.py text --data.path HERE/pipe": "is a pipe",
        "train.py pairs --data.path HERE/lines.txt": "is neither .tsv nor .jsonl",
    }
    for number, (damage, message) in enumerate(DAMAGES):
        write_run(tmp_path / str(number))
        damage(tmp_path / str(number))
        expected[f"generate.py HERE/{number} --prompt ab"] = message
    calls = [[word.replace("HERE", str(tmp_path)) for word in call.split()] for call in expected]
    helps = [["generate.py", "--help"], ["train.py", "dates", "--help"]]
    _, errors = run_alone(["-c", PROGRAM, json.dumps([*helps, *calls])])
    for line, call, message in zip(errors.splitlines(), calls, expected.values(), strict=True):
        assert line.startswith(f"{call[0]}: error: ")
        assert message in line
