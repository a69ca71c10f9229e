"""`first_difference` on pairs of a few lines each, for what the small GPT of test_first_difference.py has not."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

from parity import ParityError, Weight, check_parity, first_difference, match_weights
from parity_tests.matched import linear_shapes, shape
from parity_tests.small_modules import Module, numbers

pytestmark = pytest.mark.usefixtures("as_others_write")


def linear(width=3):
    return nn.Linear(4, width)


NUMBERS = numbers(5, 4, seed=1)
LINEAR = {"kernel": ("linear.weight", "o i -> i o"), "bias": "linear.bias"}


def of_linear(forward, width=3):
    """A module of one linear layer."""
    return Module(forward, linear=lambda: linear(width))


def affine(p, x):
    return x @ p["kernel"] + p["bias"]


def asked(ours, theirs, weights=LINEAR, **options):
    """Where they part on the numbers of this file."""
    return first_difference(ours, theirs, weights, [NUMBERS], **options)


@pytest.mark.parametrize(
    "theirs", [F.silu, F.mish, lambda x: 1 - torch.sigmoid(x)], ids=["silu", "mish", "1 - sigmoid"]
)
def test_a_step_within_an_activation_is_not_taken_for_it(theirs):
    def forward(self, x):
        return self.down(theirs(self.up(x)))

    def ours(p, x):
        return jax.nn.gelu(affine(p, x), approximate=True) @ p["down"].T

    weights = {"kernel": ("up.weight", "o i -> i o"), "bias": "up.bias", "down": "down.weight"}
    module = Module(forward, up=lambda: linear(8), down=lambda: nn.Linear(8, 3, bias=False))
    said = "another activation: GELU (tanh) in ours, SiLU in theirs" if theirs is F.silu else None
    assert asked(ours, module, weights).kind == said


def learned(self, x):
    """One step down a slope by its own weights, and then the layer, as meta-learning does."""
    loss = F.layer_norm(self.linear(x), (3,)).sin().mean()
    (slope,) = torch.autograd.grad(loss, [self.linear.weight], create_graph=True)
    return torch.tanh(F.linear(x, self.linear.weight - 0.7 * slope, self.linear.bias))


@pytest.mark.parametrize(
    "fault, stage, source",
    [
        ("", "none", ""),
        ("the mean", "forward", 'return jnp.sin(y).sum() / 7 if fault == "the mean" else jnp.sin(y).mean()'),
        ("the step", "forward", 'kernel = p["kernel"] - (0.9 if fault == "the step" else 0.7) * slope'),
        ("the second order", "backward", "slope = jax.lax.stop_gradient(slope)"),
    ],
)
def test_a_module_that_differentiates_by_its_own_weights(fault, stage, source):
    def ours(p, x):
        def inner(p):
            y = affine(p, x)
            y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
            return jnp.sin(y).sum() / 7 if fault == "the mean" else jnp.sin(y).mean()

        slope = jax.grad(inner)(p)["kernel"]
        if fault == "the second order":
            slope = jax.lax.stop_gradient(slope)
        kernel = p["kernel"] - (0.9 if fault == "the step" else 0.7) * slope
        return jnp.tanh(x @ kernel + p["bias"])

    module = of_linear(learned)
    found = asked(ours, module)
    assert (found.stage, found.ours.source if found else "") == (stage, source), str(found)
    if not fault:
        check_parity(ours, module, LINEAR, [NUMBERS])


def test_experts_in_one_product_and_one_by_one():
    def one_by_one(self, x):
        hidden = [torch.tanh(expert(x)) for expert in self.experts]
        return hidden[0] - 2 * hidden[1] + hidden[2]

    theirs = Module(one_by_one, experts=lambda: nn.ModuleList(linear(8) for _ in range(3)))

    weights = {"kernel": ("experts.{layer}.weight", "o i -> i o"), "bias": "experts.{layer}.bias"}

    def batched(p, x, power=1):
        hidden = jnp.tanh(x @ p["kernel"] + p["bias"][:, None])
        hidden = hidden**power
        return hidden[0] - 2 * hidden[1] + hidden[2]

    assert not asked(batched, theirs, weights)
    found = asked(partial(batched, power=3), theirs, weights)
    assert found.ours.source == "hidden = hidden**power"
    assert found.kind == "ours applies integer_pow here; without that, ours goes on as theirs does"


def test_a_gradient_is_found_where_layers_have_stacks_of_experts():
    def ours(p, x):
        def layer(x, w):
            return x + jnp.einsum("bd,edh->bh", jnp.tanh(jax.lax.stop_gradient(x)), w), None

        return jax.lax.scan(layer, x, p["experts"])[0]

    def forward(self, x):
        for layer in self.layers:
            x = x + sum(expert(torch.tanh(x)) for expert in layer)
        return x

    module = Module(
        forward,
        layers=lambda: nn.ModuleList(nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3)) for _ in range(2)),
    )
    found = asked(ours, module, {"experts": ("layers.{layer}.{expert}.weight", "o i -> i o")})
    assert found.stage == "backward"
    assert "stop_gradient" in found.ours.source
    assert "detached" in found.kind


def test_what_mends_one_output_alone_is_not_said():
    """Without a factor of 0.5 the total agrees, and the value does not: another factor mends both."""

    def ours(p, x):
        value = 0.5 * jnp.square(affine(p, x)).mean()
        return {"value": value, "total": x.mean() + 0.5 * value}

    def forward(self, x):
        value = self.linear(x).square().mean()
        return {"value": value, "total": x.mean() + 0.5 * value}

    found = asked(ours, of_linear(forward))
    assert not found.sure
    assert found.ours.source.startswith("value = ")
    assert found.kind.startswith("ours has 0.5 here; with 1, ours goes on as theirs does")


def test_a_mask_of_a_large_negative_number_hides_nothing():
    theirs = of_linear(lambda self, x: (self.linear(x) + torch.arange(6) % 2 * -1e9).softmax(-1), 6)

    def ours(p, x):
        scores = x @ p["kernel"] + p["bias"][::-1]
        return jax.nn.softmax(jnp.where(jnp.arange(6) % 2 == 1, -1e9, scores))

    found = asked(ours, theirs)
    assert found.ours.source == 'scores = x @ p["kernel"] + p["bias"][::-1]'


def test_what_is_not_compared_is_said():
    def forward(self, x):
        return {"y": self.linear(x), "ids": self.linear(x).argmax(-1), "z": x}

    theirs = of_linear(forward)
    found = asked(lambda p, x: {"y": affine(p, x)}, theirs)
    assert not found
    assert str(found).endswith("the same (not compared: ids, z)")
    found = asked(lambda p, x: {"y": x @ p["kernel"]}, theirs)
    assert "\n  not compared: ids, z\n" in str(found)
    assert "not compared: ids, z" in found.as_html()


@dataclass
class Recurrent:
    """As Flax's modules and Hugging Face's models return one."""

    y: Any
    state: Any
    cache: Any = None


SHAPES = {
    "tuple": tuple,
    "dict": lambda parts: {"y": parts[0], "state": list(parts[1])},
    "dataclass": lambda parts: Recurrent(*parts),
}


@pytest.mark.parametrize("packed", SHAPES)
def test_nested_outputs_are_compared_by_all_three(packed):
    """`(y, (h, c))` of an LSTM, and the same in a dict and in a dataclass."""

    theirs = Module(lambda self, x: SHAPES[packed](self.lstm(x)), lstm=partial(nn.LSTM, 4, 3, batch_first=True))

    def ours(p, x, factor=1.0):
        h = c = jnp.zeros((x.shape[0], 3), x.dtype)
        states = []
        for t in range(x.shape[1]):
            gates = x[:, t] @ p["ih"] + p["bias_ih"] + h @ p["hh"] + p["bias_hh"]
            keep, forget, new, output = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(keep) * jnp.tanh(new)
            h = jax.nn.sigmoid(output) * jnp.tanh(c)
            states.append(h)
        c = c * factor
        return SHAPES[packed]((jnp.stack(states, 1), (h[None], c[None])))

    weights = {
        "ih": ("lstm.weight_ih_l0", "o i -> i o"),
        "hh": ("lstm.weight_hh_l0", "o i -> i o"),
        "bias_ih": "lstm.bias_ih_l0",
        "bias_hh": "lstm.bias_hh_l0",
    }
    shapes = {"ih": shape(4, 12), "hh": shape(3, 12), "bias_ih": shape(12), "bias_hh": shape(12)}
    inputs = [numbers(2, 5, 4)]
    state = "1" if packed == "tuple" else "state"

    found = first_difference(ours, theirs, weights, inputs)
    assert not found
    assert not found.left_out
    assert check_parity(ours, theirs, weights, inputs, gates=["1", "2"])
    match = match_weights(shapes, theirs, ours=ours, inputs=inputs)
    assert match.verified
    assert "not compared" not in match.figures

    wrong = partial(ours, factor=1.5)
    assert first_difference(wrong, theirs, weights, inputs).differing == (f"{state}.1: 5.0e-01",)
    with pytest.raises(ParityError, match=rf"gate 1 activations: 5.00e-01 >  1e-12 \({state}.1\)$"):
        check_parity(wrong, theirs, weights, inputs, gates=["1"], explain=False)
    assert not match_weights(shapes, theirs, ours=wrong, inputs=inputs).verified

    # Without the state: nothing of it is passed over in silence.
    def alone(p, x):
        return ours(p, x)[0]

    if packed == "tuple":
        said = "not compared: 1.0, 1.1"
        assert said in str(first_difference(alone, theirs, weights, inputs))
        assert said in match_weights(shapes, theirs, ours=alone, inputs=inputs).figures
        with pytest.raises(ParityError, match=r"only theirs has \['0', '1.0', '1.1'\]"):
            check_parity(alone, theirs, weights, inputs, gates=["1"], explain=False)


def entered(y, mask=None, state=None, encoded=None, rotation=None, times=2):
    """What both sides of a door do with all that a model may be given, beside what it is called with."""
    y = y * times
    y = y if mask is None else y * mask["mask"][0]
    y = y if state is None else y + state[0]
    y = y if encoded is None else y + encoded.last_hidden_state
    return y if rotation is None else y * rotation.real


def door():
    def forward(self, x, mask=None, state=None, act="tanh", key=None, **others):
        y = entered(self.linear(x), mask, state, **others)
        return BaseModelOutput(last_hidden_state=getattr(torch, act)(y), hidden_states=(y, y))

    return of_linear(forward)


def through_the_door(p, x, mask=None, state=None, act="tanh", key=None, **others):
    y = entered(affine(p, x), mask, state, **others)
    y = y if key is None else y + 0 * jax.random.normal(key, y.shape)
    return {"last_hidden_state": getattr(jnp, act)(y), "hidden_states": (y, y), "extra": (None, act)}


THREE = numbers(5, 3, seed=2)
GIVEN = {
    "None": [NUMBERS, None],
    "nested": [NUMBERS.astype(np.float32), {"mask": [THREE, None]}, (torch.tensor(THREE, requires_grad=True), None)],
    "static": {"x": NUMBERS.tolist(), "act": "sin", "times": 3},
    "new key": {"x": NUMBERS, "key": jax.random.key(0)},
    "old key": {"x": NUMBERS, "key": jax.random.PRNGKey(0)},
    "ModelOutput": {"x": NUMBERS, "encoded": BaseModelOutput(last_hidden_state=torch.tensor(THREE))},
    "complex": {"x": NUMBERS, "rotation": np.exp(1j * THREE)},
}
ALL_THREE = {
    "check": lambda inputs: check_parity(through_the_door, door(), LINEAR, inputs, gates=["1", "2"]),
    "first": lambda inputs: first_difference(through_the_door, door(), LINEAR, inputs),
    "match": lambda inputs: match_weights(linear_shapes(4, 3), door(), ours=through_the_door, inputs=inputs),
}


@pytest.mark.parametrize("inputs", GIVEN.values(), ids=GIVEN)
def test_all_three_take_what_models_are_given(inputs):
    figures, found, match = (tool(inputs) for tool in ALL_THREE.values())
    assert not found
    assert match.verified
    assert all("not compared: extra.1" in str(said) for said in (figures[0], found, match.figures))


@pytest.mark.parametrize("tool", ALL_THREE)
@pytest.mark.parametrize("wrong", [object(), {1}, np.array(["a"]), [NUMBERS, {1}]])
def test_all_three_refuse_the_rest_in_the_same_sentence(tool, wrong):
    said = r"^input 1(\.1)? is (object|set|ndarray); expected an array of numbers, None, a string, "
    with pytest.raises(ParityError, match=said):
        ALL_THREE[tool]([NUMBERS, wrong])


def norm_and_gelu(p, x, eps=1e-5, approximate=False, factor=1.0):
    c = x - x.mean(-1, keepdims=True)
    h = c / jnp.sqrt((c * c).mean(-1, keepdims=True) + eps)
    h = jax.nn.gelu(h @ p["kernel"] + p["bias"], approximate=approximate)
    return x @ p["kernel"] + factor * jnp.sin(h)


NORM_AND_GELU = Module(
    lambda self, x: x @ self.linear.weight.T + torch.sin(F.gelu(self.linear(self.norm(x)))),
    norm=lambda: nn.LayerNorm(4, elementwise_affine=False),
    linear=linear,
)
LINE = f"{Path(__file__).name}:{norm_and_gelu.__code__.co_firstlineno + 3}"


@pytest.mark.parametrize(
    "changed, ignore, behind",
    [
        ({"eps": 1e-3}, "epsilon", None),
        ({"eps": 1e-3}, "norm", None),
        ({"eps": 1e-3, "approximate": True}, ["epsilon"], "h = jax.nn.gelu"),
        ({"eps": 1e-3, "approximate": True}, ["epsilon", LINE], None),
        ({"approximate": True}, [LINE], None),
        ({"approximate": True}, ["another_function", LINE[:-1]], "h = jax.nn.gelu"),
        ({"approximate": True, "factor": 1.5}, [LINE], "return x @"),
    ],
)
def test_what_is_accepted_is_passed_and_named(changed, ignore, behind):
    found = asked(partial(norm_and_gelu, **changed), NORM_AND_GELU, ignore=ignore)
    assert found.ours.source.startswith(behind) if behind else not found
    assert bool(found.ignored) == (LINE[:-1] not in ignore)
    assert all(line in str(found) for line in found.ignored)


def test_behind_what_never_meets_again_nothing_is_looked_for():
    def ours(p, x):
        return jnp.tanh(affine(p, x)) * 3

    theirs = of_linear(lambda self, x: torch.cos(self.linear(x)))
    found = asked(ours, theirs, ignore=["ours"])
    assert "the two sides do not come together: the search ends here" in str(found)


@pytest.mark.parametrize("bar", [1e-12, 1e-3])
def test_a_bar_of_ones_own(bar):
    nearly = partial(norm_and_gelu, eps=1.0001e-5)
    assert bool(asked(nearly, NORM_AND_GELU, bar=bar)) == (bar < 1e-6)


@pytest.mark.parametrize("also, beside", [(0.0, 1.0), (1e-9, 1.0), (0.0, 2.0)])
def test_what_rounding_makes_of_it_is_no_difference(also, beside):
    """The density of a squashed Gaussian, where the tangent is nearly 1; a number beside it is a difference, and so is
    another result, which is found although the density parts before it."""

    def forward(self, x):
        squashed = torch.tanh(9 * self.linear(x))
        density = torch.log(1 - squashed * squashed + 1e-12).sum(-1)
        return {"density": density, "loss": torch.sin(x @ self.linear.weight.T).sum(-1)}

    def ours(p, x):
        squashed = jnp.tanh(9 * affine(p, x))
        density = jnp.log((1 - squashed) * (1 + squashed) + 1e-12).sum(-1) * (1 + also)
        return {"density": density, "loss": jnp.sin(beside * x @ p["kernel"]).sum(-1)}

    found = asked(ours, of_linear(forward))
    assert bool(found) == bool(also or beside > 1)
    assert also or bool(found) or any("(as float64 rounds)" in note for note in found.notes)
    assert beside == 1 or ("sin" in found.ours.source and "sin" in found.theirs.source)


def test_an_answer_names_a_place_where_each_side_computes_what_the_other_returns():
    theirs = of_linear(lambda self, x: torch.tanh(self.linear(x)) - 2 * self.linear(x))

    def ours(p, x):
        y = affine(p, x)
        return {"output": jnp.tanh(y), "unused": jnp.tanh(y) - 2 * y}["output"] + 0 * (jnp.tanh(y) - 2 * y)

    found = asked(ours, theirs)
    assert found.ours
    assert found.theirs


def test_what_only_ours_trains_is_said():
    """Whisper's encoder has its positions as a parameter that is frozen."""

    theirs = Module(
        lambda self, x: torch.tanh(self.linear(x) + self.positions.weight),
        linear=lambda: linear(4),
        positions=lambda: nn.Embedding(5, 4).requires_grad_(False),
    )

    def ours(p, x, frozen=False, factor=1.0):
        positions = jax.lax.stop_gradient(p["positions"]) if frozen else p["positions"]
        bias = p["bias"] * factor + jax.lax.stop_gradient(p["bias"] * (1 - factor))
        return jnp.tanh(x @ p["kernel"] + bias + positions)

    weights = {**LINEAR, "positions": "positions.weight"}
    said = "trained in ours alone: positions.weight"
    found = asked(ours, theirs, weights)
    assert not found
    assert str(found).endswith(f"the same ({said})")
    assert said in found.as_html()
    assert found.as_json()["trained_alone"] == ["positions.weight"]
    optimizers = optax.sgd(1e-3), partial(torch.optim.SGD, lr=1e-3)
    assert asked(ours, theirs, weights, optimizer=optimizers).notes == [said]
    figures = check_parity(ours, theirs, weights, [NUMBERS], gates=["1", "2"])
    assert [said in str(figure) for figure in figures] == [False, True]
    # Also beside a difference of gradients.
    halved = partial(ours, factor=0.5)
    assert asked(halved, theirs, weights).notes == [said]
    with pytest.raises(ParityError, match=said):
        check_parity(halved, theirs, weights, [NUMBERS], gates=["2"], explain=False)

    frozen = partial(ours, frozen=True)
    assert not asked(frozen, theirs, weights).notes
    assert not any(figure.note for figure in check_parity(frozen, theirs, weights, [NUMBERS], gates=["1", "2"]))


