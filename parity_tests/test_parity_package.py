"""`parity` is a tool for anyone's pair: most of it works without torch, and what it offers is documented."""

import re
from pathlib import Path

import pytest

import parity
from tests.several_processes import run_alone

ROOT = Path(parity.__file__).parent
WITHOUT_TORCH = (
    "gates.measure",
    "gates.pytrees",
    "gates.weight_map",
    "report.page",
    "report.summary_page",
)


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
