"""`match_weights` finds the maps of presets and of Hugging Face models by itself, and claims no more than it ran."""

import re
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from jax_tformer.functional import transformer
from jax_tformer.hub.families import from_huggingface
from jax_tformer.hub.names import from_reference
from parity import ParityError, Weight, check_parity, match_weights
from parity.gates.pytrees import paths
from parity.gates.torch_side import tensors_of
from parity.gates.weight_map import Weights
from parity.match.parameter_names import understand
from parity_tests.huggingface import INPUTS, Oracle
from parity_tests.localisation import weights_of
from parity_tests.matched import linear_shapes, shape, verified
from parity_tests.other_pairs.planting import PAIRS
from parity_tests.small_modules import Module, Tied, numbers
from tests.small_models import assert_same_bits
from torch_ref import reference
from twin.cases import CONFIGS, weights_for

pytestmark = pytest.mark.usefixtures("as_others_write")


def double(config):
    return config.with_dtype("float64")


def held(match, arrays):
    """Our parameters by path, made of the module's arrays by the rows of the match."""
    return Weights(match.weights, arrays, optional=list(arrays)).flat(arrays)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_enough_for_every_preset(name):
    config = double(CONFIGS[name])
    net, arrays = transformer(config), weights_for(config, 0.2)
    match = match_weights(net.shapes, reference(config))
    assert_same_bits(held(match, arrays), paths(from_reference(arrays, net.shapes)))
    assert not match.unsure
    assert not match.unmatched_ours
    assert not match.unmatched_theirs
    assert not match.verified
    assert {row.confidence for row in match.rows} == {"likely"}


def test_a_number_before_a_norm_whose_place_no_rule_tells_is_kept():
    """LeViT's projections are numbered, and their norms have no other name."""
    names = understand({f"stages.0.layers.{n}.module.batch_norm.weight": "BatchNorm2d" for n in range(4)})
    assert len({name.numbers for name in names.values()}) == 4


def first_output(self, **inputs):
    """Of a Hugging Face model, which takes our inputs by our names."""
    return self.model(**{INPUTS[name]: tensor for name, tensor in inputs.items()})[0]


@pytest.mark.parametrize("name", ["gpt2", "bert", "bert masked", "bart", "llama"])
def test_hugging_face_models_are_matched_and_verified(name):
    oracle = Oracle(name)
    arrays = oracle.random_weights(0.2, seed=0)
    net = transformer(double(oracle.config))
    expected = paths(from_reference(from_huggingface(oracle.json, arrays)[1], net.shapes))
    theirs = {f"model.{key}": array for key, array in arrays.items()}
    module = Module(first_output, model=lambda: oracle.model)
    by_name = match_weights(net.shapes, module)
    inputs = {name: array for name, array in oracle.batch("none", 1).items() if name in INPUTS}
    match = verified(net.shapes, module, lambda params, **inputs: net.apply(params, **inputs), inputs)
    assert_same_bits(held(match, theirs), expected)
    # By names alone they are the same.
    assert {row.ours: row.theirs for row in by_name.rows} == {row.ours: row.theirs for row in match.rows}
    assert not by_name.unsure
    # A key's bias moves all scores of a query alike, which the softmax takes out again; no hidden state needs a pooler.
    assert {row.ours for row in match.rows if row.confidence != "verified"} == {
        path for path in expected if path.endswith("key.bias") or path.startswith("pooler.")
    }
    assert ("casts to float32 taken out" in match.figures) == (name == "llama")


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_others_are_matched_and_verified(name):
    pair = import_module(f"parity_tests.other_pairs.{name}").pair()
    weights, arrays = weights_of(pair)
    shapes = jax.eval_shape(lambda: weights.into(arrays))
    match = verified(shapes, pair.theirs, pair.ours, pair.inputs)
    assert_same_bits(held(match, arrays), weights.flat(arrays))


def gated_module(swapped=False):
    """down(silu(gate(x)) * up(x)); with `swapped` the two are called by each other's names."""

    def forward(self, x):
        gate, up = (self.up, self.gate) if swapped else (self.gate, self.up)
        return self.down(nn.functional.silu(gate(x)) * up(x))

    return Module(forward, **dict.fromkeys(("gate", "up"), lambda: nn.Linear(6, 10)), down=lambda: nn.Linear(10, 6))


def linear(p, x):
    return x @ p["kernel"] + p["bias"]


def gated(p, x, activation=jax.nn.silu):
    return linear(p["down"], activation(linear(p["gate"], x)) * linear(p["up"], x))


GATED = {"gate": linear_shapes(6, 10), "up": linear_shapes(6, 10), "down": linear_shapes(10, 6)}
X = numbers(4, 6)


