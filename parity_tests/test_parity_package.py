"""`parity` is a tool for anyone's pair: it knows none of our models, and most of it works without torch."""

import ast
import re
from pathlib import Path

import pytest

import parity
from tests.several_processes import run_alone

ROOT = Path(parity.__file__).parent
OURS = {"jax_tformer", "torch_ref", "parity_tests", "twin", "benchmarks", "tests"}
WITHOUT_TORCH = (
    "gates.measure",
    "gates.pytrees",
    "gates.weight_map",
    "report.page",
    "report.summary_page",
)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.name)
def test_it_imports_nothing_of_ours(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides where it leads"
            imported.add(str(node.module).split(".")[0])
    assert not imported & OURS


def test_what_needs_no_torch_imports_without_it():
    """None of the optional packages either; a module of None is one that cannot be imported."""
    missing = ("torch", "optax", "flax", "equinox", "safetensors", "pytest", "transformers")
    code = f"import sys, importlib; sys.modules.update(dict.fromkeys({missing}))\n"
    code += f"for name in {WITHOUT_TORCH}: importlib.import_module(f'parity.{{name}}')\n"
    code += "from parity import ParityError, Measured, assert_parity\n"
    code += "try: import torch\nexcept ImportError: print('no torch')"
    assert run_alone(["-c", code]) == ["no torch\n", ""]


def test_how_the_first_difference_is_found_names_every_file():
    room = ROOT / "differ"
    named = re.findall(r"`(\w+\.py)`", (room / "README.md").read_text("utf-8"))
    assert set(named) == {path.name for path in room.glob("[!_]*.py")}


def test_every_public_name_is_there():
    for name in parity.__all__:
        assert getattr(parity, name).__doc__, name
    assert set(parity.__all__) == set(parity._HOMES)
    assert dir(parity) == sorted(parity.__all__)
    with pytest.raises(AttributeError, match="module 'parity' has no attribute 'nothing'"):
        parity.nothing  # noqa: B018
