"""docs/porting.md: what it shows is in the files, and its mends take one mistake after the other out of the port."""

import re
from importlib import import_module
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "porting.md").read_text("utf-8")


@pytest.fixture
def rerun(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return import_module("rerun")


def test_the_page_shows_the_files_as_they_are_then(rerun):
    texts = [path.read_text("utf-8") for path in (DOCS / "porting").glob("*.py")]
    shown = [*re.finditer(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
    assert len(shown) == 6
    for block in shown:
        assert any(block[1] in rerun.before_mends(text, PAGE[block.end() :]) for text in texts), block[1]


def test_every_mend_is_one_of_the_port(rerun):
    port = (DOCS / "porting" / "opt.py").read_text("utf-8")
    mends = [*rerun.MEND.finditer(PAGE)]
    states = [rerun.before_mends(port, PAGE[at:]) for at in (0, *(mend.end() for mend in mends))]
    assert len({*states}) == len(mends) + 1 == 4
    assert states[-1] == port
    assert PAGE.count("they part on the way") == 3
    assert "PyTorch: the same" in PAGE


def test_the_second_mistake_is_named_by_the_command(rerun):
    first = rerun.MEND.search(PAGE)
    said = rerun.run("python where.py", "porting", PAGE[first.end() :])
    assert "another activation: GELU (tanh) in ours, ReLU in theirs" in said
    assert "\n".join(rerun.comparable(said)) in "\n".join(rerun.comparable(PAGE))
