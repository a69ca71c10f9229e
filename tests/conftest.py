"""What several files of tests start from: an empty folder, a finished run."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from jax_tformer import __main__ as console
from jax_tformer.cli import generate, train
from jax_tformer.terminal import run_program
from tests.small_runs import TEXT, TINY, as_input, contents, succeed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def synced(monkeypatch):
    """The files and folders that are on the disk for certain, in their order."""
    paths = []
    monkeypatch.setattr(os, "fsync", lambda file: paths.append(os.readlink(f"/proc/self/fd/{file}")))
    return paths


PROGRAMS = {
    "train.py": partial(run_program, train.main, "train.py"),
    "generate.py": partial(run_program, generate.main, "generate.py"),
    "jax-tformer": console.main,
}


@pytest.fixture
def end_of(folder, monkeypatch, capsys):
    """Runs a program until it ends itself; returns its status, its output and its errors."""

    def run(command, *more, program="train.py", typed=""):
        monkeypatch.setattr(sys, "argv", [program, *command.split(), *more])
        monkeypatch.setattr(sys, "stdin", as_input(typed))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            PROGRAMS[Path(program).name]()
        return stop.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def refuse(folder, end_of):
    """Runs a program that must refuse, with status 2 and one line, and leave the folder as it was; returns the line."""

    def run(command, *more, program="train.py", typed=""):
        before = contents(folder)
        status, output, errors = end_of(command, *more, program=program, typed=typed)
        assert (status, output, errors.count("\n")) == (2, "", 1), errors
        assert re.match(rf"{program}( \w+)?: error: ", errors)
        assert contents(folder) == before
        return errors

    return run


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(TEXT)
    succeed(train, f"text --data.path {folder}/text.txt --run {folder}/run {TINY}")
    return folder


@pytest.fixture
def run(finished, folder):
    """A copy of the finished run, in the current folder."""
    subprocess.run(["cp", "-r", str(finished / "run"), str(finished / "text.txt"), str(folder)], check=True)
    return folder / "run"
