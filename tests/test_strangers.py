"""A run folder that a stranger made: whatever is in it, one line says what is wrong, without a look outside of it."""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import ExperimentConfig, TextData, TokenizerConfig
from jax_tformer.data.tokenizer_sources import build_tokenizer, load_tokenizer
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
def test_json_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json_that_is_read() -> None:
    assert parse_json("[" * 64 + "]" * 64)
    values = {"a": [1, -2.5e300, None, True, "\N{GREEK SMALL LETTER MU}", 2**64], "b": {}}
    assert parse_json(json.dumps(values)) == values


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * 101)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for path, message in (
        (tmp_path / "pipe", "is a pipe; expected a file"),
        (Path("/dev/zero"), "is a device; expected a file"),
        (tmp_path, "is a folder; expected a file"),
        (tmp_path / "a\0b", "a NUL in its name"),
        (tmp_path / "nothing", "No such file"),
        (tmp_path / "large", "more than 100 bytes"),
        (tmp_path / "latin", "byte 0xe9 at byte 3 is not UTF-8"),
    ):
        with pytest.raises(InputError, match=message):
            read_text(path, most=100)
    (tmp_path / "deep").write_text(DEEP)
    with pytest.raises(InputError, match=r"deep is damaged: it is not JSON .it is nested"):
        read_json(tmp_path / "deep")


def test_whole_numbers_in_place_of_others() -> None:
    values = {"num_layers": 1, "num_heads": 2, "feedforward_width": 16, "norm_eps": 2**64}
    assert type(from_dict(StackConfig, values, where="a file").norm_eps) is float
    with pytest.raises(InputError, match="a file is not a valid StackConfig"):
        from_dict(StackConfig, values | {"norm_eps": "1"}, where="a file")


# The list of checksums.


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A sealed folder beside a file that it has no business with."""
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "30"
    (folder / "params").mkdir(parents=True)
    (folder / "params" / "array").write_text("1 2 3")
    checkpoints.seal(folder)
    assert checkpoints.find_damage(folder) is None
    return folder


def listing(folder: Path, name: object, size: object = 6, crc: object = f"{zlib.crc32(b'secret'):08x}") -> None:
    (folder / checkpoints.CHECKSUM_FILE).write_text(json.dumps({"files": {name: {"bytes": size, "crc32": crc}}}))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../secret", "names '../secret', which is not in the folder"),
        ("params/../../secret", "which is not in the folder"),
        ("/etc/hostname", "which is not in the folder"),
        ("a\0b", "which is not in the folder"),
        ("\ud800", "cannot be read"),
        ("x" * 300, "cannot be read"),
    ],
)
def test_checksums_of_other_files(sealed: Path, name: str, problem: str) -> None:
    listing(sealed, name)
    assert problem in str(checkpoints.find_damage(sealed))


def test_checksums_that_are_none(sealed: Path) -> None:
    for size, crc in ((float("inf"), "0"), (float("nan"), "0"), ("many", "0"), (6, 6), (6, "x"), ([], "0")):
        listing(sealed, "params/array", size, crc)
        assert "checksums.json is damaged" in str(checkpoints.find_damage(sealed))
    for content in ("", "[]", DEEP, '{"files": []}', '{"files": {"a": 1}}'):
        (sealed / checkpoints.CHECKSUM_FILE).write_text(content)
        assert "checksums.json is damaged" in str(checkpoints.find_damage(sealed))


def as_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def as_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def as_link_to_a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev")


@pytest.mark.parametrize("other", [as_pipe, as_link])
@pytest.mark.parametrize("name", ["params/array", "params/not_listed", checkpoints.CHECKSUM_FILE])
def test_pipes_and_devices_in_place_of_files(sealed: Path, other: Callable[[Path], None], name: str) -> None:
    other(sealed / name)
    assert checkpoints.find_damage(sealed) in (f"{name} is no regular file", "its checksums.json is damaged")


# Tokenizers.


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
def test_vocabularies_that_cannot_be(tmp_path: Path, vocabulary: dict[str, int], message: str) -> None:
    build_tokenizer(TokenizerConfig("characters"), ["abc"], {}).save(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["model"]["vocab"] = vocabulary
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=rf"tokenizer\.json is not a tokenizer .*{message}|{message}") as told:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(told.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_tokenizer_files_that_are_none(tmp_path: Path, name: str) -> None:
    build_tokenizer(TokenizerConfig("characters"), ["abc"], {}).save(tmp_path)
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)
    for other in (as_pipe, as_link):
        other(tmp_path / name)
        with pytest.raises(InputError, match=rf"{name} is a (pipe|device)"):
            load_tokenizer(tmp_path)


# What is no run, before JAX is imported.


def write_run(folder: Path) -> None:
    """A run of a tiny model, without checkpoints."""
    tokenizer = build_tokenizer(TokenizerConfig("characters"), ["ab"], {})
    model = TransformerConfig(
        vocab_size=2, d_model=16, decoder=StackConfig(num_layers=1, num_heads=2, feedforward_width=16)
    )
    RunFolder(folder).create(ExperimentConfig(model=model, data=TextData(context_length=8)), tokenizer)


@pytest.mark.parametrize(("other", "kind"), [(as_pipe, "a pipe"), (as_link, "a link"), (as_link_to_a_folder, "a link")])
@pytest.mark.parametrize(
    "name",
    ["lock", "config.json.partial", "metrics.jsonl", "checkpoints", "tensorboard", "checkpoints/5.pending", "origin/x"],
)
def test_what_training_would_write_to_is_in_the_folder(
    tmp_path: Path, other: Callable[[Path], None], kind: str, name: str
) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    RunFolder(tmp_path / "run").check()
    other(tmp_path / "run" / name)
    with pytest.raises(InputError, match=f"{name} is {kind}; expected a file or a folder"):
        RunFolder(tmp_path / "run").check()


PROGRAM = """
import sys, generate, train
from jax_tformer.cli.command_line import run_program
for program, *arguments in {calls!r}:
    sys.argv = [program, *arguments]
    try:
        run_program(generate.main if program == "generate.py" else train.main, program)
    except SystemExit as stop:
        assert stop.code == 2, arguments
    assert "jax" not in sys.modules, arguments