def test_parts_in_another_order_are_named_where_they_are_put_together():
    """A table of cosines and sines, as of positions: what differs first is no sine, but their order."""

    def forward(self, x):
        angles = torch.arange(5, dtype=torch.float64)[:, None] / 10 ** torch.arange(3, dtype=torch.float64)
        table = torch.cat([angles.sin(), angles.cos()], -1)
        return torch.tanh(self.linear(x) + table)

    def ours(p, x):
        angles = jnp.arange(5)[:, None] / 10.0 ** jnp.arange(3)
        table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        return jnp.tanh(affine(p, x) + table)

    found = asked(ours, of_linear(forward, 6))
    assert (found.stage, found.sure, found.parameters) == ("forward", True, ())
    assert found.kind == "the same numbers in another order: along axis 1 places 0 to 5 are in another order"
    assert found.ours.source == "table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)"
    assert found.theirs.source == "table = torch.cat([angles.sin(), angles.cos()], -1)"


def test_code_that_reads_the_weight_of_another_layer_is_no_difference_of_weights():
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    theirs = Module(forward, layers=lambda: nn.ModuleList(linear(4) for _ in range(3)))

    def ours(p, x, last=1):
        for layer in range(3):
            x = jnp.tanh(x @ p["kernel"][min(layer, last)] + p["bias"][layer])
        return x

    weights = {"kernel": ("layers.{layer}.weight", "o i -> i o"), "bias": "layers.{layer}.bias"}
    assert not asked(partial(ours, last=2), theirs, weights)
    found = asked(ours, theirs, weights)
    # The map is right, so that the answer is a line and not a weight.
    assert (found.stage, found.sure, found.parameters) == ("forward", True, ())
    assert found.kind == "ours reads layers.1.weight, as kernel, where theirs reads layers.2.weight"
    assert "min(layer, last)" in found.ours.source
    assert found.theirs.module == "layers.2"


