"""A run folder that a stranger made: whatever is in it, one line says what is wrong, without a look outside of it."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import ExperimentConfig, TextData, TokenizerConfig
from jax_tformer.data.tokenizers import build_tokenizer, load_tokenizer
from jax_tformer.files import from_dict, parse_json, read_json, read_text
from jax_tformer.runs import checkpoints
from jax_tformer.runs.folder import RunFolder

ROOT = Path(__file__).parents[1]
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEEP, "more than 64 deep"),
        ('{"a":' * 100_000, "more than 64 deep"),
        ("[" * 66 + "]" * 66, "more than 64 deep"),
        ("[Infinity]", "Infinity is no number"),
        ('{"a": NaN}', "NaN is no number"),
        ("-1e999", "too large"),
        ("1" * 5000, "too large"),
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


def as_pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def as_link(path, target="/dev/zero"):
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def as_link_to_a_folder(path):
    as_link(path, "/dev")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pipe", "is a pipe; expected a file"),
        ("/dev/zero", "is a device; expected a file"),
        (".", "is a folder; expected a file"),
        ("a\0b", "a NUL in its name"),
        ("nothing", "No such file"),
        ("large", "more than 100 bytes"),
        ("latin", "byte 0xe9 at byte 3 is not UTF-8"),
    ],
)
def test_files_that_are_none(tmp_path, name, message):
    as_pipe(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * 101)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=message):
        read_text(tmp_path / name, most=100)


def test_values_that_are_none(tmp_path):
    (tmp_path / "deep").write_text(DEEP)
    with pytest.raises(InputError, match=r"deep is damaged: it is not JSON .it is nested"):
        read_json(tmp_path / "deep")
    # A whole number may stand in place of another, but a string may not.
    values = {"num_layers": 1, "num_heads": 2, "feedforward_width": 16, "norm_eps": 2**64}
    assert type(from_dict(StackConfig, values, where="a file").norm_eps) is float
    with pytest.raises(InputError, match="a file is not a valid StackConfig"):
        from_dict(StackConfig, values | {"norm_eps": "1"}, where="a file")


@pytest.fixture
def sealed(tmp_path):
    """A sealed folder beside a file that it has no business with."""
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "30"
    (folder / "params").mkdir(parents=True)
    (folder / "params" / "array").write_text("1 2 3")
    checkpoints.seal(folder)
    assert checkpoints.find_damage(folder) is None
    return folder


SECRET = f"{zlib.crc32(b'secret'):08x}"


def listing(name, size=6, crc=SECRET):
    return json.dumps({"files": {name: {"bytes": size, "crc32": crc}}})


DAMAGED = "checksums.json is damaged"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (listing("../secret"), "names '../secret', which is not in the folder"),
        (listing("params/../../secret"), "which is not in the folder"),
        (listing("/etc/hostname"), "which is not in the folder"),
        (listing("a\0b"), "which is not in the folder"),
        (listing("\ud800"), "cannot be read"),
        (listing("x" * 300), "cannot be read"),
        *((listing("params/array", size, "0"), DAMAGED) for size in (float("inf"), float("nan"), "many", [])),
        *((listing("params/array", 6, crc), DAMAGED) for crc in (6, "x")),
        *((content, DAMAGED) for content in ("", "[]", DEEP, '{"files": []}', '{"files": {"a": 1}}')),
    ],
)
def test_checksums_that_cannot_be(sealed, content, problem):
    (sealed / checkpoints.CHECKSUM_FILE).write_text(content)
    assert problem in str(checkpoints.find_damage(sealed))


@pytest.mark.parametrize("other", [as_pipe, as_link])
@pytest.mark.parametrize("name", ["params/array", "params/not_listed", checkpoints.CHECKSUM_FILE])
def test_pipes_and_devices_in_place_of_files(sealed, other, name):
    other(sealed / name)
    assert checkpoints.find_damage(sealed) in (f"{name} is no regular file", "its checksums.json is damaged")


@pytest.fixture
def tokenizer(tmp_path):
    """The folder of a tokenizer."""
    build_tokenizer(TokenizerConfig("characters"), ["abc"], {}).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ({"ab": 0, "c": 1}, "the token 'ab' is not one character"),
        ({"": 0, "c": 1}, "the token '' is not one character"),
        ({"a": 2**31}, "a token has the id 2147483648; expected ids below 2147483647"),
        ({"a": 2**70}, "is not a tokenizer"),
        ({"a": -1}, "is not a tokenizer"),
    ],
)
def test_vocabularies_that_cannot_be(tokenizer, vocabulary, message):
    values = json.loads((tokenizer / "tokenizer.json").read_text())
    values["model"]["vocab"] = vocabulary
    (tokenizer / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=message) as told:
        load_tokenizer(tokenizer)
    assert "tokenizer.json" in str(told.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("other", "message"), [(lambda path: path.write_text(DEEP), ""), (as_pipe, " is a pipe"), (as_link, " is a device")]
)
def test_tokenizer_files_that_are_none(tokenizer, name, other, message):
    other(tokenizer / name)
    with pytest.raises(InputError, match=f"{name}{message}"):
        load_tokenizer(tokenizer)


def write_run(folder):
    """A run of a tiny model, without checkpoints."""
    tokenizer = build_tokenizer(TokenizerConfig("characters"), ["ab"], {})
    decoder = StackConfig(num_layers=1, num_heads=2, feedforward_width=16)
    model = TransformerConfig(vocab_size=2, d_model=16, decoder=decoder)
    RunFolder(folder).create(ExperimentConfig(model=model, data=TextData(context_length=8)), tokenizer)


@pytest.mark.parametrize(("other", "kind"), [(as_pipe, "a pipe"), (as_link, "a link"), (as_link_to_a_folder, "a link")])
@pytest.mark.parametrize(
    "name",
    ["lock", "config.json.partial", "metrics.jsonl", "checkpoints", "tensorboard", "checkpoints/5.pending", "origin/x"],
)
def test_what_training_would_write_to_is_in_the_folder(tmp_path, other, kind, name):
    write_run(tmp_path / "run")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    RunFolder(tmp_path / "run").check()
    other(tmp_path / "run" / name)
    with pytest.raises(InputError, match=f"{name} is {kind}; expected a file or a folder"):
        RunFolder(tmp_path / "run").check()


PROGRAM = """
import sys, generate, train
from jax_tformer.terminal import run_program
for program, *arguments in {calls!r}:
    sys.argv = [program, *arguments]
    try:
        run_program(generate.main if program == "generate.py" else train.main, program)
    except SystemExit as stop:
        assert stop.code == 2, arguments
    assert "jax" not in sys.modules, arguments