@pytest.mark.parametrize(
    "swapped, function, confidence, reason, said",
    [
        (False, gated, "verified", "name and shape", ""),
        (True, gated, "verified", "tie broken by running both; by name it would be gate.weight", ""),
        # Functions that differ are not taken for a wrong map, nor does a small difference hide a wrong name.
        (False, partial(gated, activation=jax.nn.gelu), "likely", "name and shape", "the functions differ"),
        (True, lambda p, x: gated(p, x) * 1.0001, "likely", "", r"^gate 1 is red, 1\.0e-04.*an eps"),
    ],
    ids=["right names", "swapped names", "other functions", "swapped and a little off"],
)
def test_running_both_decides_against_names_and_claims_no_more(swapped, function, confidence, reason, said):
    module = gated_module(swapped)
    match = match_weights(GATED, module, ours=function, inputs=[X])
    row = next(row for row in match.rows if row.ours == "gate.kernel")
    assert row.theirs == Weight("up.weight" if swapped else "gate.weight", "o i -> i o")
    assert row.reason.startswith(reason)
    assert {row.confidence for row in match.rows} == {confidence}
    assert match.verified == (confidence == "verified")
    assert re.search(said, match.figures)
    # Equal numbers decide as well as running, and names alone claim nothing.
    arrays = tensors_of(module)[0]
    by_numbers = match_weights(Weights(match.weights, arrays).into(arrays), module)
    assert by_numbers.weights == match.weights
    assert {row.reason for row in by_numbers.rows} == {"equal numbers"}
    assert not by_numbers.verified


@pytest.mark.parametrize("scalar", [(), (1,)])
def test_parameters_without_axes_are_matched(scalar):
    """CLIP's logit_scale, SigLIP's logit_bias (called by each other's names), and a gain in each of two layers."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(x * layer.gain)
        return x * self.logit_bias.exp() + self.logit_scale

    def number(value):
        return lambda: nn.Parameter(torch.tensor(value))

    theirs = Module(
        forward,
        logit_scale=number(0.7),
        logit_bias=number(-0.3),
        layers=lambda: nn.ModuleList(Module(None, gain=number(value)) for value in (0.5, 1.5)),
    )

    def ours(p, x):
        x = jnp.tanh(jnp.tanh(x * p["gain"][0]) * p["gain"][1])
        return x * jnp.exp(p["logit_scale"]) + p["logit_bias"]

    params = {"gain": shape(2), "logit_scale": shape(*scalar), "logit_bias": shape(*scalar)}
    match = verified(params, theirs, ours, [X])
    named = {row.ours: row.theirs for row in match.rows}
    assert "logit_bias" in str(named["logit_scale"])
    assert "logit_scale" in str(named["logit_bias"])
    check_parity(ours, theirs, match.weights, [X])


def test_compiled_modules_and_modules_without_numbers():
    compiled = torch.compile(gated_module(swapped=True))
    assert match_weights(GATED, compiled, ours=gated, inputs=[X]).weights["gate.bias"] == "up.bias"
    with torch.device("meta"):
        module = gated_module()
    assert match_weights(GATED, module).weights["gate.bias"] == "gate.bias"
    with pytest.raises(ValueError, match="meta device"):
        match_weights(GATED, module, ours=gated, inputs=[X])


def test_layers_by_turns_of_two_kinds_are_matched_by_the_numbers_that_they_have():
    """Where both sides count alike, a number is what it says, although each kind of theirs has only some of them."""
    kinds = ("mlp", "shared")
    module = nn.ModuleList(nn.ModuleDict({kinds[i % 2]: nn.Linear(8, 8, bias=False)}) for i in range(6))
    match = match_weights({f"blocks_{i}": {"ff": {"kernel": shape(8, 8)}} for i in range(6)}, module)
    assert match.unsure == ()
    found = {ours: theirs.name for ours, theirs in match.weights.items()}
    assert found == {f"blocks_{i}.ff.kernel": f"{i}.{kinds[i % 2]}.weight" for i in range(6)}


def test_a_bias_that_ours_lacks_is_named_although_it_is_zero():
    module = nn.Linear(6, 4)
    nn.init.zeros_(module.bias)
    match = match_weights({"kernel": shape(6, 4)}, module, ours=lambda p, x: x @ p["kernel"], inputs=[X])
    assert not match.verified
    assert "depend on bias" in match.figures
    assert match.unmatched_theirs == {"bias": "[4]; the outputs depend on it"}


def test_a_head_that_the_module_shares_is_named():
    params = {"embedding": shape(11, 6), "head": {"kernel": shape(6, 11)}}
    match = match_weights(params, Tied(11, 6), ours=lambda p, x: x, inputs=[X])
    assert match.weights == {"embedding": "embedding.weight"}
    assert "shares its head with embedding.weight" in match.unmatched_ours["head.kernel"]
    assert not match.verified
    assert "not run" in match.figures


def test_the_table_fits_a_terminal_and_the_python_is_the_map():
    config = CONFIGS["bert-base"]
    match = match_weights(transformer(config).shapes, Oracle("bert").model)
    assert max(map(len, match.table().splitlines())) <= 80
    assert "pooler.dense.weight [32, 32]; nothing of yours fits it" in match.table()
    made = {}
    exec(match.python(), made)
    assert made["weights"] == match.weights


def test_bad_input_is_told_in_a_line():
    with pytest.raises(TypeError, match=r"module is a dict; expected a torch\.nn\.Module"):
        match_weights(GATED, {})
    with pytest.raises(TypeError, match="has no floating array"):
        match_weights({}, gated_module())
    with pytest.raises(ValueError, match="ours without inputs"):
        match_weights(GATED, gated_module(), ours=gated)
    with pytest.raises(ParityError, match="shapes differ: ours"):
        match_weights(GATED, gated_module(), ours=lambda p, x: gated(p, x)[0], inputs=[X])