@pytest.mark.parametrize("name", ["layers.{layer}.0", "up.{layer}"])
@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2)])
def test_layers_in_another_order_are_said_to_be(order, name):
    """Of one list of layers, or of one list for each of their parts."""

    def layers(self):
        return self.layers if "layers" in name else zip(self.up, self.down, strict=True)

    def forward(self, x):
        for up, down in layers(self):
            x = x + down(torch.tanh(up(x)))
        return x

    def layer(x, each):
        hidden = jnp.tanh(affine({"kernel": each["up"], "bias": each["bias"]}, x))
        return x + affine({"kernel": each["down"], "bias": each["after"]}, hidden), None

    def ours(p, x):
        return jax.lax.scan(layer, x, jax.tree.map(lambda leaf: leaf[jnp.array(order)], p))[0]

    def apart():
        return nn.ModuleList(linear(4) for _ in range(3))

    whole = {"layers": lambda: nn.ModuleList(nn.ModuleList(linear(4) for _ in range(2)) for _ in range(3))}
    theirs = Module(forward, **(whole if "layers" in name else {"up": apart, "down": apart}))
    other = name.replace("up", "down").replace("}.0", "}.1")
    weights = {"up": (f"{name}.weight", "o i -> i o"), "bias": f"{name}.bias"}
    weights |= {"down": (f"{other}.weight", "o i -> i o"), "after": f"{other}.bias"}
    found = asked(ours, theirs, weights)
    assert (found.stage, found.sure) == ("forward", True)
    before = name.partition("{")[0]
    assert found.kind == f"ours takes the layers in another order: {before}{order[0]} where theirs takes {before}0"


