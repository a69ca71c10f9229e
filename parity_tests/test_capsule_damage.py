"""A capsule that is damaged, foreign or forged is refused in a line."""

import hashlib
import json
import pickle
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_tformer.files import read_json, write_json
from parity import judge, record
from parity_tests.capsule_pair import INPUTS, ours, parameters, wrong
from parity_tests.errors import parity_error
from tests.damages import cut, every, flip_bit, swap, write


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """One side."""
    return record(tmp_path_factory.mktemp("capsules") / "jax", ours, INPUTS, params=parameters())


def forged(change=lambda about: None, part="weights", tensors=None):
    """Hashes and digest fit what lies in the folder, as somebody would make them who writes capsules by other means."""

    def forge(capsule):
        path = capsule / f"{part}.safetensors"
        if tensors is not None:
            held = load_file(path)
            tensors(held)
            save_file(held, path)
        about = read_json(capsule / ABOUT)
        del about["digest"]
        for name, file in about["files"].items():
            file["sha256"] = hashlib.sha256((capsule / f"{name}.safetensors").read_bytes()).hexdigest()
        change(about)
        about["digest"] = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        write_json(capsule / ABOUT, about)

    return forge


def pickled(capsule):
    class Evil:
        def __reduce__(self):
            return open, (str(capsule / "run"), "w")

    (capsule / "weights.safetensors").write_bytes(pickle.dumps(Evil()))
    forged()(capsule)


def of_side(**fields):
    return forged(lambda about: about["side"].update(fields))


def narrowed(tensors):
    tensors["gradient bias"] = tensors["gradient bias"].astype(np.float32)


ABOUT = "capsule.json"
DAMAGES = {
    "nothing there": (shutil.rmtree, "there is no capsule"),
    "no description": (write(ABOUT, None), "is no capsule: it has no capsule.json"),
    "description cut": (cut(ABOUT, 2), "is damaged: JSONDecodeError"),
    "description too deep": (write(ABOUT, b"[" * 10**6), "is damaged: RecursionError"),
    "a list": (write(ABOUT, b"[]"), "does not say 'parity capsule'"),
    "too new": (swap(ABOUT, b'"version": 2', b'"version": 3'), "of version 3, and this parity reads up to 2"),
    "no version": (swap(ABOUT, b'"version": 2', b'"version": "1"'), "its version is '1'"),
    "edited": (swap(ABOUT, b'"framework": "jax"', b'"framework": "torch"'), "its digest differs"),
    "not a number": (swap(ABOUT, b'"by_name": true', b'"by_name": NaN'), "is damaged: ValueError"),
    "a part gone": (write("float64.safetensors", None), "No such file or directory"),
    "a bit flipped": (flip_bit(), "its SHA-256 differs"),
    "cut and forged": (every(cut("inputs.safetensors", 1), forged()), "is damaged: SafetensorError"),
    "a pickle": (pickled, "is damaged: SafetensorError"),
    "a tensor gone": (forged(tensors=lambda held: held.pop("bias")), "does not contain tensor bias"),
    "another type": (
        forged(part="float64", tensors=narrowed),
        r"gradient bias in float64.safetensors is \['float32', 2, 4\]; expected \['float64', 2, 4\]",
    ),
    "another type, listed": (
        forged(
            lambda about: about["files"]["float64"]["tensors"]["gradient bias"].__setitem__(0, "float32"),
            "float64",
            narrowed,
        ),
        "pair: bias: dtypes differ",
    ),
    "a gradient gone, listed": (
        forged(lambda about: about["files"]["float64"]["tensors"].pop("gradient bias")),
        "its float64 values are not outputs and the gradients of what is trained",
    ),
    "an unknown weight": (of_side(trained=["x"]), "names weights that are not there"),
    "names that are none": (of_side(trained=[["x"]]), "is damaged: TypeError"),
    "another side": (of_side(framework="tf"), "its side is 'tf'"),
    "a gate not recorded": (of_side(gates=["4"]), "is damaged: KeyError: 'bfloat16'"),
    "distances gone": (of_side(distances={}), "is damaged: KeyError: 'float32'"),
    "distances too few": (
        forged(lambda about: about["side"]["distances"]["float32"].update({"gradient bias": [0.0]})),
        "no 9 distances of gradient bias",
    ),
    "files elsewhere": (
        forged(lambda about: about["files"].update({"../../x": about["files"].pop("inputs")})),
        "lists other files than",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_refused_in_a_line(recorded, tmp_path, damage):
    copy = shutil.copytree(recorded, tmp_path / "capsule")
    do, said = DAMAGES[damage]
    do(copy)
    with parity_error(said) as caught:
        judge(copy, ours)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400
    assert not (copy / "run").exists()


def followed(change):
    """The rows of the values are others, and as many bytes are announced."""

    def forge(capsule):
        def tensors(held):
            said = json.loads(held["rows"].tobytes())
            change(said[0])
            held["rows"] = np.frombuffer(json.dumps(said).encode(), np.uint8)

        def announced(about):
            about["files"]["values"]["tensors"]["rows"][1] = load_file(capsule / "values.safetensors")["rows"].size

        forged(announced, "values", tensors)(capsule)

    return forge


def escaped(rows):
    for row in rows:
        row[5][4] = "\x1b[2J" + row[5][4]


@pytest.mark.parametrize(
    "do, said",
    [
        (lambda capsule: None, "another constant is added: 1e-06 in ours, 1e-05 in theirs"),
        (forged(lambda about: about["files"].pop("values")), "where they part is not known: the capsule is older, or "),
        (followed(lambda rows: rows[-1][2].append(10**6)), r"not found \(ValueError: value \d+ is made of"),
        (followed(lambda rows: rows[-1].extend("ab")), r"not found \(TypeError: "),
        (followed(escaped), "another constant"),
    ],
    ids=["whole", "none", "a cycle", "too long", "a terminal"],
)
def test_damaged_values_hide_no_red_gate(recorded, tmp_path, do, said):
    """An older capsule has none."""
    copy = shutil.copytree(recorded, tmp_path / "capsule")
    do(copy)
    with parity_error("gate 1 activations") as caught:
        judge(copy, wrong)
    [note] = caught.value.__notes__
    assert re.search(said, note)
    assert "\x1b" not in note
