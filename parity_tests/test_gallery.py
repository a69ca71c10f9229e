"""docs/gallery.md: the command names the line of every bug, and nothing where it is mended."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gallery.md").read_text("utf-8")
NAMES = sorted(path.stem for path in (ROOT / "examples" / "gallery").glob("*.py"))
pytestmark = pytest.mark.usefixtures("as_others_write")


@pytest.fixture
def example(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("build_gallery").Example(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_line_of_the_bug_is_named_for_sure(name, example):
    status, said = example.asked(example.text, "--json")
    found = json.loads(said)
    assert (status, found["ours"]["line"], Path(found["ours"]["file"]).stem) == (1, example.bugs[0], name)
    assert found["verdict"].startswith("sure")
    assert f"  JAX      {name}.py:{example.bugs[0]}  " in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_mended_they_are_the_same(example):
    assert example.mended != example.text
    status, said = example.asked(example.mended)
    assert status == 0, said


def test_there_are_enough():
    assert len(NAMES) >= 12
    assert "{{" not in PAGE


@pytest.mark.deep
def test_the_commands_print_what_the_page_says():
    command = [sys.executable, "docs/build_gallery.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