"""


def test_what_is_no_run_is_named_before_jax_is_imported(tmp_path):
    for name in ("hugging-face", "code", "pipe", "deep", "tokenizer"):
        (tmp_path / name).mkdir()
    (tmp_path / "hugging-face" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "code" / "train.py").write_text("import jax")
    as_pipe(tmp_path / "pipe" / "config.json")
    (tmp_path / "deep" / "config.json").write_text(DEEP)
    for folder in ("run", "tokenizer"):
        write_run(tmp_path / folder)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "lines.txt").write_text("ab\n\nab\nabc\n")
    # HERE is the folder.
    expected = {
        "generate.py HERE/code --prompt ab": "holds no run (no config.json); expected a folder that train.py or",
        "generate.py HERE/run/checkpoints --prompt ab": "there is no run in",
        "generate.py HERE/lines.txt --prompt ab": "is a file, not a run",
        "generate.py /proc/x --prompt a": "/proc/x; expected a folder that train.py or save_pretrained",
        "generate.py HERE/. --prompt ab": "(no config.json); did you mean",
        "generate.py HERE/pipe --prompt ab": "config.json is a pipe",
        "generate.py HERE/deep --prompt ab": "nested more than 64 deep",
        "generate.py HERE/tokenizer --prompt ab": "is not a tokenizer",
        "generate.py HERE/run --file HERE/lines.txt": "line 4 of",
        "generate.py HERE/run --file HERE/nowhere.txt": "cannot be read",
        "generate.py HERE/run --prompt abababab": "expected at most 8 together",
        "train.py dates --run /proc/x": "cannot write to /proc",
        "train.py dates --run HERE/hugging-face": "holds a Hugging Face model",
        "train.py text --data.path HERE/code": f"are named by a pattern: '{tmp_path}/code/**/*.py'",
        "train.py text --data.path HERE/nowhere.txt": "does not exist",
        "train.py text --data.path HERE/pipe/config.json": "is not a file",
        "train.py pairs --data.path HERE/lines.txt": "is neither .tsv nor .jsonl",
    }
    calls = [[word.replace("HERE", str(tmp_path)) for word in call.split()] for call in expected]
    code = PROGRAM.format(calls=calls)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected), done.stderr
    for line, (program, *_), message in zip(lines, calls, expected.values(), strict=True):
        assert line.startswith(f"{program}: error: ")
        assert message in line
