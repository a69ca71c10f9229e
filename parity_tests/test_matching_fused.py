"""`match_weights` finds what one side fuses and the other keeps apart, in both directions."""

from itertools import product

import einops
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from parity import check_parity, first_difference, match_weights
from parity.gates.torch_side import tensors_of
from parity.gates.weight_map import Weights, nested, paths
from parity_tests.matched import linear_shapes, shape, verified
from parity_tests.small_modules import numbers
from tests.small_models import assert_same_bits

pytestmark = pytest.mark.usefixtures("as_others_write")
WIDTH, HEADS, GROUPS, HEAD, HIDDEN = 12, 4, 2, 6, 10
X = numbers(2, 5, WIDTH)


def one_after_the_other(fused, rows):
    ends = np.cumsum(rows)
    return [fused[end - n : end] for end, n in zip(ends, rows, strict=True)]


def by_heads(fused, rows):
    return [*einops.rearrange(fused, "(h n c) ... -> n (h c) ...", n=len(rows), c=HEAD)]


def by_groups(fused, rows):
    parts = einops.rearrange(fused, "(g r c) ... -> g r c ...", g=GROUPS, c=HEAD)
    cut = parts[:, :-2], parts[:, -2:-1], parts[:, -1:]
    return [einops.rearrange(part, "g r c ... -> (g r c) ...") for part in cut]


def by_rows(fused, rows):
    return [*einops.rearrange(fused, "(f n) ... -> n f ...", n=len(rows))]


