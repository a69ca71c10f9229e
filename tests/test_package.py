"""What an adopter meets first: names, descriptions, a model in a few lines, the licence."""

import ast
import inspect
import itertools
import re

import pytest
import tyro

import jax_tformer
from jax_tformer import ARCHITECTURES, StackConfig, TransformerConfig, config, transformer
from jax_tformer.config import experiment
from jax_tformer.config.experiment import MaskedTextData
from tests.several_processes import ROOT


def test_names_that_are_resolved_late_are_listed():
    listed = dir(jax_tformer)
    assert set(jax_tformer.__all__) <= set(listed)
    assert {"__doc__", "__version__", "config"} <= set(listed)
    assert not {"Any", "TYPE_CHECKING", "import_module"} & set(listed)
    assert jax_tformer.__all__ == sorted(jax_tformer._HOMES, key=lambda name: (not name.isupper(), name))


@pytest.mark.parametrize("module", [config, experiment])
def test_every_field_is_described(module):
    """By the text below it in the source, which --help and the site show."""
    kinds = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    # The fields of an experiment are configs, which describe themselves.
    kinds = [kind for kind in kinds if kind.name != "ExperimentConfig"]
    for kind in kinds:
        pairs = [pair for pair in itertools.pairwise(kind.body) if isinstance(pair[0], ast.AnnAssign)]
        assert all(text.value.value.endswith((".", ")")) for _, text in pairs), kind.name
    assert len(kinds) > 5


def test_help_says_what_fields_are(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(MaskedTextData, args=["--help"])
    shown = capsys.readouterr().out
    assert "Fraction of tokens to restore" in shown
    assert "T, tokens per window." in shown, "of the class that it is from"


def test_a_model_shows_its_shape():
    stack = StackConfig(3, 4, 20, key_value_heads=2, activation="silu", gated=True, positions="rotary")
    net = transformer(TransformerConfig(11, 16, encoder=StackConfig(2, 2, 24, positions="none"), decoder=stack))
    assert repr(net).splitlines()[1:5] == [
        "  encoder: 2 layers of 16, 2 heads of 8, feed-forward 24 relu, post-layernorm, no positions",
        "  decoder: 3 layers of 16, 4 heads of 4 (2 of keys and values), gated feed-forward 20 silu, post-layernorm, "
        "rotary positions",
        "  head: linear, 11 tokens",
        "  parameters in float32, computed in float32",
    ]
    summary = transformer(ARCHITECTURES["gpt2"]).summary().splitlines()
    cells = {line.split()[0]: line.split() for line in summary if line}
    assert "1,024 learned positions" in summary[0]
    assert "tied to the token table" in summary[1]
    assert cells["embedding.tokens.embedding"][1:] == ["[50257,", "768]", "38,597,376", "154,389,504"]
    assert cells["all"][1:] == ["124,439,808", "497,759,232"]
    assert sum(int(line.split()[-2].replace(",", "")) for line in summary if "[" in line) == 124_439_808


def test_contributors_are_sent_to_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"(?<=[`\s])((?:[\w.]+/)+(?:[\w.]+\.(?:py|md)|run)?|[\w.]+\.(?:py|md|txt))(?=[`\s])", text)
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_constraint_but_torch_has_its_hashes_and_nothing_says_where_from():
    wanted = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    # torch's builds come from several places, and these depend on it.
    pinned = {
        (name.replace("_", "-").lower(), at) for name, at in wanted if name not in ("torch", "accelerate", "peft")
    }
    text = (ROOT / "constraints-hashes.txt").read_text()
    # Nothing else, such as the address of an index.
    hashed = r"([\w.-]+)==(\S+) \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
    assert re.fullmatch(rf"# .*\n(?:{hashed})+", text)
    assert {(name.replace("_", "-"), at) for name, at in re.findall(hashed, text)} == pinned


def imports(room):
    """What a package imports, as `module`."""
    texts = (path.read_text() for path in (ROOT / room).rglob("*.py"))
    return {name for text in texts for name in re.findall(r"^\s*(?:from|import) ([\w.]+)", text, re.MULTILINE)}


def test_arrows_between_packages_run_one_way():
    """Nothing installed imports tests; ours knows nothing of torch, the reference of ours the config alone, and parity
    nothing of ours: a relative import, which is of "", would hide where it leads."""
    known = {room: imports(room) for room in ("jax_tformer", "torch_ref", "parity", "twin")}
    roots = {room: {name.split(".")[0] for name in names} for room, names in known.items()}
    assert not set().union(*roots.values()) & {"tests", "parity_tests"}
    assert not roots["jax_tformer"] & {"torch", "torch_ref"}
    assert not roots["torch_ref"] & {"jax", "flax", "optax"}
    assert not roots["parity"] & {"jax_tformer", "torch_ref", "twin", "benchmarks", ""}
    ours = {name for name in known["torch_ref"] if name.startswith("jax_tformer")}
    assert ours == {"jax_tformer.config", "jax_tformer.config.experiment"}
