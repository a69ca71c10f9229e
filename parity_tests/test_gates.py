"""The public gates, on a small pair that is not ours."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from parity import ParityError
from parity import check_parity as check_and_explain
from parity.gates.check import OwnPair
from parity.gates.projection import Inputs
from parity.gates.torch_side import TorchSide, backward
from parity_tests.errors import parity_error
from parity_tests.small_modules import Module, linear_rows, numbers

check_parity = partial(check_and_explain, explain=False)
WEIGHTS = linear_rows("up") | {"scale": "norm.weight", "shift": "norm.bias"}
LINEAR = {"kernel": ("weight", "o i -> i o"), "bias": "bias"}
X = numbers(5, 4)


def ours(params, x):
    high = jnp.promote_types(x.dtype, jnp.float32)
    hidden = (x @ params["up"]["kernel"]).astype(high) + params["up"]["bias"][None].astype(high)
    hidden = hidden.astype(x.dtype)
    h = jnp.tanh(hidden).astype(high)
    h = h - h.mean(-1, keepdims=True)
    h = h / jnp.sqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-5)
    output = h * params["scale"][None].astype(high) + params["shift"][None].astype(high)
    return {"hidden": hidden, "output": output.astype(x.dtype), "a": x, "z": x}


def linear(params, x):
    return x @ params["kernel"] + params["bias"][None]


@pytest.fixture
def module():
    def forward(self, x):
        hidden = self.up(x)
        return {"z": x, "hidden": hidden, "output": self.norm(torch.tanh(hidden)), "a": x}

    return Module(forward, up=lambda: nn.Linear(4, 6), norm=lambda: nn.LayerNorm(6))


def test_a_pair_that_is_the_same_passes_every_gate(module):
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    figures = check_parity(ours, module, WEIGHTS, [X], gates=("9", "1", "2", "3", "4", "5"))
    assert [figure.gate[0] for figure in figures] == ["9", "1", "2", "3", "4", "5"]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    names = {figure.gate: figure.name for figure in check_parity(linear, module.up, LINEAR, [X])}
    assert names["1 activations"] == "output", "it may be an array"


def changed(change):
    """Ours, with outputs to which this was done."""
    return lambda params, x: {name: change(array) for name, array in ours(params, x).items()}


off = changed(lambda array: array * (1 + 1e-9))


def with_outputs(**outputs):
    """Ours, with other outputs: factors, or functions."""

    def function(params, x):
        found = ours(params, x)
        return found | {name: do(found[name]) if callable(do) else found[name] * do for name, do in outputs.items()}

    return function


def detached(params, x):
    return ours(params | {"shift": jax.lax.stop_gradient(params["shift"])}, x)


@pytest.mark.parametrize(
    "function, message",
    [
        (changed(lambda array: array[:3]), r"mine: z: shapes differ: ours \[3, 4\], theirs \[5, 4\]"),
        (detached, r"gate 2 gradients: 1.00e\+00 >  1e-12 \(norm.bias\)"),
        (
            lambda params, x: x.T @ params["up"]["kernel"],
            r"ours failed \(TypeError: .* on params .*'up.kernel': \[4, 6\].* and inputs \[\[5, 4\]\]",
        ),
        (lambda params, x: (x, (x, None)), r"only ours has \['0', '1.0'\], only theirs has \['a', 'hidden'"),
        (lambda params, x: {"a.b": x, "a": {"b": x}}, r"ours returned two outputs by one name: \['a.b', 'a.b'\]"),
        (lambda params, x: {"hidden": x, "output": x[:0]}, "ours returned an empty output"),
        (lambda params, x: {"n": x.argmax(-1)}, "ours returned no floating-point array"),
        # In the order of the module's dict, all that differ, and never the projection that the gates differentiate.
        (
            with_outputs(output=1 + 3e-9, hidden=1 + 1e-9),
            r"mine: gate 1 activations: 1.00e-09 >  1e-12 \(hidden\); hidden is the first of 2 that differ:"
            r"\n  hidden: 1.00e-09\n  output: 3.00e-09$",
        ),
        (
            with_outputs(output=lambda array: array.at[0].set(jnp.inf), hidden=1 + 1e-9),
            r"hidden is the first of 2 that differ:"
            r"\n  hidden: 1.00e-09\n  output: infinity at 6 places in ours and 0 in theirs; at \[0, 0\] .*$",
        ),
    ],
)
def test_what_differs_is_shown_from_both_sides(function, message, module):
    with parity_error(message):
        check_parity(function, module, WEIGHTS, [X], name="mine")


def test_an_output_called_loss_is_the_pairs_own():
    """The projection of all outputs used to take its place."""

    def with_loss(logits, factor=1.0):
        return {"logits": logits, "loss": (logits * logits).mean() * factor}

    theirs = Module(lambda self, x: with_loss(self.up(x)), up=lambda: nn.Linear(4, 6))
    with parity_error(r"gate 1 activations: 2.50e-01 >  1e-12 \(loss\)$"):
        check_parity(lambda p, x: with_loss(linear(p["up"], x), 1.25), theirs, linear_rows("up"), [X], gates=["1"])


def test_an_optimizer_that_strays_names_the_users_parameters(module):
    """Beyond the bar are losses and parameters; the projection, which is no tensor of the pair's, comes last."""
    pair = OwnPair(detached, module, WEIGHTS, [X])
    with jax.enable_x64(True):
        beyond = [name for name, _ in pair.optimizer(steps=2).beyond]
    assert set(beyond[:-1]) >= {"norm.bias"}
    assert beyond[-1] == "random projection of all outputs, step by step"


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"zero_gradients": ["up.bias"]}, ParityError, r"the gradient of up.bias is said to be zero, and is \d"),
        ({"gates": ("12",)}, ValueError, r"no gates \('12',\)"),
        ({"gates": ()}, ValueError, "there are no gates"),
        ({"gates": "12"}, ValueError, "there are no gates"),
        ({"inputs": X}, TypeError, "inputs is a ndarray; expected a list"),
        ({"theirs": ours}, TypeError, "theirs is a function; expected a torch.nn.Module"),
        ({"weights": [*WEIGHTS.items()]}, TypeError, r"weights is a list; expected a dict: .*match_weights\("),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given, error, message, module):
    with pytest.raises(error, match=message):
        check_parity(**{"ours": ours, "theirs": module, "weights": WEIGHTS, "inputs": [X]} | given)


