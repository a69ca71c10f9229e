"""What an adopter meets first: names, descriptions, a model in a few lines, the licence."""

import ast
import inspect
import itertools
import re
import textwrap
import tomllib
from pathlib import Path

import pytest
import tyro
import yaml

import jax_tformer
from jax_tformer import ARCHITECTURES, DecodingConfig, StackConfig, TransformerConfig, transformer
from jax_tformer.config import ComputeConfig, DropoutConfig
from jax_tformer.config.experiment import (
    MaskedTextData,
    MeshConfig,
    OptimizerConfig,
    PairData,
    SampleConfig,
    TokenizerConfig,
    TrainingConfig,
)

ROOT = Path(__file__).parents[1]


def test_names_that_are_resolved_late_are_listed():
    listed = dir(jax_tformer)
    assert set(jax_tformer.__all__) <= set(listed)
    assert {"__doc__", "__version__", "config"} <= set(listed)
    assert not {"Any", "TYPE_CHECKING", "import_module"} & set(listed)
    assert jax_tformer.__all__ == sorted(jax_tformer._HOMES, key=lambda name: (not name.isupper(), name))


@pytest.mark.parametrize(
    "kind",
    [
        TransformerConfig,
        StackConfig,
        DropoutConfig,
        ComputeConfig,
        DecodingConfig,
        TokenizerConfig,
        MaskedTextData,
        PairData,
        OptimizerConfig,
        TrainingConfig,
        SampleConfig,
        MeshConfig,
    ],
)
def test_every_field_is_described(kind):
    for parent in kind.__mro__[:-1]:
        # What stands below each field in the source, which --help and the site show.
        pairs = itertools.pairwise(ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0].body)
        below = {line.target.id: text.value.value for line, text in pairs if isinstance(line, ast.AnnAssign)}
        assert list(below) == list(parent.__annotations__)
        assert all(text.endswith((".", ")")) for text in below.values())


def test_help_says_what_fields_are(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(MaskedTextData, args=["--help"])
    shown = capsys.readouterr().out
    assert "Fraction of tokens to restore" in shown
    assert "T, tokens per window." in shown, "of the class that it is from"


def test_a_model_shows_its_shape():
    stack = StackConfig(3, 4, 20, key_value_heads=2, activation="silu", gated=True, positions="rotary")
    net = transformer(TransformerConfig(11, 16, encoder=StackConfig(2, 2, 24, positions="none"), decoder=stack))
    lines = repr(net).splitlines()
    assert (lines[0], lines[-1]) == ("EncoderDecoderTransformer(", ")")
    assert lines[1] == "  encoder: 2 layers of 16, 2 heads of 8, feed-forward 24 relu, post-layernorm, no positions"
    assert "3 layers of 16, 4 heads of 4 (2 of keys and values), gated feed-forward 20 silu" in lines[2]
    assert lines[3] == "  head: linear, 11 tokens"
    assert lines[4] == "  parameters in float32, computed in float32"
    # A layer: projections 272 + 136 + 136 + 272, feed-forward 3 x 320 + 56, norms 32 each; of the encoder 1,960.
    assert lines[5].startswith("  12,680 parameters: decoder 8,232, encoder 3,920, ")


def test_the_summary_counts_every_parameter():
    summary = transformer(ARCHITECTURES["gpt2"]).summary().splitlines()
    cells = {line.split()[0]: line.split() for line in summary if line}
    assert "1,024 learned positions" in summary[0]
    assert "tied to the token table" in summary[1]
    assert cells["embedding.tokens.embedding"][1:] == ["[50257,", "768]", "38,597,376", "154,389,504"]
    assert cells["decoder"][1:] == ["85,056,000", "340,224,000"]
    assert cells["all"][1:] == ["124,439,808", "497,759,232"]
    numbers = [int(line.split()[-2].replace(",", "")) for line in summary if "[" in line]
    assert sum(numbers) == 124_439_808


def test_the_licence_is_said_alike_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert citation["version"] == jax_tformer.__version__
    assert all((ROOT / package / "py.typed").exists() for package in ("jax_tformer", "torch_ref"))


def test_contributors_are_sent_to_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"(?<=[`\s])((?:[\w.]+/)+(?:[\w.]+\.(?:py|md)|run)?|[\w.]+\.(?:py|md|txt))(?=[`\s])", text)
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_actions_of_the_workflow_are_commits():
    used = re.findall(r"uses: (.*)", (ROOT / ".github/workflows/parity.yml").read_text())
    assert len(used) >= 3
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v[\d.]+", action) for action in used)


# torch, whose builds come from several places, and what depends on it.
WITHOUT_HASHES = ("torch", "accelerate", "peft")


def test_every_constraint_but_torch_has_its_hashes_and_nothing_says_where_from():
    wanted = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    first, *lines = (ROOT / "constraints-hashes.txt").read_text().splitlines()
    assert first.startswith("# ")
    hashed = {}
    for line in lines:
        if found := re.fullmatch(r"([\w.-]+==\S+) \\", line):
            hashed[found[1]] = []
        else:
            # Anything else, such as the address of an index, is no hash.
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
            hashed[next(reversed(hashed))].append(line)
    names = {
        re.sub(r"[_.]", "-", name).lower() + "==" + version for name, version in wanted if name not in WITHOUT_HASHES
    }
    assert {name.replace("_", "-") for name in hashed} == names
    assert all(hashed.values())


def test_nothing_installed_imports_tests():
    rooms = [ROOT / room for room in ("jax_tformer", "torch_ref", "parity", "twin")]
    for path in (path for room in rooms for path in room.rglob("*.py")):
        assert not re.search(r"^\s*(from|import) (tests|parity_tests)\b", path.read_text(), re.MULTILINE), path
