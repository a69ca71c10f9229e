"""docs/walkthrough.md says what the sources say, shapes included, and its drawing has the model's own names."""

import inspect
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_tformer import ARCHITECTURES, StackConfig, TransformerConfig
from jax_tformer.functional import EncoderDecoderTransformer
from jax_tformer.training.step import batch_loss
from tests.several_processes import ROOT
from tests.small_models import GPT, STACK
from tests.speaking import write_runs

PAGE = (ROOT / "docs" / "walkthrough.md").read_text("utf-8")
AXES = {"B": 3, "T": 5, "S": 7, "D": 32, "H": 8, "K": 2, "C": 4, "F": 40, "V": 31, "L": 6}
"""A length for each letter, no two alike."""


def drifted(page):
    """The code of the page that does not stand in the function that it names: lines in a row, but where ... stands."""
    found = []
    for links, code in re.findall(r"^(\w[^\n]*\.py\))\n\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        files = {part.partition(" [")[0]: re.findall(r"\.\./(.+?)\.py\)", part) for part in links.split(" · ")}
        for sides, name, snippet in re.findall(r"^# (.+?): (\S+)\n(.*?)\n(?=\n# |\Z)", code, re.MULTILINE | re.DOTALL):
            for side in sides.split(" and "):
                modules = [import_module(file.replace("/", ".")) for file in files[side]]
                if not any(stands(snippet, module, name) for module in modules):
                    found.append(f"{side}: {name}")
    return found


def stands(snippet, module, name):
    try:
        function = attrgetter(name)(module)
    except AttributeError:
        return False
    if isinstance(function, type):
        function = vars(function).get("__call__") or function.forward
    lines = [line.strip() for line in inspect.getsource(inspect.unwrap(function)).splitlines()]
    pieces = [[line.strip() for line in piece.splitlines()] for piece in snippet.split("\n...\n")]
    at = 0
    for piece in pieces:
        starts = [n for n in range(at, len(lines)) if lines[n : n + len(piece)] == piece]
        if not starts:
            return False
        at = starts[0] + len(piece)
    return True


def test_the_code_of_the_page_is_that_of_the_sources():
    assert not drifted(PAGE)
    assert PAGE.count("\n# JAX") + PAGE.count("\n# PyTorch") > 40


@pytest.mark.parametrize(
    "old, new, named",
    [
        ("norm(x + h)", "norm(h + x)", ["JAX: Block._add", "PyTorch: Block._add"]),
        ("self.query(x, dropout_key)", "self.query(x * 2, dropout_key)", ["JAX: Attention"]),
        ("# PyTorch: sinusoidal", "# PyTorch: waves", ["PyTorch: waves"]),
        ("# JAX: angles\n", "# JAX: angles\nreturn 0\n...\n", ["JAX: angles"]),
    ],
)
def test_code_that_has_drifted_is_named(old, new, named):
    assert old in PAGE
    assert drifted(PAGE.replace(old, new)) == named


def test_the_stated_shapes_are_those_of_a_forward_pass(monkeypatch):
    stack = StackConfig(AXES["L"], AXES["H"], AXES["F"], key_value_heads=AXES["K"])
    net = EncoderDecoderTransformer(TransformerConfig(AXES["V"], AXES["D"], encoder=stack, decoder=stack))
    batch = {name: jnp.ones((AXES["B"], AXES[axis]), int) for name, axis in (("source", "S"), ("target", "T"))}
    batch["labels"], found = batch["target"], {}

    def recorded(call):
        def called(self, *args, **kwargs):
            result = call(self, *args, **kwargs)
            found[self.place] = jax.tree.leaves(result)[0]
            return result

        return called

    monkeypatch.setattr(nnx.Module, "place", "", raising=False)
    for kind in {type(module) for _, module in nnx.iter_modules(net.bind(net.shapes))}:
        if "__call__" in vars(kind):
            monkeypatch.setattr(kind, "__call__", recorded(kind.__call__))

    def run(params):
        model = net.bind(params)
        for place, module in nnx.iter_modules(model):
            module.place = ".".join(map(str, place))
        return model(batch["source"], batch["target"], capture=True), batch_loss(net, params, batch)[0]

    outputs, loss = jax.eval_shape(run, net.shapes)
    told = SimpleNamespace(outputs=outputs, loss=loss, **batch)
    stated = re.findall(r"`([\w.]+)` (?:is|gives) `\[([A-Z, ]*)\]`", PAGE)
    assert len(stated) == PAGE.count("is `[") + PAGE.count("gives `[") >= 18
    for name, axes in stated:
        array = found[name] if name in found else attrgetter(name)(told)
        assert array.shape == tuple(AXES[axis] for axis in axes.split(", ") if axis), name


def test_the_drawing_has_the_names_of_the_parts():
    net = EncoderDecoderTransformer(replace(GPT, encoder=STACK))
    places = [str(place[-1]) for place, _ in nnx.iter_modules(net.bind(net.shapes)) if place]
    drawn = re.findall(r'class="name">([^<]+)<', (ROOT / "docs" / "architecture.svg").read_text("utf-8"))
    assert len(drawn) == 15
    assert set(drawn) <= set(places)
    attentions = [[name for name in names if name.endswith("attention")] for names in (places, drawn)]
    assert sorted(attentions[0]) == sorted(attentions[1])


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
    out = tmp_path / "attention.svg"
    for run, layer, said in (
        ("text", "0", "no cross-attention"),
        ("pairs", "1", "expected 0 to 0"),
        ("pairs", "0", ""),
    ):
        arguments = ["draw_attention.py", str(tmp_path / run), "so 1", "--out", str(out), "--layer", layer]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit, match="2") if said else nullcontext():
            import_module("draw_attention").main()
        assert said in capsys.readouterr().err
        assert out.exists() == (not said)
    texts = [element.text for element in ElementTree.parse(out).iter() if element.tag.endswith("text")]
    assert texts[:5] == ["s", "o", "␣", "1", "end"]
    assert len(texts) > 5
