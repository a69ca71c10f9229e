"""What names cannot decide `match_weights` decides by running both: orders and orientations; and names of others."""

from itertools import product

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from parity import match_weights
from parity_tests.matched import linear_shapes, shape, verified
from parity_tests.small_modules import Module, numbers

pytestmark = pytest.mark.usefixtures("as_others_write")
WIDTH, HEADS, HEAD = 16, 4, 4
X = numbers(2, 5, WIDTH)


def names(match):
    return {row.ours: row.theirs if isinstance(row.theirs, str) else row.theirs.name for row in match.rows}


PLAIN = [(shape(WIDTH, WIDTH), shape(WIDTH)) for _ in range(3)]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("backwards", [True, False])
def test_square_matrices_in_a_list_without_names(transposed, backwards):
    def ours(layers, x):
        for place, (matrix, bias) in enumerate(reversed(layers) if backwards else layers):
            x = (jnp.tanh(x) if place else x) @ (matrix.T if transposed else matrix) + bias
        return x

    wide = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    layers = nn.Sequential(wide[0], nn.Tanh(), wide[1], nn.Tanh(), wide[2])
    match = verified(PLAIN, layers, ours, [X])
    order = (4, 2, 0) if backwards else (0, 2, 4)
    assert names(match) == {
        f"{layer}.{place}": f"{number}.{leaf}"
        for layer, number in enumerate(order)
        for place, leaf in enumerate(("weight", "bias"))
    }
    assert {isinstance(match.weights[f"{layer}.0"], str) for layer in range(3)} == {transposed}
    # Without running, it does not know which way they lie, and says so.
    assert {row.ours for row in match_weights(PLAIN, layers).unsure} == {"0.0", "1.0", "2.0"}


@pytest.mark.parametrize("layout", ["OIH", "HIO", "HOI"])
def test_kernels_with_as_many_inputs_as_outputs(layout):
    """Their norms go by each other's names; PyTorch's own have no derivative by running statistics."""
    leaves = {"mean": "running_mean", "var": "running_var", "scale": "weight", "bias": "bias"}

    def convolve(p, x):
        dimensions = ("NCH", layout, "NCH")
        return jax.lax.conv_general_dilated(x, p["w"], (1,), "VALID", dimension_numbers=dimensions) + p["b"][:, None]

    def norm(p, x):
        mean, var, scale, bias = (p[leaf][:, None] for leaf in leaves)
        return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias

    def ours(p, x):
        return norm(p["norm1"], convolve(p["c2"], jax.nn.relu(norm(p["norm2"], convolve(p["c1"], x)))))

    sizes = {"O": 6, "I": 6, "H": 3}
    layer = {"w": shape(*(sizes[axis] for axis in layout)), "b": shape(6)}
    statistics = dict.fromkeys(leaves, shape(6))
    theirs = Module(
        lambda self, x: self.bn2(self.second(torch.relu(self.bn1(self.first(x))))),
        **dict.fromkeys(("first", "second"), lambda: nn.Conv1d(6, 6, 3)),
        **dict.fromkeys(("bn1", "bn2"), lambda: nn.BatchNorm1d(6)),
    )
    params = {"c1": layer, "c2": layer, "norm1": statistics, "norm2": statistics}
    match = verified(params, theirs, ours, [numbers(2, 6, 9)])
    convolutions = {"c1.w": "first.weight", "c1.b": "first.bias", "c2.w": "second.weight", "c2.b": "second.bias"}
    norms = {f"norm{n}.{leaf}": f"bn{3 - n}.{their}" for n in (1, 2) for leaf, their in leaves.items()}
    assert names(match) == convolutions | norms


def test_names_of_pytorchs_transformer():
    """Layers that lie apart, three norms that are only numbered, two fused attentions in one layer."""
    norm = {"scale": shape(WIDTH), "bias": shape(WIDTH)}
    heads = {
        name: {"kernel": shape(WIDTH, HEADS, HEAD), "bias": shape(HEADS, HEAD)} for name in ("query", "key", "value")
    }
    heads["out"] = {"kernel": shape(HEADS, HEAD, WIDTH), "bias": shape(WIDTH)}
    encoder = {
        "attention": heads,
        "ln1": norm,
        "ln2": norm,
        "mlp": {"fc1": linear_shapes(WIDTH, 24), "fc2": linear_shapes(24, WIDTH)},
    }
    decoder = encoder | {"cross_attention": heads, "ln3": norm}
    params = {"encoder_0": encoder, "encoder_1": encoder, "decoder_0": decoder, "decoder_1": decoder}
    final = {"encoder_norm": norm, "decoder_norm": norm}
    match = match_weights({**params, **final}, nn.Transformer(WIDTH, HEADS, 2, 2, 24, batch_first=True))
    assert not match.unsure
    assert not match.unmatched_ours
    assert not match.unmatched_theirs
    both = {"ln1.scale": "norm1.weight", "ln2.bias": "norm2.bias", "mlp.fc2.bias": "linear2.bias"}
    both["attention.key.kernel"] = "self_attn.in_proj_weight"
    more = {"ln3.scale": "norm3.weight", "cross_attention.value.bias": "multihead_attn.in_proj_bias"}
    for stack, expected in (("encoder", both), ("decoder", both | more)):
        for layer, (ours, theirs) in product(range(2), expected.items()):
            assert names(match)[f"{stack}_{layer}.{ours}"] == f"{stack}.layers.{layer}.{theirs}"