def test_layers_that_are_repeated_one_by_one_are_not_sure_to_be_one_layer_too_many():
    """Ours runs each layer twice, theirs all layers twice: without its second step ours goes on for one layer."""

    def forward(self, x):
        for _ in range(2):
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
        return x

    def step(x, each):
        return x + jnp.tanh(affine(each, x)), None

    def ours(p, x):
        return jax.lax.scan(lambda x, each: step(step(x, each)[0], each), x, p)[0]

    theirs = Module(forward, layers=lambda: nn.ModuleList(linear(4) for _ in range(2)))
    weights = {"kernel": ("layers.{layer}.weight", "o i -> i o"), "bias": "layers.{layer}.bias"}
    found = asked(ours, theirs, weights)
    assert not found.confirmed


def test_scaling_at_another_place_is_not_what_is_wrong_with_scores():
    """PyTorch scales queries and keys by a root each."""

    def forward(self, x):
        return F.scaled_dot_product_attention(*(part(x)[None] for part in (self.query, self.key, self.value)))

    def ours(p, x):
        q, k, v = (x @ p[name].T for name in ("query", "key", "value"))
        return (jax.nn.softmax(q / 2 @ jnp.abs(k).T) @ v)[None]

    names = ("query", "key", "value")
    module = Module(forward, **dict.fromkeys(names, lambda: nn.Linear(4, 4, bias=False)))
    found = first_difference(ours, module, {name: f"{name}.weight" for name in names}, [NUMBERS], backward=False)
    assert found.kind == "ours applies abs here; without that, ours goes on as theirs does"


