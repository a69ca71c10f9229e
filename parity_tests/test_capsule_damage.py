"""A capsule that is damaged, foreign or forged is refused in a line."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from parity import ParityError, judge, record
from parity_tests.capsule_pair import INPUTS, ours, parameters


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One side."""
    return record(tmp_path_factory.mktemp("capsules") / "jax", ours, INPUTS, params=parameters())


def forged(capsule: Path, change: Callable[[dict[str, Any]], None] = lambda about: None) -> None:
    """Makes hashes and digest fit what lies in the folder, as somebody would who writes capsules by other means."""
    about = json.loads((capsule / "capsule.json").read_text())
    del about["digest"]
    for part, file in about["files"].items():
        file["sha256"] = hashlib.sha256((capsule / f"{part}.safetensors").read_bytes()).hexdigest()
    change(about)
    about["digest"] = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    (capsule / "capsule.json").write_text(json.dumps(about))


def _edit(capsule: Path, old: str, new: str) -> None:
    path = capsule / "capsule.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _pickle(capsule: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(capsule / "run"), "w")

    (capsule / "weights.safetensors").write_bytes(pickle.dumps(Evil()))
    forged(capsule)


def _rewrite(capsule: Path, part: str, change: Callable[[dict[str, np.ndarray]], object], *, listed: bool) -> None:
    path = capsule / f"{part}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)

    def describe(about: dict[str, Any]) -> None:
        if listed:
            rows = {name: [str(array.dtype), *array.shape] for name, array in tensors.items()}
            about["files"][part]["tensors"] = rows

    forged(capsule, describe)


def _narrow(tensors: dict[str, np.ndarray]) -> None:
    tensors["gradient bias"] = tensors["gradient bias"].astype(np.float32)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (lambda c: shutil.rmtree(c), "there is no capsule"),
    "a file": (lambda c: (shutil.rmtree(c), c.write_text("x")), "is no capsule: it has no capsule.json"),
    "no description": (lambda c: (c / "capsule.json").unlink(), "is no capsule: it has no capsule.json"),
    "description cut": (lambda c: _truncate_json(c), "is damaged: capsule.json is not JSON"),
    "description of bytes": (lambda c: (c / "capsule.json").write_bytes(b"\xff\xfe\x00"), "capsule.json is not JSON"),
    "description too deep": (lambda c: (c / "capsule.json").write_text("[" * 10**6), "capsule.json is not JSON"),
    "a list": (lambda c: (c / "capsule.json").write_text("[]"), "does not say 'parity capsule'"),
    "foreign": (lambda c: (c / "capsule.json").write_text('{"format": "x"}'), "does not say 'parity capsule'"),
    "too new": (lambda c: _edit(c, '"version": 1', '"version": 2'), "of version 2, and this parity reads up to 1"),
    "no version": (lambda c: _edit(c, '"version": 1', '"version": "1"'), "its version is '1'"),
    "edited": (lambda c: _edit(c, '"framework": "jax"', '"framework": "torch"'), "its digest differs"),
    "no digest": (lambda c: _edit(c, '"digest"', '"digested"'), "its digest differs"),
    "a part gone": (lambda c: (c / "float64.safetensors").unlink(), "float64.safetensors is missing"),
    "a part cut": (lambda c: _truncate(c / "weights.safetensors"), "its SHA-256 differs"),
    "a bit flipped": (lambda c: _flip(c / "float32.safetensors"), "its SHA-256 differs"),
    "cut and forged": (lambda c: (_truncate(c / "inputs.safetensors"), forged(c)), "is no safetensors file"),
    "a pickle": (_pickle, "weights.safetensors is no safetensors file"),
    "a tensor gone": (
        lambda c: _rewrite(c, "weights", lambda tensors: tensors.pop("bias"), listed=False),
        r"weights.safetensors lacks the tensors \['bias'\]",
    ),
    "a tensor more": (
        lambda c: _rewrite(c, "weights", lambda tensors: tensors.update(x=np.zeros(2)), listed=False),
        r"has tensors that capsule.json does not list: \['x'\]",
    ),
    "another type": (
        lambda c: _rewrite(c, "float64", _narrow, listed=False),
        r"gradient bias in float64.safetensors is float32 \[2, 4\]; expected float64 \[2, 4\]",
    ),
    "another type, listed": (
        lambda c: _rewrite(c, "float64", _narrow, listed=True),
        "gradient bias of its float64 values is of another type",
    ),
    "a gradient gone, listed": (
        lambda c: _rewrite(c, "float64", lambda tensors: tensors.pop("gradient bias"), listed=True),
        "its float64 values are not outputs and the gradients of what is trained",
    ),
    "an unknown weight": (
        lambda c: forged(c, lambda about: about["side"]["trained"].append("x")),
        "names weights that are not there",
    ),
    "not a number": (lambda c: _edit(c, '"by_name": true', '"by_name": NaN'), "is not what was recorded"),
    "no hash": (
        lambda c: forged(c, lambda about: about["files"]["inputs"].update(sha256=None)),
        "does not describe the tensors of inputs",
    ),
    "names that are none": (
        lambda c: forged(c, lambda about: about["side"]["trained"].append(["x"])),
        "names what is no text",
    ),
    "no side": (lambda c: forged(c, lambda about: about.pop("side")), "has no framework of its side"),
    "another side": (lambda c: forged(c, lambda about: about["side"].update(framework="tf")), "its side is 'tf'"),
    "a gate not recorded": (
        lambda c: forged(c, lambda about: about["side"]["gates"].append("4")),
        "it has no bfloat16 values, which gate 4 needs",
    ),
    "distances gone": (
        lambda c: forged(c, lambda about: about["side"]["distances"]["float32"].pop("gradient bias")),
        "no 9 distances of gradient bias",
    ),
    "files elsewhere": (
        lambda c: forged(c, lambda about: about["files"].update({"../../x": about["files"].pop("inputs")})),
        "lists other files than",
    ),
}


def _truncate_json(capsule: Path) -> None:
    _truncate(capsule / "capsule.json")
    _truncate(capsule / "capsule.json")


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_refused_in_a_line(recorded: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "capsule"
    shutil.copytree(recorded, copy)
    do, said = DAMAGES[damage]
    do(copy)
    with pytest.raises(ParityError, match=said) as caught:
        judge(copy, ours, gates=["3"] if damage == "distances gone" else None)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400
    assert not (copy / "run").exists()
