"""`jax-tformer PROGRAM`: the right program, called as the user called it; and export, which has no script."""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_tformer import __main__ as console
from jax_tformer import __version__, load_weights, transformer
from jax_tformer.config.experiment import TextData
from jax_tformer.data.tokenizers import load_tokenizer
from jax_tformer.files import to_dict
from jax_tformer.runs.folder import RunFolder
from tests.speaking import write_run

ROOT = Path(__file__).parents[1]


class Console:
    """`jax-tformer ARGUMENTS` in this process, in an empty folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[object, str, str]:
        """(status, standard output, standard error)."""
        self._monkeypatch.setattr(sys, "argv", ["/somewhere/bin/jax-tformer", *arguments])
        with pytest.raises(SystemExit) as ended:
            console.main()
        return ended.value.code, *self._capsys.readouterr()


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Console:
    monkeypatch.chdir(tmp_path)
    return Console(monkeypatch, capsys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "text"
    write_run(path, TextData(context_length=16))
    return path


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_the_programs_are_listed(arguments: tuple[str, ...], call: Console) -> None:
    status, out, err = call(*arguments)
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(console.PROGRAMS)


@pytest.mark.parametrize("arguments", [(), *((name,) for name in console.PROGRAMS)])
def test_every_program_says_its_version(arguments: tuple[str, ...], call: Console) -> None:
    assert call(*arguments, "--version") == (0, f"jax-tformer {__version__}\n", "")


def test_an_unknown_program_is_refused(call: Console) -> None:
    message = (
        "jax-tformer: error: there is no program 'trian'; expected one of train, generate, compare, parity, "
        "from-flax, export\n"
    )
    assert call("trian", "dates") == (2, "", message)


def test_a_program_is_called_as_the_user_called_it(call: Console, tmp_path: Path) -> None:
    status, out, err = call("train", "--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: jax-tformer train [EXPERIMENT]")
    assert "train.py" not in out
    status, out, err = call("generate", "--help")
    assert (status, err) == (0, "")
    assert "`jax-tformer generate FOLDER --prompt TEXT`" in out
    assert ".py" not in out
    status, out, err = call("train", "dates", "--training.steps", "-1")
    assert (status, out) == (2, "")
    assert err.startswith("jax-tformer train: error: training: steps is -1")
    assert err.endswith("see jax-tformer train dates --help\n")
    status, out, err = call("generate", "nowhere", "--prompt", "It")
    assert (status, out) == (2, "")
    assert err.startswith("jax-tformer generate: error: ")
    assert ".py" not in err
    assert not any(tmp_path.iterdir())


def test_what_is_exported_is_the_model(run: Path, call: Console) -> None:
    status, out, err = call("export", str(run), "model")
    assert (status, err) == (0, "")
    assert (
        out == f"step 0 of {run} is in model/: config.json, model.safetensors, tokenizer.json, tokenizer_config.json\n"
    )
    params, config = load_weights("model/model.safetensors")
    assert config == RunFolder(run).read_config().model
    assert json.loads(Path("model/config.json").read_text()) == to_dict(config)
    assert list(load_tokenizer("model").encode("It is")) == list(load_tokenizer(run).encode("It is"))
    jax.tree.map(np.testing.assert_array_equal, params, transformer(config).init(jax.random.key(1)))
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("RUN",), "error: PATH is missing: A new or empty folder"),
        (("nowhere", "model"), "nowhere"),
        (("RUN", "full"), "full is there already; expected a new or empty folder"),
        (("RUN", "full/file"), "full/file is there already; expected a new or empty folder"),
        (("RUN", "full/file/model"), "full/file"),
        (("RUN", "/proc/x"), "cannot write to /proc ("),
        (("RUN", "model", "--checkpoint", "last"), "--checkpoint is 'last'; expected newest, best, or the number of"),
        (("RUN", "model", "--checkpoint", "7"), "7"),
    ],
)
def test_an_export_that_cannot_be(arguments: tuple[str, ...], message: str, run: Path, call: Console) -> None:
    Path("full").mkdir()
    Path("full/file").touch()
    status, out, err = call("export", *(argument.replace("RUN", str(run)) for argument in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("jax-tformer export: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(map(str, Path().rglob("*"))) == ["full", "full/file"]


def test_nothing_installed_imports_tests():
    for path in (
        path for room in ("jax_tformer", "torch_ref", "parity", "twin") for path in (ROOT / room).rglob("*.py")
    ):
        assert not re.search(r"^\s*(from|import) (tests|parity_tests)\b", path.read_text(), re.MULTILINE), path
