"""`python -m parity find` and `match`, on a small pair in files; `judge` is in test_capsule.py."""

import re
from pathlib import Path

import numpy as np
import pytest

from parity import LEFT_OUT, Weight
from parity.__main__ import main, weight_map
from parity_tests.small_modules import numbers
from tests.several_processes import ROOT

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

def whole(p, x):
    return x > 0

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
MAP = """{
    "norm.scale": "norm.weight",
    "norm.shift": "norm.bias",
    "up.bias": "up.bias",
    "up.kernel": ["up.weight", "o i -> i o"]
}"""


@pytest.fixture
def folder(own_folder):
    Path("ours.py").write_text(OURS)
    Path("theirs.py").write_text(THEIRS)
    Path("map.json").write_text(MAP)
    Path("bad.json").write_text('{"up.kernel": ')
    x = numbers(5, 4)
    np.savez("batch.npz", arg0=x)
    np.savez("named.npz", x=x)
    np.savez("empty.npz", arg0=x[:0])
    np.savez("objects.npz", arg0=np.array([{}], object))
    np.savez("params.npz", **{"norm.scale": x[0], "norm.shift": x[0], "up.kernel": x[:4], "up.bias": x[0]})


PAIR = "theirs.py:Block --weights map.json --inputs batch.npz"
FIND, WRONG = f"find ours.py:block {PAIR}", f"find ours.py:wrong {PAIR}"


@pytest.mark.parametrize(
    "command, status, said",
    [
        (FIND, 0, "the same\n"),
        ("find ours.py:block theirs.py:Block --weights ours.py:WEIGHTS --inputs named.npz", 0, "the same\n"),
        (WRONG, 1, "JAX      ours.py:6  return c / jnp.sqrt("),
        (WRONG, 1, "           add, wrong:12 -> block:9 -> norm\n"),
        (f"{WRONG} --ignore epsilon", 0, "the same (ignored: ours.py:6 (epsilon))\n"),
        (f"{WRONG} --bar 0.1 --no-backward", 0, "the same\n"),
        (f"{FIND} --params params.npz", 1, "they differ in their weights"),
    ],
)
def test_find_says_where_they_part(folder, capsys, command, status, said):
    assert main(command.split()) == status
    assert said in capsys.readouterr().out


def test_a_file_that_changed_is_read_again(folder, capsys):
    main(WRONG.split())
    Path("ours.py").write_text(OURS.replace("c / jnp", "1.0 * c / jnp"))
    main(WRONG.split())
    assert "ours.py:6  return 1.0 * c / jnp.sqrt(" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command, said",
    {
        FIND.replace("map.json", "bad.json"): "bad.json: JSONDecodeError: Expecting value",
        FIND.replace("map.json", "none.json"): "none.json: FileNotFoundError",
        FIND.replace("batch.npz", "objects.npz"): "objects.npz: ValueError: Object arrays cannot be loaded",
        FIND.replace("batch.npz", "map.json"): "'map.json' names nothing; expected MODULE:NAME or FILE.py:NAME",
        FIND.replace("Block", "Black"): "theirs.py:Black: LookupError: theirs.py has no Black",
        FIND.replace("theirs.py:Block", "ours.py:Broken"): "ours.py:Broken: SystemExit: no module here",
        FIND.replace("theirs.py:Block", "ours.py:block"): "theirs is a function; expected a torch.nn.Module",
        "match params.npz theirs.py:Block --inputs batch.npz": "inputs without ours",
        "match params.npz theirs.py:Block --out map.json": "cannot write map.json; expected a new file",
        "match params.npz theirs.py:Block --out none/map.json": "cannot write none/map.json; expected a new file",
        f"{FIND} --bar nan": "bar is nan; expected a number above 0",
        f"{FIND} --bar -1": "bar is -1.0; expected a number above 0",
        FIND.replace("ours.py:block", "ours.py:whole"): "ours returned no floating-point array; expected one",
        FIND.replace("batch.npz", "empty.npz"): "ours returned an empty output; there is nothing to compare",
    }.items(),
)
def test_what_cannot_be_compared_is_one_line(folder, capsys, command, said):
    assert main(command.split()) == 2
    line = capsys.readouterr().err
    assert said in line
    assert len(line.splitlines()) == 1
    assert Path("map.json").read_text() == MAP


def test_find_reads_what_match_writes(folder, capsys):
    command = "match ours.py:PARAMS theirs.py:Block --ours ours.py:block --inputs batch.npz --out new.json"
    assert main(command.split()) == 0
    assert "4 rows, 0 unsure; verified" in capsys.readouterr().out
    assert main(FIND.replace("map.json", "new.json").split()) == 0


EVERY_ROW = """{
    "q": ["qkv", "(p o) i -> p i o", {"p": 3}, {"p": 0}],
    "up": ["up", "o i -> i o"],
    "b": "b",
    "kept": null,
    "kv": [["k", "o i -> i (n o)", {}, {}, {"n": [0, 1]}], ["v", "o i -> i (n o)", {}, {}, {"n": 1}]],
    "(left out)": ["pooler", ["table", "v d -> v d", {}, {"v": [5, 9]}]]
}"""


def test_every_row_of_a_map_can_be_written(own_folder):
    Path("map.json").write_text(EVERY_ROW)
    assert weight_map(Path("map.json")) == {
        "q": Weight("qkv", "(p o) i -> p i o", {"p": 3}, {"p": 0}),
        "up": Weight("up", "o i -> i o"),
        "b": "b",
        "kept": None,
        "kv": [Weight("k", "o i -> i (n o)", into={"n": (0, 1)}), Weight("v", "o i -> i (n o)", into={"n": 1})],
        LEFT_OUT: ["pooler", Weight("table", "v d -> v d", {}, {"v": (5, 9)})],
    }


def test_the_commands_of_the_manual_print_what_it_says(own_folder, monkeypatch, capsys):
    """examples/port with another epsilon."""
    monkeypatch.syspath_prepend(own_folder)
    port = (ROOT / "examples" / "port" / "port.py").read_text("utf-8")
    Path("port.py").write_text(port.replace("+ 1e-5)", "+ 1e-6)"))
    Path("reference.py").write_text((ROOT / "examples" / "port" / "reference.py").read_text("utf-8"))
    np.savez("batch.npz", arg0=numbers(8, 16))
    section = (ROOT / "docs" / "parity-howto.md").read_text("utf-8").partition("## From a shell")[2]
    printed = ""
    for command in re.findall(r"^\$ python -m parity (.*)$", section, re.MULTILINE):
        main(command.split())
        printed += f"$ python -m parity {command}\n{capsys.readouterr().out}"
    assert printed.count("find") == 2
    assert printed in section, printed
