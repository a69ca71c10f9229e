"""docs/gallery.md: the command names the line of every bug, and nothing where it is mended."""

import json
import re
from pathlib import Path

import pytest

from parity.__main__ import main as parity
from tests.several_processes import ROOT, run_alone

PAGE = (ROOT / "docs" / "gallery.md").read_text("utf-8")
TEXTS = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "examples" / "gallery").glob("*.py"))}
BUG = re.compile(r"^( *)# The bug\. Mended: (.*)\n *(.*)$", re.MULTILINE)
MORE_BEHIND = {"gemma_block", "transposed_convolution"}
"""A second bug, and a kernel that is turned beside what is said of it: a side without what was found parts again."""
pytestmark = pytest.mark.usefixtures("as_others_write")


@pytest.fixture
def find(own_folder, capsys):
    """Runs the page's command with this text in the file: its status, and what it prints."""

    def find(name, text, *more):
        Path(f"{name}.py").write_text(text, "utf-8")
        [command] = re.findall(rf"^\$ python -m parity (find {name}\.py:ours .*)$", PAGE, re.MULTILINE)
        return parity([*command.split(), *more]), capsys.readouterr().out

    return find


@pytest.mark.parametrize("name", TEXTS)
def test_the_line_of_the_bug_is_named_and_trusted(name, find):
    bug, *more = BUG.finditer(TEXTS[name])
    line = TEXTS[name].count("\n", 0, bug.end()) + 1
    status, said = find(name, TEXTS[name], "--json")
    found = json.loads(said)
    assert (status, found["ours"]["line"], Path(found["ours"]["file"]).stem) == (1, line, name)
    assert found["verdict"].startswith("likely" if name in MORE_BEHIND else "sure")
    assert f"  JAX      {name}.py:{line}  " in PAGE
    mend = "\n".join(f"-{wrong}\n+{right}" for _, right, wrong in (each.groups() for each in (bug, *more)))
    assert f"(../examples/gallery/{name}.py):\n\n```diff\n{mend}\n```" in PAGE


@pytest.mark.parametrize("name", TEXTS)
def test_mended_they_are_the_same(name, find):
    status, said = find(name, BUG.sub(r"\1\2", TEXTS[name]))
    assert status == 0, said


def test_there_are_enough():
    assert len(TEXTS) >= 12


@pytest.mark.deep
@pytest.mark.parametrize("page", ["gallery", "porting"])
def test_the_commands_print_what_the_page_says(page):
    run_alone(["docs/rerun.py", "--check", page], cwd=ROOT)