def test_another_number_that_stands_in_the_program_is_told():
    def forward(self, x):
        z = self.linear(x)
        y = torch.sigmoid(z - 0.25)
        return z * y

    def ours(p, x):
        z = affine(p, x)
        y = jax.nn.sigmoid(z - 0.5)
        return z * y

    found = asked(ours, of_linear(forward))
    assert found.kind == "another number stands in the program: 0.5 in ours, 0.25 in theirs"
    assert ("0.5" in found.ours.source, "0.25" in found.theirs.source) == (True, True)


def test_a_complex_number_may_stand_in_the_program():
    theirs = of_linear(lambda self, x: torch.fft.rfft(self.linear(x), norm="ortho").abs())

    def ours(p, x, times=1.0):
        return jnp.abs(jnp.fft.rfft(x @ p["kernel"] + times * p["bias"], norm="ortho"))

    assert not asked(ours, theirs)
    assert asked(partial(ours, times=2.0), theirs).ours.source.startswith("return jnp.abs(")


def test_a_weight_may_be_stacked_and_fused():
    """Each layer of it holds several of theirs."""

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer.a(x)) * layer.b(x)
        return x

    parts = {name: lambda: nn.Linear(4, 4, bias=False) for name in "ab"}
    theirs = Module(forward, layers=lambda: nn.ModuleList(Module(None, **parts) for _ in range(3)))
    weights = {
        "ab": [Weight(f"layers.{{layer}}.{name}.weight", "o i -> n o i", into={"n": n}) for n, name in enumerate("ab")]
    }

    def ours(p, x, given=lambda x: x):
        def layer(x, ab):
            a, b = jnp.einsum("ti,noi->nto", given(x), ab)
            return x + jnp.tanh(a) * b, None

        return jax.lax.scan(layer, x, p["ab"])[0]

    assert not asked(ours, theirs, weights)
    found = asked(partial(ours, given=jax.lax.stop_gradient), theirs, weights)
    assert found.kind == "theirs hands a gradient back here, ours does not: it is detached"


