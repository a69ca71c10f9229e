"""The public gates, on a small pair that is not ours."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parity import Difference, ParityError, assert_parity
from parity import check_parity as check_and_explain
from parity.gates.check import OwnPair

check_parity = partial(check_and_explain, explain=False)
WEIGHTS = {"up.kernel": ("up.weight", "o i -> i o"), "up.bias": "up.bias", "scale": "norm.weight", "shift": "norm.bias"}
X = np.random.default_rng(0).standard_normal((5, 4))


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.up(x)
        return {"hidden": hidden, "output": self.norm(torch.tanh(hidden))}


def ours(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    high = jnp.promote_types(x.dtype, jnp.float32)
    hidden = (x @ params["up"]["kernel"]).astype(high) + params["up"]["bias"][None].astype(high)
    hidden = hidden.astype(x.dtype)
    h = jnp.tanh(hidden).astype(high)
    h = h - h.mean(-1, keepdims=True)
    h = h / jnp.sqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-5)
    output = h * params["scale"][None].astype(high) + params["shift"][None].astype(high)
    return {"hidden": hidden, "output": output.astype(x.dtype)}


@pytest.fixture
def module() -> Module:
    torch.manual_seed(0)
    return Module()


def test_a_pair_that_is_the_same_passes_every_gate(module: Module) -> None:
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    figures = check_parity(ours, module, WEIGHTS, [X], gates=("9", "1", "2", "3", "4", "5"))
    assert [figure.gate[0] for figure in figures] == ["9", "1", "2", "3", "4", "5"]
    assert all(figure.passed for figure in figures)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_an_output_may_be_an_array(module: Module) -> None:
    weights = {"kernel": ("weight", "o i -> i o"), "bias": "bias"}
    figures = check_parity(lambda p, x: x @ p["kernel"] + p["bias"][None], module.up, weights, [X])
    assert {figure.gate: figure.name for figure in figures}["1 activations"] == "output"


def lowered(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    return {name: array.astype(jnp.float32) for name, array in ours(params, x).items()}


def with_nan(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    return {name: array.at[2, 1].set(jnp.nan) for name, array in ours(params, x).items()}


def shorter(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    return ours(params, x[:3])


def renamed(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    return {f"our {name}": array for name, array in ours(params, x).items()}


def off(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    return {name: array * (1 + 1e-9) for name, array in ours(params, x).items()}


def detached(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    return ours(params | {"shift": jax.lax.stop_gradient(params["shift"])}, x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lowered, r"mine: hidden: dtypes differ: ours float32, theirs float64"),
        (with_nan, r"NaN at 1 places in ours and 0 in theirs; at \[2, 1\] ours is nan, theirs "),
        (shorter, r"hidden: shapes differ: ours \[3, 6\], theirs \[5, 6\]"),
        (renamed, r"only ours has \['our hidden', 'our output'\], only theirs has \['hidden', 'output'\]"),
        (off, r"mine: gate 1 activations: 1.00e-09 >  1e-12"),
        (detached, r"gate 2 gradients: 1.00e\+00 >  1e-12 \(norm.bias\)"),
    ],
)
def test_what_differs_is_shown_from_both_sides(function: Any, message: str, module: Module) -> None:
    with pytest.raises(ParityError, match=message):
        check_parity(function, module, WEIGHTS, [X], name="mine")


def first_off(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    """The names in another order than the module's, and jax.jit sorts them into a third."""
    outputs = ours(params, x)
    return {"output": outputs["output"] * (1 + 3e-9), "hidden": outputs["hidden"] * (1 + 1e-9), "a": x, "z": x}


