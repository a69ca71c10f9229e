"""Capsules: what one machine recorded judges the other as both together would be, and what is damaged is refused."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

from parity import ParityError, Weight, check_parity, judge, record

ROOT = Path(__file__).parents[1]
WEIGHTS = {
    "kernel": Weight("layers.{layer}.weight", "o i -> i o"),
    "bias": "layers.{layer}.bias",
    "scale": "norm.weight",
    "shift": "norm.bias",
    "mean": "norm.running_mean",
    "variance": "norm.running_var",
}
INPUTS = {"x": np.random.default_rng(0).standard_normal((5, 4)), "keep": np.array([1, 0, 1, 1, 0])}


class Theirs(nn.Module):
    """Two layers and a batch norm, with keyword inputs of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"kept": self.norm(x) * keep[:, None], "sign": x > 0}


def ours(params: Any, x: jax.Array, keep: jax.Array, eps: float = 1e-5) -> dict[str, jax.Array]:
    for layer in range(2):
        x = jnp.tanh(x @ params["kernel"][layer] + params["bias"][layer][None])
    normal = (x - params["mean"][None]) / jnp.sqrt(params["variance"][None] + eps)
    return {"sign": x > 0, "kept": (normal * params["scale"][None] + params["shift"][None]) * keep[:, None]}


def wrong(params: Any, x: jax.Array, keep: jax.Array) -> dict[str, jax.Array]:
    return ours(params, x, keep, eps=1e-6)