"""


def test_what_is_no_run_is_named_before_jax_is_imported(tmp_path: Path) -> None:
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

    def generate(run: str, *arguments: str) -> list[str]:
        return ["generate.py", str(tmp_path / run), *(arguments or ("--prompt", "ab"))]

    expected = [
        (generate("code"), "holds no run (no config.json); expected a folder that train.py or save_pretrained has"),
        (generate("run/checkpoints"), "there is no run in"),
        (generate("lines.txt"), "is a file, not a run"),
        (["generate.py", "/proc/x", "--prompt", "a"], "/proc/x; expected a folder that train.py or save_pretrained"),
        (generate("."), "(no config.json); did you mean"),
        (generate("pipe"), "config.json is a pipe"),
        (generate("deep"), "nested more than 64 deep"),
        (generate("tokenizer"), "is not a tokenizer"),
        (generate("run", "--file", str(tmp_path / "lines.txt")), "line 4 of"),
        (generate("run", "--file", str(tmp_path / "nowhere.txt")), "cannot be read"),
        (generate("run", "--prompt", "abababab"), "expected at most 7"),
        (["train.py", "dates", "--run", "/proc/x"], "cannot write to /proc"),
        (["train.py", "dates", "--run", str(tmp_path / "hugging-face")], "holds a Hugging Face model"),
        (["train.py", "text", "--data.path", str(tmp_path / "code")], f"--data.path '{tmp_path}/code/**/*.py'"),
        (["train.py", "text", "--data.path", str(tmp_path / "nowhere.txt")], "does not exist"),
        (["train.py", "text", "--data.path", str(tmp_path / "pipe" / "config.json")], "is not a file"),
        (["train.py", "pairs", "--data.path", str(tmp_path / "lines.txt")], "is neither .tsv nor .jsonl"),
    ]
    code = PROGRAM.format(calls=[call for call, _ in expected])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected), done.stderr
    for line, ((program, *_), message) in zip(lines, expected, strict=True):
        assert line.startswith(f"{program}: error: ")
        assert message in line
