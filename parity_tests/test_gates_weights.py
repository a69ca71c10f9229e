"""The gates on pairs whose weights are stacked, fused or wrapped: a wrong map turns red, a right one is green."""

from functools import partial
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from parity import Weight, first_difference
from parity import check_parity as check_and_explain
from parity_tests.errors import parity_error
from parity_tests.small_modules import Tied, linear_rows, numbers

check_parity = partial(check_and_explain, explain=False)
WIDTH, HEADS, LAYERS = 4, 2, 3
X = numbers(2, 5, WIDTH)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        query, key, value = self.fused(x).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        return x + nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def ours(params, x):
    def block(x, layer):
        query, key, value = (
            jnp.einsum("btd,dhc->bthc", x, layer[name]["kernel"]) + layer[name]["bias"][None, None]
            for name in ("query", "key", "value")
        )
        weights = jax.nn.softmax(jnp.einsum("bthc,bshc->bhts", query, key) / (WIDTH // HEADS) ** 0.5, axis=-1)
        return x + jnp.einsum("bhts,bshc->bthc", weights, value).reshape(x.shape), None

    return jax.lax.scan(block, x, params["blocks"])[0]


def fused(*names):
    rows, sizes = {}, {"part": 3, "h": HEADS}
    for part, name in enumerate(names):
        kernel, part = "(part h c) i -> part i h c", {"part": part}
        rows[f"blocks.{name}.kernel"] = Weight("{layer}.fused.weight", kernel, sizes, part)
        rows[f"blocks.{name}.bias"] = Weight("{layer}.fused.bias", "(part h c) -> part h c", sizes, part)
    return rows


RIGHT = fused("query", "key", "value")


def test_stacked_layers_of_a_fused_projection_pass_every_gate():
    """The key's part of the bias has no gradient; AdamW would make steps of its rounding errors."""
    figures = check_parity(ours, blocks(), RIGHT, [X], zero_gradients=["blocks.key.bias"])
    assert [figure.gate[0] for figure in figures] == ["9", "1", "2", "3", "5"]


def normed():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6))
    with torch.no_grad():
        module(torch.randn(50, WIDTH) * 3)  # moves the running statistics away from 0 and 1
    return module


NORMED = linear_rows("0", ours="layers.")
NORMED |= {"layers.1.scale": "1.weight", "layers.1.bias": "1.bias"}
NORMED |= {"layers.1.mean": "1.running_mean", "layers.1.var": "1.running_var"}


def with_nnx(epsilon=1e-5):
    """(function of the state, the state), with a layer of dropout, whose key and count are no weights."""
    rngs = nnx.Rngs(0)
    norm = nnx.BatchNorm(6, use_running_average=True, epsilon=epsilon, rngs=rngs)
    graph, state = nnx.split(nnx.Sequential(nnx.Linear(WIDTH, 6, rngs=rngs), norm, nnx.Dropout(0.5, rngs=rngs)))

    def function(state, x):
        model = nnx.merge(graph, state)
        model.eval()
        with jax.numpy_rank_promotion("allow"):
            return model(x)

    return function, state


def test_a_state_of_nnx_with_running_statistics():
    """The state has a key of random numbers, too, which is no number."""
    function, state = with_nnx()
    check_parity(function, normed(), NORMED, [X[0]], gates=["9", "1", "2", "5"], like=state)
    assert not first_difference(function, normed(), NORMED, [X[0]], like=state)
    function, state = with_nnx(epsilon=1e-3)
    found = first_difference(function, normed(), NORMED, [X[0]], like=state)
    assert found.stage == "forward"
    assert "0.001 in ours, 1e-05 in theirs" in str(found)


def test_a_count_among_the_weights():
    """BatchNorm counts its batches, in whole numbers: they go into our parameters and have no gradient."""

    function, state = with_nnx()

    def counted(p, x):
        return jnp.where(p["count"] == 1, function(p["model"], x), jnp.nan)

    weights = {f"model.{path}": row for path, row in NORMED.items()} | {"count": "1.num_batches_tracked"}
    like = {"model": state, "count": np.array(0)}
    check_parity(counted, normed(), weights, [X[0]], like=like)
    assert not first_difference(counted, normed(), weights, [X[0]], like=like)