CHOICES = {
    "truth values": lambda kept: kept,
    "places": lambda kept: kept.nonzero(as_tuple=True),
    "rows": lambda kept: (kept.reshape(-1).nonzero().squeeze(1),),
}
"""How PyTorch chooses rows."""


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_computed_of_chosen_rows_alone_is_found(choice):
    """Ours computes all rows and masks, and for both losses at once."""
    inputs = {"x": numbers(2, 3, 5, 4, seed=4), "kept": np.arange(15).reshape(3, 5) % 3 > 0}

    def density(z):
        return torch.log(1 + z.square().sum(-1)) - torch.tanh(z).sum(-1)

    def forward(self, x, kept):
        losses = []
        for each in x:
            z = self.linear(each)
            z = z.reshape(-1, 3) if choice == "rows" else z
            losses.append(density(z[CHOICES[choice](kept)]).sum() / kept.sum())
        return losses[0] + 2 * losses[1]

    def ours(p, x, kept, power=2):
        z = affine(p, x)
        size = jnp.log(1 + (z**power).sum(-1))
        losses = jnp.where(kept, size - jnp.tanh(z).sum(-1), 0).sum((1, 2)) / kept.sum()
        return losses @ jnp.array([1.0, 2.0])

    theirs = of_linear(forward)
    assert not first_difference(ours, theirs, LINEAR, inputs)
    found = first_difference(partial(ours, power=4), theirs, LINEAR, inputs)
    assert "z**power" in found.ours.source
    assert "z.square()" in found.theirs.source


@pytest.mark.parametrize("fault", ["jnp.sqrt(4)", "jnp.log(2"])
def test_what_is_padded_at_its_end_is_found(fault):
    """As by models that attend within windows of one length."""

    def forward(self, x):
        x = F.pad(x, (0, 0, 0, 3))
        z = self.linear(x) / math.sqrt(3)
        return torch.log(1 + z.square())[:, :5]

    def ours(p, x):
        z = affine(p, x) / (jnp.sqrt(4) if "sqrt" in fault else jnp.sqrt(3))
        return jnp.log(1 + z**2) if "sqrt" in fault else jnp.log(2 + z**2)

    found = first_difference(ours, of_linear(forward), LINEAR, [numbers(2, 5, 4, seed=5)])
    assert fault in found.ours.source
    assert ("math.sqrt" in found.theirs.source) == ("sqrt" in fault)


