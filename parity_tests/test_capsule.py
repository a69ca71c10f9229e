"""Capsules: what one machine recorded judges the other as both together would be, also as a command."""

import re
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from parity import ParityError, Weight, check_parity, first_difference, judge, record
from parity.__main__ import main
from parity.capsule import followed
from parity_tests import test_first_difference
from parity_tests.capsule_pair import INPUTS, WEIGHTS, module, ours, parameters, wrong
from parity_tests.errors import parity_error
from parity_tests.small_modules import Module, numbers
from tests.several_processes import run_alone

HERE = "parity_tests.capsule_pair"


@pytest.fixture(scope="module")
def capsules(tmp_path_factory):
    """Both sides, recorded."""
    folder = tmp_path_factory.mktemp("capsules")
    with jax.enable_x64(False):  # as a user has it
        assert record(folder / "torch", module(), INPUTS, gates=["1", "2", "3", "4"]) == folder / "torch"
        record(folder / "jax", ours, INPUTS, params=parameters())
    return folder


def test_a_recorded_module_judges_as_the_module_itself(capsules):
    """The same figures as check_parity's, also in float32 and bfloat16."""
    gates = ["9", "1", "2", "3", "4"]

    def figures(judged):
        try:
            found = judged(weights=WEIGHTS, gates=gates)
        except ParityError as error:
            found = error.figures
        return {figure.gate: figure.worst for figure in found}

    together = figures(partial(check_parity, ours, module(), inputs=INPUTS))
    apart = figures(partial(judge, capsules / "torch", ours))
    assert apart == pytest.approx(together, rel=1e-3, abs=1e-13)


