"""Capsules: what one machine recorded judges the other as both together would be."""

import os
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
from torch import nn

from parity import ParityError, Weight, check_parity, judge, record
from parity_tests.capsule_pair import INPUTS, WEIGHTS, module, ours, parameters, wrong

ROOT = Path(__file__).parents[1]


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
import jax.numpy as jnp
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


def test_a_capsule_is_whole_or_not_there(capsules: Path, tmp_path: Path) -> None:
    before = (capsules / "jax" / "capsule.json").read_bytes()
    with pytest.raises(ParityError, match="exists; a capsule is never overwritten"):
        record(capsules / "jax", ours, INPUTS, params=parameters())
    assert (capsules / "jax" / "capsule.json").read_bytes() == before
    with pytest.raises(ParityError, match=r"^ours failed \(KeyError: 'kernel'\) on params"):
        record(tmp_path / "failed", ours, INPUTS, params={"x": np.zeros(2)})
    with pytest.raises(ParityError, match="theirs failed"):
        record(tmp_path / "failed", module(), [INPUTS["x"]])
    with pytest.raises(ParityError, match="ours returned no floating-point array"):
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
