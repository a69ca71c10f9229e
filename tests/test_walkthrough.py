"""docs/walkthrough.md says what the sources say, shapes included, and its drawing has the model's own names."""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_tformer import ARCHITECTURES, StackConfig, TransformerConfig
from jax_tformer.functional import EncoderDecoderTransformer
from jax_tformer.model import attention, layers, transformer
from jax_tformer.training.step import batch_loss
from tests.speaking import write_runs

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "walkthrough.md").read_text("utf-8")
AXES = {"B": 3, "T": 5, "S": 7, "D": 32, "H": 8, "K": 2, "C": 4, "F": 40, "V": 31, "L": 6}
"""A length for each letter, no two alike."""


def check(root):
    """What the builder says of the walkthrough in a copy of the repository."""
    command = [sys.executable, "docs/build_walkthrough.py", "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_the_page_is_what_the_sources_say():
    assert check(ROOT) == (0, "")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "jax_tformer/model/attention.py",
            "self.query(x, dropout_key)",
            "self.query(x * 2, dropout_key)",
            "walkthrough.md is not",
        ),
        ("torch_ref/blocks.py", "norm(x + h)", "norm(h + x)", "walkthrough.md is not what the sources say"),
        ("jax_tformer/model/masks.py", "distance", "apart", "Mask.boolean: 0 statements begin with 'distance ='"),
        ("torch_ref/embedding.py", "def sinusoidal", "def waves", "0 are called 'sinusoidal'"),
        (
            "torch_ref/embedding.py",
            "def angles",
            "def angles(): ...\ndef angles",
            "2 are called 'angles'; expected one",
        ),
        ("docs/walkthrough.template.md", "](parity.md)", "](proof.md)", "the link proof.md leads nowhere"),
        ("docs/walkthrough.template.md", "](parity.md)", "](#proof)", "the link #proof leads nowhere"),
        (
            "docs/walkthrough.template.md",
            "denominator = jnp.power | return",
            "return | denominator = jnp.power",
            "stands before",
        ),
    ],
)
def test_what_has_drifted_is_named(file, old, new, said, tmp_path):
    for folder in ("docs", "jax_tformer", "torch_ref", "parity_tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "CONTRIBUTING.md", tmp_path)
    text = (tmp_path / file).read_text("utf-8")
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new), "utf-8")
    status, told = check(tmp_path)
    assert status == 1
    assert said in told


def test_the_stated_shapes_are_those_of_a_forward_pass(monkeypatch):
    stack = StackConfig(AXES["L"], AXES["H"], AXES["F"], key_value_heads=AXES["K"])
    net = EncoderDecoderTransformer(TransformerConfig(AXES["V"], AXES["D"], encoder=stack, decoder=stack))
    found = {}

    def recording(call):
        def called(self, *args, **kwargs):
            result = call(self, *args, **kwargs)
            found[self.place] = (result[0] if isinstance(result, tuple) else result).shape
            return result

        return called

    kinds = [kind for module in (layers, attention, transformer) for kind in vars(module).values()]
    for kind in {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, nnx.Module)}:
        if "__call__" in vars(kind):
            monkeypatch.setattr(kind, "__call__", recording(kind.__call__))

    def run(params, batch):
        model = net.bind(params)
        for place, module in nnx.iter_modules(model):
            module.place = ".".join(map(str, place))
        outputs = model(batch["source"], batch["target"], capture=True)
        return outputs, batch_loss(net, params, batch)[0]

    ids = {name: jnp.ones((AXES["B"], AXES[axis]), int) for name, axis in (("source", "S"), ("target", "T"))}
    batch = ids | {"labels": ids["target"]}
    monkeypatch.setattr(nnx.Module, "place", "", raising=False)
    outputs, loss = jax.eval_shape(run, net.shapes, batch)

    def shape(name):
        if name == "loss" or name in batch:
            return loss.shape if name == "loss" else batch[name].shape
        if not name.startswith("outputs."):
            return found[name]
        result = outputs
        for part in name.split(".")[1:]:
            result = getattr(result, part)
        return result.shape

    stated = re.findall(r"`([\w.]+)` (?:is|gives) `\[([A-Z, ]*)\]`", PAGE)
    assert len(stated) == PAGE.count("is `[") + PAGE.count("gives `[") >= 18
    for name, axes in stated:
        assert shape(name) == tuple(AXES[axis] for axis in axes.split(", ") if axis), name


def test_the_drawing_has_the_names_of_the_parts():
    stack = StackConfig(2, 2, 8, norm_placement="pre", final_norm=True)
    net = EncoderDecoderTransformer(TransformerConfig(11, 8, encoder=stack, decoder=stack))
    places = {".".join(map(str, place)) for place, _ in nnx.iter_modules(net.bind(net.init(jax.random.key(0))))}
    drawn = re.findall(r'class="name">([^<]+)<', (ROOT / "docs" / "architecture.svg").read_text("utf-8"))
    assert len(drawn) == 15
    assert {name.rpartition(".")[2] for name in places} >= set(drawn)
    attentions = [name for name in places if name.endswith("attention")]
    assert len(attentions) == sum(name.endswith("attention") for name in drawn)


def test_the_table_of_differences_is_that_of_the_presets():
    [header] = re.findall(r"^\| \| `([\w-]+)`.*`([\w-]+)`.*`([\w-]+)`", PAGE, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 9
    for field, *stated in rows:
        for name, value in zip(header, stated, strict=True):
            config = ARCHITECTURES[name]
            actual = getattr(config if hasattr(config, field) else config.output_stack, field)
            told = {True: "yes", False: "no"}[actual] if isinstance(actual, bool) else str(actual)
            assert told == value, (name, field)


def test_attention_is_drawn_of_any_run_that_has_it(tmp_path, monkeypatch, capsys):
    write_runs(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "docs")
    draw = import_module("draw_attention").main

    def drawn(run, *options):
        out = tmp_path / "attention.svg"
        monkeypatch.setattr(
            sys, "argv", ["draw_attention.py", str(tmp_path / run), "so 1", "--out", str(out), *options]
        )
        draw()
        return out

    for run, options, said in (("text", (), "no cross-attention"), ("pairs", ("--layer", "1"), "expected 0 to 0")):
        with pytest.raises(SystemExit, match="2"):
            drawn(run, *options)
        assert said in capsys.readouterr().err
        assert not (tmp_path / "attention.svg").exists()
    texts = [element.text for element in ElementTree.parse(drawn("pairs")).iter() if element.tag.endswith("text")]
    assert texts[:5] == ["s", "o", "␣", "1", "end"]
    assert len(texts) > 5