def second_nan(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    return first_off(params, x) | {"output": ours(params, x)["output"].at[0].set(jnp.inf)}


class Module4(Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.up(x)
        return {"z": x, "hidden": hidden, "output": self.norm(torch.tanh(hidden)), "a": x}


@pytest.mark.parametrize(
    ("function", "lines"),
    [
        (first_off, ["hidden: 1.00e-09", "output: 3.00e-09"]),
        (second_nan, ["hidden: 1.00e-09", r"output: infinity at 6 places in ours and 0 in theirs; at \[0, 0\] .*"]),
    ],
)
def test_the_first_that_differs_is_named_and_all_are_listed(function: Any, lines: list[str]) -> None:
    """In the order of the module's dict, and never by the projection that the gates differentiate."""
    torch.manual_seed(0)
    listed = "".join(f"\n  {line}" for line in lines)
    head = r"pair: gate 1 activations: 1.00e-09 >  1e-12 \(hidden\); hidden is the first of 2 that differ:"
    with pytest.raises(ParityError) as error:
        check_parity(function, Module4(), WEIGHTS, [X], gates=["1"])
    assert re.fullmatch(head + listed, str(error.value))


class WithLoss(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)
        return {"logits": logits, "loss": logits.square().mean()}


def test_an_output_called_loss_is_the_pairs_own() -> None:
    """The projection of all outputs used to take its place."""

    def wrong(params: Any, x: jax.Array) -> dict[str, jax.Array]:
        logits = x @ params["kernel"] + params["bias"][None]
        return {"logits": logits, "loss": jnp.square(logits).mean() * 1.25}

    with pytest.raises(ParityError, match=r"gate 1 activations: 2.50e-01 >  1e-12 \(loss\)$"):
        check_parity(wrong, WithLoss(4, 6), {"kernel": ("weight", "o i -> i o"), "bias": "bias"}, [X], gates=["1"])


def test_an_optimizer_that_strays_names_the_users_parameters(module: Module) -> None:
    """Beyond the bar are losses and parameters; the projection, which is no tensor of the pair's, comes last."""
    pair = OwnPair(detached, module, WEIGHTS, [X])
    with jax.enable_x64(True):
        beyond = [name for name, _ in pair.optimizer([], steps=2).beyond]
    assert set(beyond[:-1]) >= {"norm.bias"}
    assert beyond[-1] == "random projection of all outputs, step by step"


def test_the_example_of_the_documentation_says_what_is_printed_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "docs" / "parity-howto.md").read_text("utf-8")
    section = text.partition("\n## A pair of your own\n")[2].partition("\n## ")[0]
    code, printed = re.findall(r"```python\n(.*?)```.*?```\n(.*?)```", section, re.DOTALL)[-1]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/parity-howto.md", "exec"), names)
    assert len(names["errors"]) == len(names["mistakes"])
    assert "\n".join(names["errors"]) + "\n" == printed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up.kernel": ("up.weight", "o i->i o")}, r"up.kernel is to be up.weight, of shape \[6, 4\], by 'o i->i o'"),
        ({"up.kernel": ("up.weight", "a b c -> c b a")}, r"up.kernel is to be up.weight"),
        ({"scale": "norm.gamma"}, r"names \['norm.gamma'\], which the module lacks.* misses \['norm.weight'\]"),
        ({"scale": "norm.bias"}, r"\['norm.bias'\] more than once, and misses \['norm.weight'\]"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(change: dict[str, str], message: str, module: Module) -> None:
    with pytest.raises(ParityError, match=message):
        check_parity(ours, module, WEIGHTS | change, [X])


def test_unknown_gates_are_refused(module: Module) -> None:
    with pytest.raises(ValueError, match=r"no gate \['12'\]"):
        check_parity(ours, module, WEIGHTS, [X], gates=("12",))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda params, x: params["kernel"], r"ours failed \(KeyError: 'kernel'\) on params .*'up.kernel': \[4, 6\]"),
        (lambda params, x: x.T @ params["up"]["kernel"], r"ours failed \(TypeError: .* and inputs \[\[5, 4\]\]"),
        (lambda params, x: (x, {"h": "x"}), r"ours returned 1.h: str; expected arrays alone"),
        (lambda params, x: (x, (x, None)), r"only ours has \['0', '1.0'\], only theirs has \['hidden', 'output'\]"),
        (lambda params, x: {"a.b": x, "a": {"b": x}}, r"ours returned two outputs by one name: \['a.b', 'a.b'\]"),
        (lambda params, x: {"hidden": x, "output": x[:0]}, r"ours returned an empty output"),
        (lambda params, x: {"n": x.argmax(-1)}, r"ours returned no floating-point array"),
    ],
)
def test_a_function_that_fails_is_told_with_what_it_was_given(function: Any, message: str, module: Module) -> None:
    with pytest.raises(ParityError, match=message):
        check_parity(function, module, WEIGHTS, [X])


