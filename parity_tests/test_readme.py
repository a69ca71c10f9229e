"""The code in the README runs, and the commands and files that it names exist."""

import re
from pathlib import Path

import pytest

from jax_tformer.presets import ARCHITECTURES, EXPERIMENTS
from parity_tests import ParityError
from parity_tests.test_pretrained import saved

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {i}" for i in range(1, len(BLOCKS) + 1)])
def test_code_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if 'load_pretrained("gpt2")' in block:
        saved("gpt2", tmp_path / "gpt2", dtype="float32")
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert "assert" in block, "a block that asserts nothing could print anything"


def test_a_mistake_in_the_pair_is_told_as_written() -> None:
    """README says what check_parity says where one side takes the other GELU."""
    [block] = [block for block in BLOCKS if "check_parity" in block]
    said = re.search(r"With `(approximate=True)` it reports `(.*?)`", README.replace("\n", " "))
    assert said
    pattern = re.escape(said[2]).replace(re.escape("..."), r"\S+").replace(r"\ >\ ", r" > +")
    # Where the two part follows, as a note.
    with pytest.raises(ParityError, match=f"(?m){pattern}$"):
        exec(compile(block.replace("approximate=False", said[1]), "README.md", "exec"), {})


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.search(r"@@|TODO|XXX|FIXME", README)


def test_there_is_code_for_each_architecture() -> None:
    code = "\n".join(BLOCKS)
    assert len(BLOCKS) >= 4
    for stacks in ("encoder=", "decoder="):
        assert stacks in code


def test_every_figure_of_speed_names_its_processor() -> None:
    """Speeds of one vendor's processor say little about the other's: each part with figures says whose they are."""
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    parts = re.split(r"^#+ (.*)\n", text, flags=re.MULTILINE)
    measured = {
        title: part for title, part in zip(parts[1::2], parts[2::2], strict=True) if re.search(r"\d ?(ms|s|MB)\b", part)
    }
    assert len(measured) > 8
    assert [title for title, part in measured.items() if not re.search("EPYC|Xeon|TPU", part)] == []
    # Every table, too, but that of the commands: in the lines right above it, or in its own heading.
    tables = re.findall(r"((?:^[^|\n#].*\n)+)\n(\|.*)\n\|[-|]+\n", text, re.MULTILINE)
    assert len(tables) > 10
    unsaid = [head for above, head in tables if not re.search("EPYC|Xeon|TPU", above + head)]
    assert [head for head in unsaid if "command | question" not in head] == []
    [results] = re.findall(r"^## Results\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    for line in ("AMD EPYC: ours", "Intel Xeon (AVX-512): speed", "AMD EPYC, batch 1", "Intel Xeon, batch 1"):
        assert line in results
    assert "PyTorch trains three of the four models faster" in " ".join(results.split())


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("name", [*ARCHITECTURES, *EXPERIMENTS])
def test_every_preset_is_named(name: str) -> None:
    assert f"`{name}`" in README