def test_the_module_takes_the_recorded_weights(capsules):
    """Whatever its own are, and stays as it was."""
    made = module(seed=1)
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    judge(capsules / "jax", made, WEIGHTS)
    judge(capsules / "torch", made)
    judge(capsules / "torch", torch.compile(made, backend="eager"), gates=["1"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


def later(params, x, keep):
    return ours({name.removesuffix("s"): leaf for name, leaf in params.items()}, x, keep)


def test_a_release_is_held_against_an_older_one(capsules):
    judge(capsules / "jax", ours)
    judge(capsules / "jax", ours, params=parameters(), own_weights=True)
    judge(capsules / "torch", module(), own_weights=True)
    judge(capsules / "jax", later, {f"{name}s": name for name in parameters()})
    with parity_error(r"^release: gate 1 activations: .* \(kept\)$") as caught:
        judge(capsules / "jax", wrong, name="release", explain=False)
    assert [figure.passed for figure in caught.value.figures] == [True, False]


def frozen(params, x, keep):
    return ours(params | {"shift": jax.lax.stop_gradient(params["shift"])}, x, keep)


def rough(params, x, keep):
    if x.dtype == jnp.float32:
        params = params | {"kernel": params["kernel"].astype(jnp.bfloat16).astype(jnp.float32)}
    return ours(params, x, keep)


def moved():
    other = module()
    with torch.no_grad():
        other.norm.running_mean[2] += 1
    return other


LACKING = {name: row for name, row in WEIGHTS.items() if name != "scale"}
RENAMED = {"shifts" if name == "shift" else name: row for name, row in WEIGHTS.items()}


@pytest.mark.parametrize(
    "capsule, side, weights, options, said",
    [
        ("torch", wrong, WEIGHTS, {}, r"gate 1 activations: .* \(kept\)"),
        ("jax", frozen, None, {"gates": ["2"]}, r"gate 2 gradients: .* \(shift\)"),
        ("jax", module(), {**WEIGHTS, "kernel": Weight("layers.{layer}.weight")}, {}, "gate 1"),
        ("torch", rough, WEIGHTS, {"gates": ["1", "2", "3"]}, "gate 3 float32 / allowed"),
        (
            "torch",
            moved(),
            None,
            {"own_weights": True},
            r"gate 9 numbers lost: 1.00e\+00 >  0e\+00 \(norm.running_mean\)",
        ),
        ("jax", ours, None, {"own_weights": True}, "own_weights needs params"),
        ("torch", ours, None, {}, "holds a side of torch, and this one is of jax; weights has to say"),
        ("torch", nn.Linear(4, 4), None, {}, r"the side lacks \[.*'norm.weight'\], and the capsule has nothing for"),
        ("jax", module(), LACKING, {}, "the weight mapping does not fit the module"),
        ("jax", module(), RENAMED, {}, r"our parameters lack \['shifts'\]"),
    ],
)
def test_what_is_wrong_is_said(capsules, capsule, side, weights, options, said):
    with parity_error(said):
        judge(capsules / capsule, side, weights, **options)


def test_frozen_weights_and_gradients_that_are_zero(tmp_path):
    """A bias in front of a softmax has a gradient of rounding errors, which zero_gradients names."""

    def softened(params, x):
        return jax.nn.softmax(x * params["scale"] + params["bias"], axis=-1) * params["gain"]

    params = {"scale": np.float32(2.0), "bias": np.float32(0.5), "gain": np.float32(3.0)}
    theirs = Module(
        lambda self, x: torch.softmax(self.scale * x + self.bias, -1) * self.gain,
        **dict.fromkeys(params, lambda: nn.Parameter(torch.ones(()))),
    )
    x = numbers(3, 4)
    record(tmp_path / "known", softened, [x], params=params, zero_gradients=["bias"])
    judge(tmp_path / "known", softened)
    for trained in (True, False):
        theirs.scale.requires_grad_(trained)
        judge(tmp_path / "known", theirs, {name: name for name in params})
    with parity_error("the gradient of scale is said to be zero"):
        record(tmp_path / "mistaken", softened, [x], params=params, zero_gradients=["scale"])
    assert [path.name for path in tmp_path.iterdir()] == ["known"], "nothing is left behind"


def careless():
    """With a fault in one line."""
    made = module()
    made.layers[1].register_forward_hook(lambda layer, given, found: found * 1.001)
    return made


def cast(params, x, keep):
    """In float32 by design."""
    return ours(params, x.astype(jnp.float32).astype(x.dtype), keep)


@pytest.mark.parametrize(
    "capsule, side, weights, found",
    [
        (
            "torch",
            wrong,
            WEIGHTS,
            r"JAX .*jnp\.sqrt[\s\S]*PyTorch .*self\.norm\(x\)[\s\S]*1e-06 in ours, 1e-05 in theirs",
        ),
        ("jax", wrong, None, r"this side .*jnp\.sqrt[\s\S]*the capsule .*jnp\.sqrt[\s\S]*1e-06 in ours"),
        ("jax", careless(), WEIGHTS, r"JAX .*jnp\.tanh\(x[\s\S]*PyTorch .*found \* 1\.001\)"),
        ("torch", cast, WEIGHTS, r"PyTorch: the same \(differs as it is: gate 1 activations: .* \(kept\)\)$"),
    ],
)
def test_a_capsule_knows_where_they_part(capsules, capsule, side, weights, found):
    """With the lines of the other machine, whose files are not here."""
    with pytest.raises(ParityError) as caught:
        judge(capsules / capsule, side, weights)
    assert re.search(found, str(caught.value.difference)), caught.value.difference
    assert caught.value.__notes__ == [str(caught.value.difference)]


def without_arrays(tensors):
    """As of a large model: only outputs have numbers."""
    values = followed.unpacked(tensors)
    values.arrays = {number: values.arrays[number] for number in values.outputs.values()}
    return values


@pytest.fixture(scope="module")
def recorded_decoder(tmp_path_factory):
    """A small GPT, and its capsule."""
    torch.manual_seed(0)
    decoder = test_first_difference.Decoder()
    path = tmp_path_factory.mktemp("capsules") / "decoder"
    return decoder, record(path, decoder, [test_first_difference.TOKENS], gates=["1"])


@pytest.mark.parametrize("fault", ["eps", "scale", "leak", "residual", "gelu", "positions"])
@pytest.mark.parametrize("unpacked, verdict", [(followed.unpacked, "sure"), (without_arrays, "likely")])
@pytest.mark.usefixtures("as_others_write")
def test_a_capsule_names_the_line_that_both_together_name(recorded_decoder, monkeypatch, fault, unpacked, verdict):
    """As surely, where the arrays are small enough to be recorded."""
    decoder, path = recorded_decoder
    ours, weights = test_first_difference.ours(fault), test_first_difference.WEIGHTS
    together = first_difference(ours, decoder, weights, [test_first_difference.TOKENS])
    monkeypatch.setattr(import_module("parity.capsule.judge"), "unpacked", unpacked)
    with pytest.raises(ParityError) as caught:
        judge(path, ours, weights)
    apart = caught.value.difference
    assert (apart.ours.line, apart.theirs.line) == (together.ours.line, together.theirs.line)
    assert apart.verdict.startswith(verdict)
    assert apart.kind in (together.kind, None if verdict == "likely" else together.kind)


ALONE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ({other!r}, {other!r} + "lib"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import numpy as np
from parity import judge, record

if {other!r} == "torch":
    import jax
    side = lambda params, x: jax.nn.sigmoid(x @ params["kernel"] + params["bias"])
    options = {{"params": {{"kernel": np.ones((3, 2)), "bias": np.zeros(2)}}}}
else:
    import torch
    side, options = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Sigmoid()), {{}}
record({other!r} + "less", side, [np.arange(6.0).reshape(2, 3)], **options)
if {judged!r}:
    weights = {{"kernel": ("0.weight", "o i -> i o"), "bias": "0.bias"}}
    judge({judged!r}, side, weights)
    try:
        judge({judged!r}, side[:1] if {other!r} == "jax" else lambda p, x: x @ p["kernel"] + p["bias"], weights)
    except Exception as error:
        assert "they part on the way forward" in str(error.difference) and not error.difference.opaque, error.difference
"""


@pytest.mark.usefixtures("as_others_write")
@pytest.mark.parametrize("recorded", ["JAX", "PyTorch"])
def test_rows_in_another_order_are_named_whichever_side_was_recorded(recorded, tmp_path):
    """A side in a capsule cannot run again."""

    def turned(params, x):
        h = jnp.tanh(x @ params["kernel"] + params["bias"])
        h = h[::-1]
        return jnp.sin(jnp.cumsum(h, 0))

    theirs = Module(lambda self, x: torch.sin(torch.cumsum(torch.tanh(self.up(x)), 0)), up=lambda: nn.Linear(6, 6))
    params = {"kernel": theirs.up.weight.detach().numpy().T.copy(), "bias": theirs.up.bias.detach().numpy()}
    kept, judged, given = (turned, theirs, params) if recorded == "JAX" else (theirs, turned, None)
    capsule = record(tmp_path / "capsule", kept, [np.float32(numbers(7, 6))], params=given, gates=["1"])
    with pytest.raises(ParityError) as error:
        judge(capsule, judged, {"kernel": ("up.weight", "o i -> i o"), "bias": "up.bias"})
    assert "h = h[::-1]" in str(error.value.difference)
    assert "the same numbers in another order: along axis 0 places 0 to 6 " in str(error.value.difference)


def test_one_framework_is_enough(tmp_path):
    """Each side records where the other framework is missing, and is judged by what the other recorded."""
    for other, judged in (("torch", ""), ("jax", "torchless"), ("torch", "jaxless")):
        if judged == "jaxless":
            (tmp_path / "torchless").rename(tmp_path / "old")
        output, _ = run_alone(["-c", ALONE.format(other=other, judged=judged)], cwd=tmp_path)
        assert [line.split()[1] for line in output.splitlines()] == (["9", "1", "2", "3", "9"] if judged else [])


X = {"x": np.zeros(2)}


@pytest.mark.parametrize(
    "changed, error, said",
    [
        ({"path": "file"}, ParityError, "exists; a capsule is never overwritten"),
        ({"params": X}, ParityError, r"^ours failed \(KeyError: 'kernel'\) on params"),
        ({"side": module(), "inputs": [INPUTS["x"]], "params": None}, ParityError, "theirs failed"),
        (
            {"side": lambda p, x: x * p["x"], "inputs": [X["x"]], "params": X | {"a": np.complex64(1)}},
            ParityError,
            "an array of complex64 cannot be compared",
        ),
        ({"path": "missing/new"}, ParityError, "cannot be written: No such file"),
        ({"path": "file/new"}, ParityError, "cannot be written"),
        ({"gates": ["5"]}, ValueError, r"no gates \['5'\]"),
        ({"params": None}, TypeError, "params are missing"),
        ({"side": 3, "params": {}}, TypeError, r"expected a function of JAX or a torch\.nn\.Module"),
    ],
)
def test_a_capsule_is_whole_or_not_there(tmp_path, changed, error, said):
    (tmp_path / "file").write_text("mine")
    given = {"path": "new", "side": ours, "inputs": INPUTS, "params": parameters()} | changed
    given["path"] = tmp_path / given["path"]
    with pytest.raises(error, match=said):
        record(**given)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_the_command_prints_figures_where_all_is_green(capsules, tmp_path, capsys):
    def gates(given):
        assert main(f"judge {capsules}/jax {given}".split()) == 0
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()]

    assert gates(f"{HERE}:ours") == ["9", "1", "2", "3"]
    assert gates(f"{HERE}:module() --weights {HERE}:WEIGHTS --gates 9 1") == ["9", "1"]
    assert gates(f"{HERE}:ours --params {HERE}:parameters() --own-weights --gates 1") == ["1"]
    side = f"from {HERE} import ours\n\n\nclass Port:\n    block = staticmethod(ours)\n"
    (tmp_path / "a_side.py").write_text(side)
    assert gates(f"{tmp_path}/a_side.py:Port.block --gates 1") == ["1"]


@pytest.mark.parametrize(
    "given, status, said",
    [
        (f"{HERE}:wrong", 1, f"{HERE}:wrong: gate 1 activations: "),
        ("nowhere:side", 2, "nowhere:side: ModuleNotFoundError: No module named 'nowhere'"),
        (f"{HERE}:INPUTS", 2, "expected a function of JAX or a torch.nn.Module"),
        (f"{HERE}:module()", 2, "weights has to say which of the module's numbers"),
        (f"{HERE}:ours --gates 7", 2, "there are no gates ('7',) here"),
        (f"{HERE}:ours --params {HERE}:module(1)", 2, "has no module(1)"),
    ],
)
def test_the_command_says_in_one_line_where_it_is_not(capsules, capsys, given, status, said):
    assert main(f"judge {capsules}/jax {given}".split()) == status
    printed, line = capsys.readouterr()
    assert said in line
    assert len(line.splitlines()) == 1
    assert ("they part on the way forward" in printed) == (status == 1)
