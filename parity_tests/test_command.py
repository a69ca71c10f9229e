"""`python -m parity find` and `match`, on a small pair in files; `judge` is in test_capsule.py."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from parity import LEFT_OUT, Weight
from parity.__main__ import main, weight_map
from parity_tests.small_modules import numbers

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("as_others_write")
OURS = """
import jax.numpy as jnp

def norm(p, x, eps):
    c = x - x.mean(-1, keepdims=True)
    return c / jnp.sqrt((c * c).mean(-1, keepdims=True) + eps) * p["scale"] + p["shift"]

def block(p, x, eps=1e-5):
    return x + jnp.tanh(norm(p["norm"], x, eps) @ p["up"]["kernel"] + p["up"]["bias"])

def wrong(p, x):
    return block(p, x, 1e-3)

PARAMS = {"norm": {"scale": jnp.ones(4), "shift": jnp.ones(4)}, "up": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
WEIGHTS = {
    "norm.scale": "norm.weight",
    "norm.shift": "norm.bias",
    "up.bias": "up.bias",
    "up.kernel": ("up.weight", "o i -> i o"),
}

class Broken:
    def __init__(self):
        raise SystemExit("no module here")
"""
THEIRS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.up(self.norm(x)))
"""
MAP = {
    "norm.scale": "norm.weight",
    "norm.shift": "norm.bias",
    "up.bias": "up.bias",
    "up.kernel": ["up.weight", "o i -> i o"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.py").write_text(OURS)
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "map.json").write_text(json.dumps(MAP))
    (tmp_path / "bad.json").write_text('{"up.kernel": ')
    x = numbers(5, 4)
    np.savez(tmp_path / "batch.npz", arg0=x)
    np.savez(tmp_path / "named.npz", x=x)
    np.savez(tmp_path / "objects.npz", arg0=np.array([{}], object))
    np.savez(tmp_path / "params.npz", **{"norm.scale": x[0], "norm.shift": x[0], "up.kernel": x[:4], "up.bias": x[0]})
    return tmp_path


FIND = ["find", "ours.py:block", "theirs.py:Block", "--weights", "map.json", "--inputs", "batch.npz"]


def asked(*changed):
    """FIND with other words in the places of some."""
    new = dict(zip(changed[::2], changed[1::2], strict=True))
    return [new.pop(word, word) for word in FIND] + [word for pair in new.items() for word in pair if word]


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (FIND, 0, "the same\n"),
        (asked("map.json", "ours.py:WEIGHTS", "batch.npz", "named.npz"), 0, "the same\n"),
        (asked("ours.py:block", "ours.py:wrong"), 1, "JAX      ours.py:6  return c / jnp.sqrt("),
        (asked("ours.py:block", "ours.py:wrong"), 1, "           add, wrong -> block -> norm\n"),
        (
            asked("ours.py:block", "ours.py:wrong", "--ignore", "epsilon"),
            0,
            "the same (ignored: ours.py:6 (epsilon))\n",
        ),
        (asked("ours.py:block", "ours.py:wrong", "--bar", "0.1", "--no-backward", ""), 0, "the same\n"),
        (asked("--params", "params.npz"), 1, "they differ in their weights"),
    ],
)
def test_find_says_where_they_part(folder, capsys, given, status, said):
    assert main(given) == status
    assert said in capsys.readouterr().out


def test_find_prints_json(folder, capsys):
    assert main([*asked("ours.py:block", "ours.py:wrong"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["stage"], found["ours"]["chain"]) == ("forward", ["wrong", "block", "norm"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (asked("map.json", "bad.json"), "bad.json: JSONDecodeError: Expecting value"),
        (asked("map.json", "none.json"), "none.json: FileNotFoundError"),
        (asked("batch.npz", "objects.npz"), "objects.npz: ValueError: Object arrays cannot be loaded"),
        (asked("batch.npz", "map.json"), "'map.json' names nothing; expected MODULE:NAME or FILE.py:NAME"),
        (asked("theirs.py:Block", "theirs.py:Black"), "theirs.py:Black: AttributeError"),
        (asked("theirs.py:Block", "ours.py:Broken"), "ours.py:Broken: SystemExit: no module here"),
        (asked("theirs.py:Block", "ours.py:block"), "theirs is a function; expected a torch.nn.Module"),
        (["match", "params.npz", "theirs.py:Block", "--inputs", "batch.npz"], "inputs without ours"),
        (["match", "params.npz", "theirs.py:Block", "--out", "map.json"], "File exists: 'map.json'"),
    ],
)
def test_what_cannot_be_compared_is_one_line(folder, capsys, given, said):
    assert main(given) == 2
    line = capsys.readouterr().err
    assert said in line
    assert len(line.splitlines()) == 1
    assert json.loads((folder / "map.json").read_text()) == MAP


def test_find_reads_what_match_writes(folder, capsys):
    given = ["match", "ours.py:PARAMS", "theirs.py:Block", "--ours", "ours.py:block", "--inputs", "batch.npz"]
    assert main([*given, "--out", "new.json"]) == 0
    assert "4 rows, 0 unsure; verified" in capsys.readouterr().out
    assert main(asked("map.json", "new.json")) == 0


def test_every_row_of_a_map_can_be_written(tmp_path):
    rows = {
        "q": Weight("qkv", "(p o) i -> p i o", {"p": 3}, {"p": 0}),
        "up": ("up", "o i -> i o"),
        "b": "b",
        "kept": None,
        "kv": [Weight("k", "o i -> i (n o)", into={"n": (0, 1)}), Weight("v", "o i -> i (n o)", into={"n": 1})],
    }
    given = {"q": ["qkv", "(p o) i -> p i o", {"p": 3}, {"p": 0}], "up": ["up", "o i -> i o"], "b": "b", "kept": None}
    given["kv"] = [["k", "o i -> i (n o)", {}, {}, {"n": [0, 1]}], ["v", "o i -> i (n o)", {}, {}, {"n": 1}]]
    (tmp_path / "map.json").write_text(
        json.dumps(given | {LEFT_OUT: ["pooler", ["table", "v d -> v d", {}, {"v": [5, 9]}]]})
    )
    left_out = ["pooler", Weight("table", "v d -> v d", {}, {"v": (5, 9)})]
    assert weight_map(tmp_path / "map.json") == rows | {"up": Weight(*rows["up"]), LEFT_OUT: left_out}


def test_the_commands_of_the_manual_print_what_it_says(tmp_path, monkeypatch, capsys):
    """examples/port with another epsilon."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    port = (ROOT / "examples" / "port" / "port.py").read_text("utf-8")
    (tmp_path / "port.py").write_text(port.replace("+ 1e-5)", "+ 1e-6)"))
    (tmp_path / "reference.py").write_text((ROOT / "examples" / "port" / "reference.py").read_text("utf-8"))
    np.savez(tmp_path / "batch.npz", arg0=numbers(8, 16))
    section = (ROOT / "docs" / "parity-howto.md").read_text("utf-8").partition("## From a shell")[2]
    printed = ""
    for command in re.findall(r"^\$ python -m parity (.*)$", section, re.MULTILINE):
        main(command.split())
        printed += f"$ python -m parity {command}\n{capsys.readouterr().out}"
    assert printed.count("find") == 2
    assert printed in section, printed