class Perceptron(equinox.Module):
    layers: list[equinox.nn.Linear]
    activation: Any

    def __call__(self, x):
        return self.layers[1](self.activation(self.layers[0](x)))


def test_a_module_of_equinox():
    module = nn.Sequential(nn.Linear(WIDTH, 6), nn.SiLU(), nn.Linear(6, 2))
    layers = [equinox.nn.Linear(*sizes, key=jax.random.key(0)) for sizes in ((WIDTH, 6), (6, 2))]
    rows = {f"layers.{layer}.{name}": f"{2 * layer}.{name}" for layer in range(2) for name in ("weight", "bias")}
    ours, like = jax.vmap(Perceptron.__call__, (None, 0)), Perceptron(layers, jax.nn.silu)
    check_parity(ours, module, rows, [X[0]], like=like)


def nnx_pair(**rows):
    function, state = with_nnx()
    return function, normed(), NORMED | {f"layers.1.{name}": row for name, row in rows.items()}, [X[0]], {"like": state}


def zero(name):
    return lambda: (ours, blocks(), RIGHT, [X], {"gates": ["2"], "zero_gradients": [name]})


@pytest.mark.parametrize(
    "pair, message",
    [
        (lambda: (ours, blocks(), fused("key", "query", "value"), [X], {}), "gate 1 activations"),
        (lambda: nnx_pair(mean="1.running_var", var="1.running_mean"), r"NaN at|gate 1 activations"),
        # Ours keeps a mean of 0 and a variance of 1: only gate 1 can say so, since buffers need not be mapped.
        (lambda: nnx_pair(mean=None, var=None), "gate 1 activations"),
        (zero("blocks.query.bias"), r"the gradient of 0.fused.bias is said to be zero, and is \d"),
        (zero("nope"), r"zero_gradients names 'nope', .* '2.fused.weight'\]; and ours: \['blocks"),
    ],
)
def test_a_wrong_pair_is_red(pair, message):
    *arguments, options = pair()
    with parity_error(message):
        check_parity(*arguments, **options)


class Many(nn.Linear):
    def forward(self, *inputs, last=0.0):
        return super().forward(sum((number + 1) * tensor for number, tensor in enumerate(inputs)) - last)


def many(params, *inputs, last=0.0):
    total = sum((number + 1) * tensor for number, tensor in enumerate(inputs)) - last
    return total @ params["kernel"] + params["bias"][None]


LINEAR = {"kernel": ("weight", "o i -> i o"), "bias": "bias"}


def test_arguments_keep_their_order_and_their_names():
    """ "10" sorts before "2", and so stood there."""
    inputs = [numbers(3, WIDTH, seed=seed) for seed in range(12)]
    check_parity(many, Many(WIDTH, 2), LINEAR, inputs, gates=["1"])
    check_parity(many, Many(WIDTH, 2), LINEAR, {"last": inputs[0]}, gates=["1"])


def test_a_compiled_module_goes_by_the_names_that_it_had():
    compiled = torch.compile(nn.Linear(WIDTH, 2), backend="eager")
    check_parity(many, compiled, LINEAR, [X[0]], gates=["9", "1", "2"])


def test_a_tied_weight_has_one_name():
    """The names that the module's state_dict shows are two."""

    def tied(params, tokens):
        return params["table"][tokens] @ params["table"].T

    check_parity(tied, Tied(7, WIDTH), {"table": "embedding.weight"}, [np.arange(5)], gates=["9", "1", "2"])
    message = r"misses \['embedding.weight'\] \(head.weight is another name of embedding.weight\)$"
    with parity_error(message):
        check_parity(tied, Tied(7, WIDTH), {"table": "head.weight"}, [np.arange(5)])