def test_a_maximum_whose_gradient_one_side_stops_is_no_cause():
    """It is taken off before the exponential, and added again: its gradient is zero, whoever hands it back."""

    def forward(self, x):
        z = torch.tanh(self.linear(x))
        z = self.down(z) + z
        most, _ = torch.max(z, -1)
        return most + (z - torch.max(z, -1, keepdim=True)[0]).exp().sum(-1).log()

    def ours(p, x, kept=lambda z: z):
        z = jnp.tanh(affine(p, x))
        z = z @ p["down"].T + kept(z)
        return jax.nn.logsumexp(z, axis=-1)

    theirs = Module(forward, linear=linear, down=lambda: nn.Linear(3, 3, bias=False))
    weights = LINEAR | {"down": "down.weight"}
    assert not asked(ours, theirs, weights)
    found = asked(partial(ours, kept=lambda z: 0.5 * z + jax.lax.stop_gradient(0.5 * z)), theirs, weights)
    assert found.stage == "backward"
    assert "logsumexp" not in found.ours.source


def test_a_weight_that_is_computed_before_each_run_may_be_kept():
    def made():
        with pytest.warns(FutureWarning, match="weight_norm"):
            return nn.utils.weight_norm(linear())

    def ours(p, x, eps=0.0):
        return x @ (p["g"] * p["v"] / (jnp.linalg.norm(p["v"], axis=1, keepdims=True) + eps)).T + p["bias"]

    theirs = Module(lambda self, x: torch.tanh(self.linear(x)), linear=made)
    weights = {"g": "linear.weight_g", "v": "linear.weight_v", "bias": "linear.bias"}
    assert not asked(lambda p, x: jnp.tanh(ours(p, x)), theirs, weights)
    assert check_parity(lambda p, x: jnp.tanh(ours(p, x)), theirs, weights, [NUMBERS], gates=["1", "2"])
    assert "weight_norm" in asked(lambda p, x: jnp.tanh(ours(p, x, 0.1)), theirs, weights).theirs.operation


def test_a_weight_that_ours_never_reads_needs_no_map():
    theirs = Module(lambda self, x: self.down(torch.tanh(self.up(x))), up=lambda: linear(4), down=lambda: linear(4))
    up = {"kernel": theirs.up.weight.detach().numpy().T, "bias": theirs.up.bias.detach().numpy()}
    found = first_difference(lambda p, x: affine(p, jnp.tanh(affine(p, x))), theirs, None, [NUMBERS], params=up)
    assert (found.ours.function, found.theirs.module) == ("affine", "down")
    assert not found.unread


def test_a_factor_is_that_of_the_line_and_not_of_the_square_behind_it():
    theirs = of_linear(lambda self, x: torch.fft.rfft(self.linear(x), norm="ortho").abs().square(), 8)

    def ours(p, x):
        spectrum = jnp.fft.rfft(affine(p, x))
        return jnp.square(jnp.abs(spectrum))

    found = asked(ours, theirs)
    assert found.kind == "perhaps ours is 2.82843 (sqrt(8)) times theirs"


def test_numbers_that_stand_in_two_arrangements_are_no_others():
    """Theirs multiplies by a tenth before, and what differs is the order of the features."""

    def forward(self, x):
        y = self.linear(x)
        features = torch.cat([x[:, 1:2].sin(), x[:, 1:2].cos()], -1)
        return x[:, :1] + 0.05 * (torch.tanh(y) + y) + 0.1 * torch.tanh(features @ self.linear.weight[:, :2].T)

    def ours(p, x):
        y = affine(p, x)
        features = jnp.concatenate([jnp.cos(x[:, 1:2]), jnp.sin(x[:, 1:2])], -1)
        mixed = jnp.tanh(features @ p["kernel"][:2])
        return x[:, :1] + 0.1 * (0.5 * (jnp.tanh(y) + y) + mixed)

    found = asked(ours, of_linear(forward))
    assert found.kind.startswith("the same numbers in another order")
    assert found.ours.source.startswith("features = ")


def test_a_mask_of_another_large_number_is_a_mask():
    hidden = np.arange(6) > 3

    def forward(self, x):
        y = self.linear(x).T
        scores = (y @ y.T + torch.cos(y @ y.T)) / 2
        return (scores + torch.where(torch.tensor(hidden), torch.finfo(scores.dtype).min, 0.0)).softmax(-1) @ y

    def ours(p, x):
        y = affine(p, x).T
        scores = y @ y.T / 2 + jnp.cos(y @ y.T)
        return jax.nn.softmax(scores + jnp.where(hidden, -1e9, 0.0)) @ y

    found = asked(ours, of_linear(forward, 6))
    assert found.ours.source.startswith("scores = ")
    assert "masks" not in (found.kind or "")


def test_weights_that_are_added_share_a_gradient():
    theirs = of_linear(lambda self, x: self.linear(x) + self.shift)
    theirs.shift = nn.Parameter(torch.arange(3.0))
    assert not asked(lambda p, x: x @ p["kernel"] + (p["bias"] + p["shift"]), theirs, {**LINEAR, "shift": "shift"})


