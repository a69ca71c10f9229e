"""What several files of tests start from: an empty folder, a finished run, checkpoints of three steps."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jax_tformer.cli import generate, train
from jax_tformer.runs.checkpoints import Checkpoints
from jax_tformer.terminal import run_program
from tests.checkpoint_states import save_all
from tests.small_runs import TEXT, TINY, Refuse, contents


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refuse(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Runs a program that must refuse, with status 2 and one line, and leave the folder as it was; returns the line."""

    def run(*arguments: str, program: str = "train.py") -> str:
        before = contents(folder)
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run_program(train.main if program == "train.py" else generate.main, program)
        output = capsys.readouterr()
        assert stop.value.code == 2, output
        assert output.err.startswith(f"{program}: error: ")
        assert output.err.count("\n") == 1, output.err
        assert output.out == ""
        assert contents(folder) == before
        return output.err

    return run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(TEXT)
    assert train.main(["text", "--data.path", str(folder / "text.txt"), "--run", str(folder / "run"), *TINY]) == 0
    return folder


@pytest.fixture
def run(finished: Path, folder: Path) -> Path:
    """A copy of the finished run, in the current folder."""
    subprocess.run(["cp", "-r", str(finished / "run"), str(finished / "text.txt"), str(folder)], check=True)
    return folder / "run"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "checkpoints"
    save_all(folder, 10, 20, 30)
    return folder


@pytest.fixture
def saved(template: Path, tmp_path: Path) -> Path:
    """A folder with intact steps 10, 20 and 30."""
    return Path(shutil.copytree(template, tmp_path / "run" / "checkpoints"))


@pytest.fixture
def open_checkpoints() -> Iterator[Callable[..., Checkpoints]]:
    opened: list[Checkpoints] = []

    def open_(folder: Path, keep: int = 9) -> Checkpoints:
        opened.append(Checkpoints(folder, keep))
        return opened[-1]

    yield open_
    for checkpoints in opened:
        checkpoints.close()