def their_attention(self, x):
    scores = (self.query(x) @ self.key(x).T * self.frozen).masked_fill(~self.mask, -torch.inf)
    weights = scores.softmax(-1)
    return {"output": self.dropout(weights @ x), "best": weights.argmax(-1)}


def attention(params, x):
    query, key = (linear(params[name], x) for name in ("query", "key"))
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), query @ key.T * params["frozen"][None], -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return {"output": weights @ x, "best": weights.argmax(-1)}


ROWS = linear_rows("query", "key") | {"frozen": "frozen"}


def test_buffers_dropout_frozen_parameters_whole_numbers_and_a_gradient_of_zero():
    """What small transformers have; the gradient is that of the bias of keys."""
    module = Module(
        their_attention,
        **dict.fromkeys(("query", "key"), lambda: nn.Linear(4, 4)),
        dropout=lambda: nn.Dropout(0.5),
        frozen=lambda: nn.Parameter(torch.full((1,), 2.0), requires_grad=False),
        mask=lambda: nn.Buffer(torch.ones(5, 5, dtype=torch.bool).tril()),
    )
    check_parity(attention, module, ROWS, [X], zero_gradients=["key.bias"])
    assert module.training
    for gate in "25":
        with parity_error(f"gate {gate}") as raised:
            check_and_explain(attention, module, ROWS, [X], gates=["1", gate])
        assert "the gradients of key.bias; name them in zero_gradients" in str(raised.value.difference)


def test_a_red_gate_5_is_explained_with_the_weights_of_its_steps(module):
    """Nothing shows at the beginning, where this bias is zero."""

    def late(params, x):
        return linear(params, x) * (1 + jax.nn.relu(jnp.abs(params["bias"][0]) - 0.01))

    nn.init.zeros_(module.up.bias)
    with parity_error("gate 5") as raised:
        check_and_explain(late, module.up, LINEAR, [X], gates=["1", "2", "5"])
    assert "they part on the way forward" in str(raised.value.difference)


def test_gradients_are_taken_where_they_are_switched_off():
    held = {"x": torch.ones(3, requires_grad=True)}
    with torch.no_grad():
        _, gradients, _ = backward(held, lambda: (2 * held["x"].sum(), {}))
    assert (gradients["x"] == 2).all()


@pytest.mark.parametrize("function, line", [(off, "array * (1 + 1e-9)"), (detached, "stop_gradient")])
def test_a_red_gate_says_where_the_two_part(function, line, module):
    with pytest.raises(ParityError) as error:
        check_and_explain(function, module, WEIGHTS, [X], gates=["1", "2"])
    found = error.value.difference
    assert found.stage == ("forward" if function is off else "backward")
    assert line in found.ours.source
    assert error.value.__notes__ == [str(found)]
    assert str(error.value).startswith("pair: gate ")
    assert str(found) not in str(error.value)


def test_a_search_that_breaks_hides_no_red_gate(module, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("parity.gates.check.first_difference", broken)
    with parity_error(r"gate 1 activations: 1.00e-09") as error:
        check_and_explain(off, module, WEIGHTS, [X], gates=["1"])
    assert error.value.__notes__ == ["where they part was not found (RuntimeError: two lines)"]


def test_gradients_of_a_module_that_differentiates_by_its_own_weights_do_not_add_up():
    def forward(self, x):
        loss = torch.tanh(self.first(x)).square().mean()
        (slope,) = torch.autograd.grad(loss, [self.first.weight], create_graph=True)
        return self.second(torch.tanh(x @ (self.first.weight - slope).T))

    module = Module(forward, first=lambda: nn.Linear(5, 5), second=lambda: nn.Linear(5, 3)).double()
    side = TorchSide(module, Inputs.read([numbers(4, 5)]))
    whole = side.run(side.weights).gradients
    for name in ("first.weight", "second.weight", "first.weight"):
        assert np.allclose(side.run(side.weights, of=[name]).gradients[name], whole[name], rtol=1e-12)
