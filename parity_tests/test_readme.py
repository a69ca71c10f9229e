"""The code in the README and on the pages of docs/ runs, and the commands and files that they name exist."""

import re
import shlex
from importlib.util import find_spec

import jax
import pytest

from jax_tformer.__main__ import PROGRAMS
from jax_tformer.config.presets import ARCHITECTURES, EXPERIMENTS
from parity import ParityError
from parity_tests.test_pretrained import saved
from tests.several_processes import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
README = PAGES["README.md"]
RUN_ELSEWHERE = {
    "docs/adding-a-family.md": "sketches of files, with ... in them",
    "docs/from-flax.md": "run by test_from_flax.py, which makes the folders of Flax",
    "docs/known-issues.md": "a line that gave NaN",
    "docs/parity-howto.md": "what prints is run below, the rest by tests of what its section is about",
    "docs/porting.md": "of the files in docs/porting, which rerun.py runs; test_porting.py",
    "docs/walkthrough.md": "lines of the sources, as test_walkthrough.py sees to",
}


def blocks(page):
    """The Python of a page."""
    return re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)


def run(code, page, names=None):
    with jax.numpy_rank_promotion("allow"):  # as users have it
        exec(compile(code, page, "exec"), {} if names is None else names)


@pytest.mark.parametrize(
    "page, block",
    [
        pytest.param(page, block, id=f"{page} {i}")
        for page in PAGES
        if page not in RUN_ELSEWHERE
        for i, block in enumerate(blocks(page), 1)
        if not block.startswith('"""')  # a file shown whole: docs/one_page.py, which has a test
    ],
)
def test_code_runs(page, block, own_folder):
    if 'load_pretrained("gpt2")' in block:
        saved("gpt2", "gpt2", dtype="float32")
    run(block, page)
    assert "assert" in block, "a block that asserts nothing could print anything"


PRINTING = r"```python\n((?:(?!```).)*print\(.*?)```.*?```\n(.*?)```"
"""Code that prints, and the next block, which should be what it prints."""


@pytest.mark.parametrize("code, printed", re.findall(PRINTING, PAGES["docs/parity-howto.md"], re.DOTALL))
def test_code_prints_what_stands_below_it(code, printed, capsys):
    run(code, "docs/parity-howto.md")
    rounding = r"\d\.\d+e-1\d( <= 1e-12 .*)?"
    assert re.sub(rounding, "", capsys.readouterr().out) == re.sub(rounding, "", printed)


@pytest.mark.parametrize("page", RUN_ELSEWHERE)
def test_pages_that_are_left_out_have_code(page):
    assert blocks(page)


def test_a_mistake_in_the_pair_is_told_as_written():
    """The tutorial says what check_parity says where one side takes the other GELU."""
    page = "docs/parity-tutorial.md"
    [block] = [block for block in blocks(page) if "check_parity" in block]
    said = re.search(r"With `(approximate=True)` it reports `(.*?)`", PAGES[page].replace("\n", " "))
    assert said
    pattern = re.escape(said[2]).replace(re.escape("..."), r"\S+").replace(r"\ >\ ", r" > +")
    # Where the two part follows, as a note.
    with pytest.raises(ParityError, match=f"(?m){pattern}$"):
        run(block.replace("approximate=False", said[1]), page)


def test_nothing_is_left_to_fill_in():
    assert not [page for page, text in PAGES.items() if re.search(r"@@|TODO|XXX|FIXME", text)]


def test_there_is_code_for_each_architecture():
    code = "\n".join(blocks("README.md"))
    assert len(blocks("README.md")) >= 4
    assert len(README.splitlines()) <= 200
    for stacks in ("encoder=", "decoder="):
        assert stacks in code


def test_every_figure_of_speed_names_its_processor():
    """Speeds of one vendor's processor say little about the other's: each part with figures says whose they are."""
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    parts = re.split(r"^#+ (.*)\n", text, flags=re.MULTILINE)
    measured = {
        title: part for title, part in zip(parts[1::2], parts[2::2], strict=True) if re.search(r"\d ?(ms|s|MB)\b", part)
    }
    assert len(measured) > 8
    assert [title for title, part in measured.items() if not re.search("EPYC|Xeon|TPU|H200", part)] == []
    # Every table, too, but that of the commands: in the lines right above it, or in its own heading.
    tables = re.findall(r"((?:^[^|\n#].*\n)+)\n(\|.*)\n\|[-|]+\n", text, re.MULTILINE)
    assert len(tables) > 10
    unsaid = [head for above, head in tables if not re.search("EPYC|Xeon|TPU|H200", above + head)]
    assert [head for head in unsaid if "command | question" not in head] == []
    results = PAGES["docs/results.md"]
    for line in ("AMD EPYC: ours", "Intel Xeon (AVX-512): speed", "AMD EPYC, batch 1", "Intel Xeon, batch 1"):
        assert line in results
    for page in (README, results):
        assert "PyTorch trains three of the four models faster" in " ".join(page.split())


@pytest.mark.parametrize("page", [*PAGES, "llms.txt"])
def test_links_lead_somewhere(page):
    """Files and headings; `make docs` says it of the pages of docs/ among each other."""
    for target, place in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", (ROOT / page).read_text("utf-8")):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), target
        titles = re.findall(r"^#+ (.*)", file.read_text("utf-8"), re.MULTILINE) if place else []
        assert not place or place in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page):
    """Programs, modules, targets of make and experiments, in the blocks without a language."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for language, block in re.findall(r"^```(.*?)\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if language or not re.match(r"(\$ )?(make|python|jax-tformer) ", line):
                continue
            program, *rest = shlex.split(line.removeprefix("$ "), comments=True)
            if program == "make":
                assert not rest or rest[0] in targets, line
            elif program == "jax-tformer":
                assert rest[0] in PROGRAMS, line
            elif rest[0] == "-m":
                assert find_spec(rest[1]), line
            elif page != "docs/porting.md":  # its programs are in docs/porting
                assert (ROOT / rest[0]).exists(), line
                named = rest[1:2] if rest[0] in ("train.py", "compare.py") else []
                assert not named or named[0].startswith("--") or named[0] in EXPERIMENTS, line


def test_the_site_and_llms_txt_have_all_pages():
    listed = (ROOT / "llms.txt").read_text("utf-8")
    for page in PAGES:
        name = page.removeprefix("docs/").removesuffix(".md")
        assert f"]({page})" in listed or name == "index" or name.startswith("api/"), page
        assert re.search(rf"^{name}$", PAGES["docs/index.md"], re.MULTILINE) or name in ("README", "index"), page


@pytest.mark.parametrize("name", [*ARCHITECTURES, *EXPERIMENTS])
def test_every_preset_is_named(name):
    assert f"`{name}`" in PAGES["docs/architectures.md"] + PAGES["docs/training.md"]