def turned(pairs):
    """Pairs of rows, as Meta has them, as halves of a head."""
    return einops.rearrange(pairs, "(h c two) ... -> (h two c) ...", two=2, c=HEAD // 2)


QKV, GATED = ("query", "key", "value"), ("gate", "up")
CASES = {
    "queries, keys, values": (QKV, one_after_the_other, HEADS),
    "fewer keys": (QKV, one_after_the_other, GROUPS),
    "keys first": (("key", "query", "value"), one_after_the_other, HEADS),
    "values before keys": (("query", "value", "key"), one_after_the_other, GROUPS),
    "by heads": (QKV, by_heads, HEADS),
    "by heads, values first": (("value", "key", "query"), by_heads, HEADS),
    "by groups": (QKV, by_groups, GROUPS),
    "one group": (QKV, one_after_the_other, 1),
    "gate, up": (GATED, one_after_the_other, GROUPS),
    "rows in turn": (GATED, by_rows, GROUPS),
    "pairs": ((), None, GROUPS),
    "fused pairs": (QKV, one_after_the_other, GROUPS),
    "fused pairs by heads": (QKV, by_heads, HEADS),
}
"""What is fused in one layer, how, and how many heads of keys there are; pairs of rows are rotated where it says so."""
COSINES, SINES = np.cos(ANGLES := np.outer(np.arange(5), 0.5 ** np.arange(HEAD // 2))), np.sin(ANGLES)


def sizes_of(case, fused):
    names, _, groups = CASES[case]
    outputs = {"query": HEADS * HEAD, "key": groups * HEAD, "value": groups * HEAD, "gate": HIDDEN, "up": HIDDEN}
    if fused and names:
        outputs = {"_".join(names): sum(outputs.pop(name) for name in names)} | outputs
    sizes = {name: (WIDTH, output) for name, output in outputs.items()}
    return sizes | {"out": (HEADS * HEAD, WIDTH), "down": (HIDDEN, WIDTH)}


def forward(case, fused, weights, x, np):
    """Attention with rotary embeddings, then a gated layer; `np` is jax.numpy or torch. Weights are (output, input)."""
    names, split, _ = CASES[case]
    if fused and names:
        rows = [sizes_of(case, fused=False)[name][1] for name in names]
        for leaf in ("weight", "bias"):
            parts = split(weights[f"{'_'.join(names)}.{leaf}"], rows)
            weights |= {f"{name}.{leaf}": part for name, part in zip(names, parts, strict=True)}
    if fused and "pairs" in case:
        held = [f"{name}.{leaf}" for name in ("query", "key") for leaf in ("weight", "bias")]
        weights |= {name: turned(weights[name]) for name in held}

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = x + attention(linear, x, np)
    return x + linear("down", np.tanh(linear("gate", x)) * linear("up", x))


def attention(linear, x, np):
    """Rotary embeddings, as many queries for each key as there are; `linear(name, x)` projects."""
    sines, cosines = (np.asarray(each, dtype=x.dtype) for each in (SINES, COSINES))

    def heads(name):
        each = einops.rearrange(linear(name, x), "b t (h c) -> b h t c", c=HEAD)
        return einops.repeat(each, "b h t c -> b (h r) t c", r=HEADS // each.shape[1])

    def rotated(each):
        one, other = each[..., : HEAD // 2], each[..., HEAD // 2 :]
        return np.concatenate([one * cosines - other * sines, other * cosines + one * sines], -1)

    scores = np.exp(rotated(heads("query")) @ rotated(heads("key")).swapaxes(-1, -2) / HEAD**0.5)
    mixed = scores / scores.sum(-1)[..., None] @ heads("value")
    return linear("out", einops.rearrange(mixed, "b h t c -> b t (h c)"))


class Theirs(nn.Module):
    num_heads = HEADS

    def __init__(self, case, fused):
        super().__init__()
        torch.manual_seed(0)
        self.case, self.fused, self.num_key_value_heads = case, fused, CASES[case][2]
        for name, size in sizes_of(case, fused).items():
            setattr(self, name, nn.Linear(*size))

    def forward(self, x):
        return forward(self.case, self.fused, dict(self.named_parameters()), x, torch)


def pair(case, fused):
    """(our function, our shapes, their module); `fused` says whose weights are."""

    def ours(params, x):
        weights = {f"{name}.weight": layer["kernel"].T for name, layer in params.items()}
        weights |= {f"{name}.bias": layer["bias"] for name, layer in params.items()}
        return forward(case, fused == "ours", weights, x, jnp)

    shapes = {name: linear_shapes(*size) for name, size in sizes_of(case, fused == "ours").items()}
    return ours, shapes, Theirs(case, fused == "theirs")


def held(match, module, shapes):
    """Our parameters, made of the module's by the rows of the match, and back to the bit."""
    arrays = tensors_of(module)[0]
    weights = Weights(match.weights, arrays, like=shapes)
    params = weights.into(arrays)
    assert_same_bits(weights.back(params), arrays)
    return params


@pytest.mark.parametrize("fused", ["ours", "theirs"])
@pytest.mark.parametrize("case", CASES)
def test_what_one_side_fuses_is_found(case, fused):
    ours, shapes, module = pair(case, fused)
    match, named = verified(shapes, module, ours, [X]), match_weights(shapes, module)
    assert not first_difference(ours, module, match.weights, [X])
    # Names alone say that there are two ways, but for one group of heads.
    names = CASES[case][0]
    rows = (2 if fused == "ours" else 2 * len(names)) if names and CASES[case][2] > 1 else 0
    assert len(named.unsure) == rows
    # The same from the numbers alone, where biases are still zero.
    for name, tensor in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(tensor)
    params = held(match, module, shapes)
    found = match_weights(params, module)
    for tensor in module.parameters():
        nn.init.normal_(tensor)
    assert_same_bits(held(found, module, shapes), held(match, module, shapes))


SIZES = {"gate": (7, WIDTH), "up": (7, WIDTH), "down": (WIDTH, 7)}
FORMS = ("apart", "experts", "experts, gate and up", "layers and experts", "layers, experts, gate and up")
"""What is one array."""


def together(form):
    """Whether layers are one array, whether experts are, and whether gate and up are."""
    return [name in form for name in ("layers", "experts", "gate and up")]


def path_of(form, layer, expert, name):
    """Of an array; a number that is a place on an axis of it is not in its path."""
    layers, experts, _ = together(form)
    return "layers" + f".{layer}" * (not layers) + ".experts" + f".{expert}" * (not experts) + f".{name}"


def paths_in(form):
    """Every array of two layers of three experts by its path, with its shape."""
    layers, experts, fused = together(form)
    sizes = {"gate_up": (14, WIDTH), "down": SIZES["down"]} if fused else SIZES
    lead = (2,) * layers + (3,) * experts
    return {path_of(form, *place, name): (*lead, *sizes[name]) for place in np.ndindex(2, 3) for name in sizes}


def mixture(form, weights, x, np):
    """Two layers of experts, whose arrays are (..., output, input)."""
    layers, experts, fused = together(form)

    def weight(layer, expert, name):
        return weights[path_of(form, layer, expert, name)][(layer,) * layers + (expert,) * experts]

    for layer, expert in product(range(2), range(3)):
        names = ("gate_up",) if fused else ("gate", "up")
        gate, up = np.concatenate([weight(layer, expert, name) for name in names]).reshape(2, -1, WIDTH)
        x = x + (np.tanh(x @ gate.T * (expert + 1)) * (x @ up.T)) @ weight(layer, expert, "down").T
    return x


class Mixture(nn.Module):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        for path, size in paths_in(form).items():
            place = self
            for name in path.split(".")[:-1]:
                if not hasattr(place, name):
                    place.add_module(name, nn.Module())
                place = getattr(place, name)
            place.register_parameter(path.split(".")[-1], nn.Parameter(torch.randn(size) / 3))

    def forward(self, x):
        return mixture(self.form, dict(self.named_parameters()), x, torch)


@pytest.mark.parametrize("mine, their", [(a, b) for a in FORMS for b in FORMS if "apart" in (a, b)])
def test_experts_and_layers_in_one_array_or_apart(mine, their):
    def ours(params, x):
        return mixture(mine, {path: array.swapaxes(-1, -2) for path, array in paths(params).items()}, x, jnp)

    shapes = nested({path: shape(*size[:-2], *size[:-3:-1]) for path, size in paths_in(mine).items()})
    module = Mixture(their)
    match = verified(shapes, module, ours, [X])
    check_parity(ours, module, match.weights, [X], gates=["9", "1", "2"])
    params = held(match, module, shapes)
    found = match_weights(params, module)
    assert {row.reason for row in found.rows} == {"equal numbers"}
    assert found.weights == match.weights
