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
from torch import Tensor, nn

from parity import ParityError, Weight, first_difference
from parity import check_parity as check_and_explain

check_parity = partial(check_and_explain, explain=False)
WIDTH, HEADS, LAYERS = 4, 2, 3
X = np.random.default_rng(0).standard_normal((2, 5, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.fused(x).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        return x + nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def ours(params: Any, x: jax.Array) -> jax.Array:
    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        query, key, value = (
            jnp.einsum("btd,dhc->bthc", x, layer[name]["kernel"]) + layer[name]["bias"][None, None]
            for name in ("query", "key", "value")
        )
        weights = jax.nn.softmax(jnp.einsum("bthc,bshc->bhts", query, key) / (WIDTH // HEADS) ** 0.5, axis=-1)
        return x + jnp.einsum("bhts,bshc->bthc", weights, value).reshape(x.shape), None

    return jax.lax.scan(block, x, params["blocks"])[0]


def fused(query: int, key: int, value: int) -> dict[str, Weight]:
    rows, sizes = {}, {"part": 3, "h": HEADS}
    for name, part in {"query": query, "key": key, "value": value}.items():
        rows[f"blocks.{name}.kernel"] = Weight(
            "{layer}.fused.weight", "(part h c) i -> part i h c", sizes, {"part": part}
        )
        rows[f"blocks.{name}.bias"] = Weight("{layer}.fused.bias", "(part h c) -> part h c", sizes, {"part": part})
    return rows


def test_stacked_layers_of_a_fused_projection_pass_every_gate() -> None:
    """The key's part of the bias has no gradient; AdamW would make steps of its rounding errors."""
    weights = fused(0, 1, 2)
    figures = check_parity(ours, blocks(), weights, [X], zero_gradients=["blocks.key.bias"])
    assert [figure.gate[0] for figure in figures] == ["9", "1", "2", "3", "5"]


def test_query_and_key_exchanged_in_the_map() -> None:
    with pytest.raises(ParityError, match="gate 1 activations"):
        check_parity(ours, blocks(), fused(1, 0, 2), [X])


def test_a_part_whose_gradient_is_said_to_be_zero_must_be() -> None:
    with pytest.raises(ParityError, match=r"the gradient of 0.fused.bias is said to be zero, and is \d"):
        check_parity(ours, blocks(), fused(0, 1, 2), [X], gates=["2"], zero_gradients=["blocks.query.bias"])
    with pytest.raises(ParityError, match=r"zero_gradients names 'nope', .* '2.fused.weight'\]; and ours: \['blocks"):
        check_parity(ours, blocks(), fused(0, 1, 2), [X], gates=["2"], zero_gradients=["nope"])


def normed() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6))
    with torch.no_grad():
        module(torch.randn(50, WIDTH) * 3)  # moves the running statistics away from 0 and 1
    return module


NORMED = {
    "layers.0.kernel": ("0.weight", "o i -> i o"),
    "layers.0.bias": "0.bias",
    "layers.1.scale": "1.weight",
    "layers.1.bias": "1.bias",
    "layers.1.mean": "1.running_mean",
    "layers.1.var": "1.running_var",
}


def with_nnx(epsilon: float = 1e-5) -> tuple[Any, Any]:
    """(function of the state, the state), with a layer of dropout, whose key and count are no weights."""
    rngs = nnx.Rngs(0)
    norm = nnx.BatchNorm(6, use_running_average=True, epsilon=epsilon, rngs=rngs)
    graph, state = nnx.split(nnx.Sequential(nnx.Linear(WIDTH, 6, rngs=rngs), norm, nnx.Dropout(0.5, rngs=rngs)))

    def function(state: Any, x: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        model.eval()
        with jax.numpy_rank_promotion("allow"):
            return model(x)

    return function, state


def test_a_state_of_nnx_with_running_statistics() -> None:
    function, state = with_nnx()
    figures = check_parity(function, normed(), NORMED, [X[0]], gates=["9", "1", "2", "5"], like=state)
    assert len(figures) == 4


def test_a_count_among_the_weights() -> None:
    """BatchNorm counts its batches, in whole numbers: they go into our parameters and have no gradient."""

    def function(p: Any, x: jax.Array) -> jax.Array:
        layers = p["layers"]
        y = x @ layers["0"]["kernel"] + layers["0"]["bias"][None]
        norm = layers["1"]
        y = (y - norm["mean"][None]) / jnp.sqrt(norm["var"][None] + 1e-5) * norm["scale"][None] + norm["bias"][None]
        return jnp.where(norm["count"] == 1, y, jnp.nan)

    weights = NORMED | {"layers.1.count": "1.num_batches_tracked"}
    assert len(check_parity(function, normed(), weights, [X[0]])) == 5
    assert not first_difference(function, normed(), weights, [X[0]])


def test_another_eps_and_exchanged_statistics_are_seen() -> None:
    function, state = with_nnx(epsilon=1e-6)
    with pytest.raises(ParityError, match="gate 1 activations"):
        check_parity(function, normed(), NORMED, [X[0]], like=state)
    function, state = with_nnx()
    swapped = NORMED | {"layers.1.mean": "1.running_var", "layers.1.var": "1.running_mean"}
    with pytest.raises(ParityError, match=r"NaN at|gate 1 activations"):
        check_parity(function, normed(), swapped, [X[0]], like=state)


def test_running_statistics_that_nobody_mapped() -> None:
    """Ours keeps a mean of 0 and a variance of 1: only gate 1 can say so, since buffers need not be mapped."""
    function, state = with_nnx()
    kept = NORMED | {"layers.1.mean": None, "layers.1.var": None}
    with pytest.raises(ParityError, match="gate 1 activations"):
        check_parity(function, normed(), kept, [X[0]], like=state)


class Perceptron(equinox.Module):
    layers: list[equinox.nn.Linear]
    activation: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](self.activation(self.layers[0](x)))


@pytest.mark.parametrize(("activation", "green"), [(jax.nn.silu, True), (jax.nn.gelu, False)])
def test_a_module_of_equinox(activation: Any, green: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 6), nn.SiLU(), nn.Linear(6, 2))
    keys = jax.random.split(jax.random.key(0), 2)
    like = Perceptron([equinox.nn.Linear(4, 6, key=keys[0]), equinox.nn.Linear(6, 2, key=keys[1])], activation)
    names = [(f"layers.{ours}", theirs) for ours, theirs in ((0, 0), (1, 2))]
    weights = {f"{ours}.{name}": f"{theirs}.{name}" for ours, theirs in names for name in ("weight", "bias")}
    if green:
        assert len(check_parity(jax.vmap(Perceptron.__call__, (None, 0)), module, weights, [X[0]], like=like)) == 5
        return
    with pytest.raises(ParityError, match="gate 1 activations"):
        check_parity(jax.vmap(Perceptron.__call__, (None, 0)), module, weights, [X[0]], like=like)


class Many(nn.Linear):
    def forward(self, *inputs: Tensor, last: Tensor | None = None) -> Tensor:
        total = sum((number + 1) * tensor for number, tensor in enumerate(inputs))
        return super().forward(total if last is None else total - last)


def many(params: Any, *inputs: jax.Array, last: Any = 0.0) -> jax.Array:
    total = sum((number + 1) * tensor for number, tensor in enumerate(inputs)) - last
    return total @ params["kernel"] + params["bias"][None]


def test_arguments_keep_their_order_and_their_names() -> None:
    """ "10" sorts before "2", and so stood there."""
    weights = {"kernel": ("weight", "o i -> i o"), "bias": "bias"}
    inputs = [np.random.default_rng(seed).standard_normal((3, WIDTH)) for seed in range(12)]
    check_parity(many, Many(WIDTH, 2), weights, inputs, gates=["1"])
    check_parity(many, Many(WIDTH, 2), weights, {"last": inputs[0]}, gates=["1"])


def test_the_first_difference_of_a_state_of_nnx() -> None:
    """The state has a key of random numbers, too, which is no number."""
    function, state = with_nnx()
    assert not first_difference(function, normed(), NORMED, [X[0]], like=state)
    function, state = with_nnx(epsilon=1e-3)
    found = first_difference(function, normed(), NORMED, [X[0]], like=state)
    assert found.stage == "forward"
    assert "0.001 in ours, 1e-05 in theirs" in str(found)


def test_a_compiled_module_goes_by_the_names_that_it_had() -> None:
    compiled = torch.compile(torch.nn.Linear(WIDTH, 2), backend="eager")
    check_parity(many, compiled, {"kernel": ("weight", "o i -> i o"), "bias": "bias"}, [X[0]], gates=["9", "1", "2"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def test_a_tied_weight_has_one_name() -> None:
    """The names that the module's state_dict shows are two."""
    tokens = np.arange(5)

    def tied(params: Any, tokens: jax.Array) -> jax.Array:
        return params["table"][tokens] @ params["table"].T

    check_parity(tied, Tied(), {"table": "embedding.weight"}, [tokens], gates=["9", "1", "2"])
    message = r"misses \['embedding.weight'\] \(head.weight is another name of embedding.weight\)$"
    with pytest.raises(ParityError, match=message):
        check_parity(tied, Tied(), {"table": "head.weight"}, [tokens])