def test_a_parameter_may_be_a_list_of_places():
    theirs = of_linear(lambda self, x: self.linear(x)[:, self.places])
    theirs.register_buffer("places", torch.tensor([2, 0, 1]))

    def ours(p, x):
        return jax.checkpoint(lambda p: affine(p, x)[:, p["places"].astype(int)])(p)

    assert not asked(ours, theirs, {**LINEAR, "places": "places"})


ROOM = 6
CACHED = {"positions": "positions.weight", **{name: f"{name}.weight" for name in "qkv"}}


def decoded(p, x, keys_of="k", values_of="v", ahead=0):
    """Four steps of attention, in a cache that has room for six."""
    keys = values = jnp.zeros((2, ROOM, 8))
    steps = []
    for t in range(4):
        h = x[:, t : t + 1] + p["positions"][t]
        keys = jax.lax.dynamic_update_slice(keys, h @ p[keys_of].T, (0, t, 0))
        values = values.at[:, t].set((h @ p[values_of].T)[:, 0])
        scores = jnp.einsum("btd,bsd->bts", h @ p["q"].T, keys) / 8**0.5
        mixed = jax.nn.softmax(jnp.where(jnp.arange(ROOM) <= t + ahead, scores, -jnp.inf)) @ values
        steps.append(jax.nn.silu(mixed))
    return jnp.concatenate(steps, 1)


def decoded_there(self, x):
    keys, values, steps = [], [], []
    for t in range(4):
        h = x[:, t] + self.positions.weight[t]
        keys.append(self.k(h))
        values.append(self.v(h))
        scores = torch.einsum("bd,bsd->bs", self.q(h), torch.stack(keys, 1)) / 8**0.5
        mixed = torch.einsum("bs,bsd->bd", scores.softmax(-1), torch.stack(values, 1))
        steps.append(F.silu(mixed))
    return torch.stack(steps, 1)


@pytest.mark.parametrize(
    "fault, named",
    [
        ({}, ""),
        ({"ahead": 1}, "mixed = jax.nn.softmax(jnp.where("),
        ({"keys_of": "v"}, "keys.append("),
        ({"values_of": "k"}, "values.append("),
    ],
)
def test_what_is_in_a_cache_of_one_length_is_what_the_other_side_has(fault, named):
    layers = dict.fromkeys("qkv", lambda: nn.Linear(8, 8, bias=False))
    theirs = Module(decoded_there, positions=lambda: nn.Embedding(ROOM, 8), **layers)
    found = first_difference(partial(decoded, **fault), theirs, CACHED, [numbers(2, 4, 8)])
    assert bool(found) == bool(fault)
    assert named in (f"{found.ours.source} {found.theirs.source}" if found else "")
    assert "masks" not in (found.kind or "")


def test_an_axis_as_long_as_that_of_another_array_that_ends_with_zeros_is_none_of_it():
    places = np.arange(5), np.array([0, 1, 1, 2, 3])

    def forward(self, x):
        y = self.linear(x)
        counts = torch.zeros(5, 6).double().index_put((*map(torch.tensor, places),), y[:, 0])
        bent = torch.cat([torch.tanh(y[:, :4]), torch.tanh(y[:, 4:])], -1)
        return torch.cos(bent) @ torch.arange(1.0, 7).double() + counts.sum(-1)

    def ours(p, x):
        y = affine(p, x)
        counts = jnp.zeros((5, 6)).at[places].set(y[:, 0])
        bent = jnp.tanh(y) * jnp.array([1.0, 1.0, 1.0, 1.0, 2.0, 2.0])
        return jnp.cos(bent) @ jnp.arange(1.0, 7) + counts.sum(-1)

    found = asked(ours, of_linear(forward, 6))
    assert found.sure
    assert "bent = " in found.ours.source


def test_what_theirs_takes_with_the_other_sign_is_passed_where_they_part_elsewhere():
    """A sum of two terms, of which ours subtracts one and theirs adds it, times a negative number."""

    def forward(self, x):
        h = self.linear(x)
        normal = torch.tanh((h - h.mean()) / h.std()).mean()
        return sum(factor * term for factor, term in ((-0.5, h.exp().mean()), (1.0, normal)))

    def ours(p, x, ddof=0):
        h = affine(p, x)
        normal = jnp.tanh((h - h.mean()) / jnp.std(h, ddof=ddof)).mean()
        return normal - 0.5 * jnp.exp(h).mean()

    assert not asked(partial(ours, ddof=1), of_linear(forward))
    found = asked(ours, of_linear(forward))
    assert "jnp.std" in found.ours.source
