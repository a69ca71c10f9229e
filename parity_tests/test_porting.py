"""docs/porting.md: its commands print what the page says, and what it shows is in the files."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = (DOCS / "porting.md").read_text("utf-8")


@pytest.fixture
def porting(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return import_module("build_porting")


@pytest.mark.deep
def test_the_commands_print_what_the_page_says():
    command = [sys.executable, "docs/build_porting.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_shows_the_files_and_every_mistake(porting):
    for name in ("module.py", "where.py", "test_opt.py"):
        assert (DOCS / "porting" / name).read_text("utf-8").strip() in PAGE
    for state, (right, wrong) in enumerate(porting.MISTAKES):
        assert wrong in porting.port(state)
        assert right in porting.port(state + 1)
        assert porting.mended(state) in PAGE
    assert porting.port(len(porting.MISTAKES)) == (DOCS / "porting" / "opt.py").read_text("utf-8")
    assert PAGE.count("they part on the way") == 3
    assert "PyTorch: the same" in PAGE
    assert "{{" not in PAGE


def test_the_second_mistake_is_named_by_the_command(porting):
    printed = porting.printed(1, "python where.py")
    assert "another activation: GELU (tanh) in ours, ReLU in theirs" in printed
    assert porting.comparable(printed) in porting.comparable(PAGE)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ("ports 0 no_such", "has no function ['no_such']"),
        ("from 0 NOTHING", "no line that begins with 'NOTHING'"),
        ("run 0 make", "expected a command that begins with python or pytest"),
        ("draw 0", "expected ports, from, file, run or mend"),
    ],
)
def test_what_the_template_asks_wrongly_is_said(ask, said, porting, tmp_path, monkeypatch):
    (tmp_path / "porting.template.md").write_text(f"{{{{{ask}}}}}\n")
    (tmp_path / "porting").symlink_to(DOCS / "porting")
    monkeypatch.setattr(porting, "DOCS", tmp_path)
    errors = []
    assert porting.main([], errors.append) == 1
    assert said in errors[0]
    assert not (tmp_path / "porting.md").exists()