class Attention(nn.Module):
    """With what small transformers have: a key bias without a gradient, a buffer, dropout, a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.frozen = nn.Parameter(torch.full((1,), 2.0), requires_grad=False)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = (self.query(x) @ self.key(x).T * self.frozen).masked_fill(~self.mask, -torch.inf)
        weights = scores.softmax(-1)
        return {"output": self.dropout(weights @ x), "best": weights.argmax(-1)}


ATTENTION: dict[str, Any] = {f"{name}.bias": f"{name}.bias" for name in ("query", "key")} | {"frozen": "frozen"}
ATTENTION |= {f"{name}.kernel": (f"{name}.weight", "o i -> i o") for name in ("query", "key")}


def attention(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    query, key = (x @ params[n]["kernel"] + params[n]["bias"][None] for n in ("query", "key"))
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), query @ key.T * params["frozen"][None], -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return {"output": weights @ x, "best": weights.argmax(-1)}


def test_buffers_dropout_frozen_parameters_whole_numbers_and_a_gradient_of_zero() -> None:
    torch.manual_seed(0)
    module = Attention()
    figures = check_parity(attention, module, ATTENTION, [X], zero_gradients=["key.bias"])
    assert all(figure.passed for figure in figures)
    assert module.training


def test_a_gradient_that_is_said_to_be_zero_must_be(module: Module) -> None:
    with pytest.raises(ParityError, match=r"the gradient of up.bias is said to be zero, and is \d"):
        check_parity(ours, module, WEIGHTS, [X], zero_gradients=["up.bias"])
    with pytest.raises(ParityError, match="zero_gradients names 'nope'"):
        check_parity(ours, module, WEIGHTS, [X], zero_gradients=["nope"])


def test_arguments_of_another_kind_are_refused(module: Module) -> None:
    with pytest.raises(TypeError, match="inputs is one array"):
        check_parity(ours, module, WEIGHTS, X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"theirs is a function; expected a torch.nn.Module"):
        check_parity(ours, ours, WEIGHTS, [X])  # type: ignore[arg-type]
    for gates in ((), "12"):
        with pytest.raises(ValueError, match="there is no gate"):
            check_parity(ours, module, WEIGHTS, [X], gates=gates)


def test_tensors_of_either_framework_can_be_compared() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    assert assert_parity("own", {"x": jnp.ones((2, 3), jnp.float32)}, {"x": tensor}).worst == 0
    narrow = torch.ones(2, dtype=torch.bfloat16)
    assert assert_parity("own", {"x": jnp.ones(2, jnp.bfloat16)}, {"x": narrow}).worst == 0
    with pytest.raises(ParityError, match="complex"):
        assert_parity("own", {"x": np.ones(2, complex)}, {"x": np.ones(2, complex)})


@pytest.mark.parametrize(("function", "line"), [(off, "array * (1 + 1e-9)"), (detached, "stop_gradient")])
def test_a_red_gate_says_where_the_two_part(function: Any, line: str, module: Module) -> None:
    with pytest.raises(ParityError) as error:
        check_and_explain(function, module, WEIGHTS, [X], gates=["1", "2"])
    found = error.value.difference
    assert isinstance(found, Difference)
    assert found.stage == ("forward" if function is off else "backward")
    assert found.ours is not None
    assert line in found.ours.source
    assert error.value.__notes__ == [str(found)]
    assert str(error.value).startswith("pair: gate ")
    assert str(found) not in str(error.value)


def test_a_search_that_breaks_hides_no_red_gate(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("parity.gates.check.first_difference", broken)
    with pytest.raises(ParityError, match=r"gate 1 activations: 1.00e-09") as error:
        check_and_explain(off, module, WEIGHTS, [X], gates=["1"])
    assert error.value.__notes__ == ["where they part was not found (RuntimeError: two lines)"]