def module(seed: int = 0) -> Theirs:
    torch.manual_seed(seed)
    made = Theirs()
    with torch.no_grad():
        made.norm.running_mean.uniform_()
        made.norm.running_var.uniform_(0.5, 2)
    return made


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"kernel": (2, 4, 4), "bias": (2, 4), "scale": (4,), "shift": (4,), "mean": (4,), "variance": (4,)}
    return {name: rng.uniform(0.1, 1, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def capsules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sides, recorded."""
    folder = tmp_path_factory.mktemp("capsules")
    with jax.enable_x64(False):  # as a user has it
        assert record(folder / "torch", module(), INPUTS, gates=["1", "2", "3", "4"]) == folder / "torch"
        record(folder / "jax", ours, INPUTS, params=parameters())
    return folder


def test_a_recorded_module_judges_as_the_module_itself(capsules: Path) -> None:
    """The same figures as check_parity's, also in float32 and bfloat16."""
    gates = ["9", "1", "2", "3", "4"]

    def figures(judged: Callable[[], Any]) -> dict[str, float]:
        try:
            return {figure.gate: figure.worst for figure in judged()}
        except ParityError as error:
            return {figure.gate: figure.worst for figure in error.figures}

    together = figures(lambda: check_parity(ours, module(), WEIGHTS, INPUTS, gates=gates))
    apart = figures(lambda: judge(capsules / "torch", ours, WEIGHTS, gates=gates))
    assert apart == pytest.approx(together, rel=1e-3, abs=1e-13)


class Compiled(nn.Module):
    """As torch.compile wraps a module, whose names all begin with _orig_mod then."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


@pytest.mark.parametrize("seed", [0, 1])
def test_the_module_takes_the_recorded_weights(capsules: Path, seed: int) -> None:
    """Whatever its own are, and stays as it was."""
    made = module(seed)
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    judge(capsules / "jax", made, WEIGHTS)
    judge(capsules / "torch", made)
    judge(capsules / "torch", Compiled(made), gates=["1"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


def test_a_release_is_held_against_an_older_one(capsules: Path) -> None:
    judge(capsules / "jax", ours)
    judge(capsules / "jax", ours, params=parameters(), own_weights=True)
    with pytest.raises(ParityError, match=r"^release: gate 1 activations: .* \(kept\)$") as caught:
        judge(capsules / "jax", wrong, name="release")
    assert [figure.passed for figure in caught.value.figures] == [True, False]
    renamed = {f"{name}s": name for name in parameters()}

    def later(params: Any, x: jax.Array, keep: jax.Array) -> dict[str, jax.Array]:
        return ours({name.removesuffix("s"): leaf for name, leaf in params.items()}, x, keep)

    judge(capsules / "jax", later, renamed)


def test_a_wrong_side_is_red_in_either_direction(capsules: Path) -> None:
    with pytest.raises(ParityError, match=r"gate 1 activations: .* \(kept\)"):
        judge(capsules / "torch", wrong, WEIGHTS)
    with pytest.raises(ParityError, match=r"gate 2 gradients: .* \(shift\)"):
        judge(capsules / "jax", lambda params, x, keep: ours(_frozen(params, "shift"), x, keep), gates=["2"])
    other = {**WEIGHTS, "kernel": Weight("layers.{layer}.weight")}
    with pytest.raises(ParityError, match="gate 1"):
        judge(capsules / "jax", module(), other)


def _frozen(params: Any, name: str) -> Any:
    return params | {name: jax.lax.stop_gradient(params[name])}


def test_float32_is_held_against_the_recorded_side(capsules: Path) -> None:
    def rough(params: Any, x: jax.Array, keep: jax.Array) -> dict[str, jax.Array]:
        if x.dtype == jnp.float32:
            params = params | {"kernel": params["kernel"].astype(jnp.bfloat16).astype(jnp.float32)}
        return ours(params, x, keep)

    with pytest.raises(ParityError, match="gate 3 float32 / allowed"):
        judge(capsules / "torch", rough, WEIGHTS, gates=["1", "2", "3"])


def test_own_weights_are_compared(capsules: Path) -> None:
    judge(capsules / "torch", module(), own_weights=True)
    other = module()
    with torch.no_grad():
        other.norm.running_mean[2] += 1
    with pytest.raises(ParityError, match=r"gate 9 numbers lost: 1.00e\+00 >  0e\+00 \(norm.running_mean\)"):
        judge(capsules / "torch", other, own_weights=True)
    with pytest.raises(ParityError, match="own_weights needs params"):
        judge(capsules / "jax", ours, own_weights=True)


def test_weights_that_do_not_fit(capsules: Path) -> None:
    with pytest.raises(ParityError, match="holds a side of torch, and this one is of jax; weights has to say"):
        judge(capsules / "torch", ours)
    with pytest.raises(ParityError, match=r"the side lacks \[.*'norm.weight'\], and the capsule has nothing for"):
        judge(capsules / "torch", nn.Linear(4, 4))
    with pytest.raises(ParityError, match="the weight mapping does not fit the module"):
        judge(capsules / "jax", module(), {name: row for name, row in WEIGHTS.items() if name != "scale"})
    with pytest.raises(ParityError, match=r"our parameters lack \['shifts'\]"):
        judge(capsules / "jax", module(), {"shifts" if name == "shift" else name: row for name, row in WEIGHTS.items()})


def test_frozen_weights_and_gradients_that_are_zero(tmp_path: Path) -> None:
    """A bias in front of a softmax has a gradient of rounding errors, which zero_gradients names."""

    def softened(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x * params["scale"] + params["bias"], axis=-1) * params["gain"]

    params = {"scale": np.float32(2.0), "bias": np.float32(0.5), "gain": np.float32(3.0)}
    x = np.random.default_rng(0).standard_normal((3, 4))
    record(tmp_path / "known", softened, [x], params=params, zero_gradients=["bias"])
    judge(tmp_path / "known", softened)

    class Softened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.bias, self.gain = (nn.Parameter(torch.ones(())) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.scale * x + self.bias, -1) * self.gain

    weights = {name: name for name in params}
    judge(tmp_path / "known", Softened(), weights)
    frozen = Softened()
    frozen.scale.requires_grad_(False)
    judge(tmp_path / "known", frozen, weights)
    with pytest.raises(ParityError, match="the gradient of scale is said to be zero"):
        record(tmp_path / "mistaken", softened, [x], params=params, zero_gradients=["scale"])
    assert [path.name for path in tmp_path.iterdir()] == ["known"], "nothing is left behind"


MISSING = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""
ALONE = {
    "jax": """
import jax
import numpy as np
from parity import Weight, judge, record

def side(params, x):
    return jax.nn.sigmoid(x @ params["kernel"] + params["bias"])

params = {"kernel": np.ones((3, 2)), "bias": np.zeros(2)}
record("alone", side, [np.arange(6.0).reshape(2, 3)], params=params)
""",
    "torch": """
import numpy as np
import torch
from parity import Weight, judge, record

side = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Sigmoid())
record("alone", side, [np.arange(6.0).reshape(2, 3)])
""",
}
"""One side on a machine of its own."""


def test_one_framework_is_enough(tmp_path: Path) -> None:
    """Each side records where the other framework is missing, and is judged by what the other recorded."""
    weights = {"kernel": ("0.weight", "o i -> i o"), "bias": "0.bias"}
    for made in ALONE:
        (tmp_path / made).mkdir()
    for made, other in (("jax", "torch"), ("torch", "jax"), ("jax", "torch")):
        missing = MISSING.replace("{names!r}", repr([other, f"{other}lib"]))
        there = tmp_path / other / "alone"
        judged = f"judge({str(there)!r}, side, {weights!r})" if there.exists() else ""
        recorded = tmp_path / made / "alone"
        if recorded.exists():
            shutil.rmtree(recorded)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"{missing}{ALONE[made]}\n{judged}",
            ],
            cwd=tmp_path / made,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert [line.split()[1] for line in done.stdout.splitlines()] == (["9", "1", "2", "3"] if judged else [])


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
def test_what_is_damaged_is_refused_in_a_line(capsules: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "capsule"
    shutil.copytree(capsules / "jax", copy)
    do, said = DAMAGES[damage]
    do(copy)
    with pytest.raises(ParityError, match=said) as caught:
        judge(copy, ours, gates=["3"] if damage == "distances gone" else None)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400
    assert not (copy / "run").exists()


def test_a_capsule_is_whole_or_not_there(capsules: Path, tmp_path: Path) -> None:
    before = (capsules / "jax" / "capsule.json").read_bytes()
    with pytest.raises(ParityError, match="exists; a capsule is never overwritten"):
        record(capsules / "jax", ours, INPUTS, params=parameters())
    assert (capsules / "jax" / "capsule.json").read_bytes() == before
    with pytest.raises(ParityError, match=r"^ours failed \(KeyError: 'kernel'\) on params"):
        record(tmp_path / "failed", ours, INPUTS, params={"x": np.zeros(2)})
    with pytest.raises(ParityError, match="theirs failed"):
        record(tmp_path / "failed", module(), [INPUTS["x"]])
    with pytest.raises(ParityError, match="nothing to differentiate"):
        record(tmp_path / "failed", lambda params, x: x > params["x"], [np.zeros(2)], params={"x": np.zeros(2)})
    with pytest.raises(ParityError, match="a is of type complex64; a capsule holds float64"):
        record(
            tmp_path / "failed", lambda p, x: x * p["b"], [np.ones(2)], params={"a": np.complex64(1), "b": np.ones(2)}
        )
    with pytest.raises(ParityError, match="cannot be written: No such file or directory"):
        record(tmp_path / "missing" / "capsule", ours, INPUTS, params=parameters())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ParityError, match="cannot be written"):
        record(tmp_path / "file" / "capsule", ours, INPUTS, params=parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_arguments_of_another_kind(capsules: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no gates '1'"):
        record(tmp_path / "x", ours, INPUTS, params=parameters(), gates="1")
    with pytest.raises(ValueError, match=r"no gates \['5'\]"):
        record(tmp_path / "x", ours, INPUTS, params=parameters(), gates=["5"])
    with pytest.raises(ValueError, match=r"no gates \['4'\]"):
        judge(capsules / "jax", ours, gates=["4"])
    with pytest.raises(TypeError, match="params are missing"):
        record(tmp_path / "x", ours, INPUTS)
    with pytest.raises(TypeError, match=r"expected a function of JAX or a torch\.nn\.Module"):
        record(tmp_path / "x", 3, INPUTS, params={})
    with pytest.raises(TypeError, match="inputs is one array"):
        record(tmp_path / "x", ours, np.zeros(2), params=parameters())
    assert not list(tmp_path.iterdir())
