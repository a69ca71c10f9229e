"""Weight maps: bit for bit there and back, whatever is stacked, fused or wrapped; each mistake in one sentence."""

from typing import Any

import einops
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from ml_dtypes import bfloat16

from parity import Weight
from parity.gates.pytrees import is_floating, paths
from parity.gates.weight_map import Weights
from parity_tests.errors import parity_error
from parity_tests.small_modules import numbers
from tests.small_models import assert_same_bits

LAYERS, WIDTH, HEADS = 11, 6, 2


SIZES = {"part": 3, "h": HEADS}


def fused(part, layer="{layer}"):
    return Weight(f"h.{layer}.attn.weight", "i (part h c) -> part i h c", SIZES, {"part": part})


def fused_bias(part):
    return Weight("h.{layer}.attn.bias", "(part h c) -> part h c", SIZES, {"part": part})


FUSED = {"embed": "wte.weight", "head.kernel": ("head.weight", "v d -> d v"), "scale": "scale"}
for number, projection in enumerate(("query", "key", "value")):
    FUSED |= {f"blocks.{projection}.kernel": fused(number), f"blocks.{projection}.bias": fused_bias(number)}


def module_tensors(dtype=np.float64):
    """Of a module with layers 0 to 10, so that their numbers sort otherwise than their names."""
    shapes = {"wte.weight": (9, WIDTH), "head.weight": (9, WIDTH), "scale": ()}
    for layer in range(LAYERS):
        shapes |= {f"h.{layer}.attn.weight": (WIDTH, 3 * WIDTH), f"h.{layer}.attn.bias": (3 * WIDTH,)}
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, bfloat16, np.int64])
def test_stacked_layers_of_a_fused_matrix_there_and_back(dtype):
    tensors = module_tensors(dtype)
    weights = Weights(FUSED, tensors)
    params = weights.into(tensors)
    assert_same_bits(weights.back(params), tensors)
    kernel = params["blocks"]["key"]["kernel"]
    assert kernel.shape == (LAYERS, WIDTH, HEADS, WIDTH // HEADS) == weights.shapes["blocks.key.kernel"]
    for layer in range(LAYERS):
        second = tensors[f"h.{layer}.attn.weight"][:, WIDTH : 2 * WIDTH]
        assert np.array_equal(kernel[layer], second.reshape(WIDTH, HEADS, -1))
    assert weights.ours_to_theirs["blocks.key.bias"] == [(f"h.{layer}.attn.bias",) for layer in range(LAYERS)]
    assert np.array_equal(params["head"]["kernel"], tensors["head.weight"].T)


@pytest.mark.parametrize(
    "axes, sizes",
    {
        "a (b c) d -> (d b) c a": {"c": 2},
        "(a e) b d -> e b (a d)": {"e": 2},
        "a ... -> ... a": {},
        "(a b) ... (c d) -> d (b ...) a c": {"a": 2, "c": 5},
        "a b c -> a 1 b c": {},
    }.items(),
)
def test_every_pattern_of_einops_can_be_undone(axes, sizes):
    tensors = {"x": numbers(4, 6, 5)}
    weights = Weights({"y": Weight("x", axes, sizes)}, tensors)
    params = weights.into(tensors)
    assert np.array_equal(params["y"], einops.rearrange(tensors["x"], axes, **sizes))
    assert_same_bits(weights.back(params), tensors)


class Mixer(equinox.Module):
    layers: list[equinox.nn.Linear]
    value: jax.Array
    activation: Any
    eps: float


class Variables(linen.Module):
    @linen.compact
    def __call__(self, x):
        boxed = linen.with_partitioning(linen.initializers.lecun_normal(), ("in", "out"))
        return linen.BatchNorm(use_running_average=True)(linen.Dense(3, kernel_init=boxed)(x))


def of_nnx():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))


def of_equinox():
    keys = jax.random.split(jax.random.key(0), 2)
    return Mixer([equinox.nn.Linear(2, 2, key=key) for key in keys], jnp.ones(3), jax.nn.relu, 1e-5)


OF_NNX = [f"layers.{name}" for name in ("0.bias", "0.kernel", "1.bias", "1.mean", "1.scale", "1.var")]
TREES = {
    "lists in dicts": (lambda: {"a": [{"b": jnp.ones(2)}, jnp.ones(3)]}, ["a.0.b", "a.1"]),
    "one array": (lambda: jnp.ones(2), [""]),
    "nnx.State": (lambda: nnx.state(of_nnx()), OF_NNX),
    "nnx.Module": (of_nnx, OF_NNX),
    "Linen": (
        lambda: Variables().init(jax.random.key(0), jnp.ones((1, 2))),
        [f"batch_stats.BatchNorm_0.{name}" for name in ("mean", "var")]
        + [f"params.{name}" for name in ("BatchNorm_0.bias", "BatchNorm_0.scale", "Dense_0.bias", "Dense_0.kernel")],
    ),
    "Equinox": (of_equinox, ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "value"]),
    "shapes alone": (lambda: {"a": jax.ShapeDtypeStruct((2, 3), np.float32)}, ["a"]),
}


@pytest.mark.parametrize("kind", TREES)
def test_our_parameters_may_be_any_pytree(kind):
    make, named = TREES[kind]
    like = make()
    before = paths(like)
    assert [path for path, leaf in before.items() if is_floating(leaf)] == named
    tensors = {f"their {path}": numbers(*before[path].shape) for path in named}
    weights = Weights({path: f"their {path}" for path in named}, tensors, like=like)
    params = weights.into(tensors)
    assert jax.tree.structure(params) == jax.tree.structure(like)
    after = paths(params)
    for path in named:
        assert np.array_equal(after[path], tensors[f"their {path}"])
    assert all(after[path] is leaf for path, leaf in before.items() if path not in named)
    assert_same_bits(weights.back(params), tensors)


ABSENT = object()
MISTAKES = {
    "unknown": (
        {"embed": "wte.kernel"},
        r"names \['wte.kernel'\], which the module lacks, \[\] more than once, and misses \['wte.weight'\]$",
    ),
    "unknown layers": (
        {"blocks.key.bias": "h.{layer}.attn.b"},
        r"names \['h.{layer}.attn.b'\], which the module lacks, \[\] more than once, and misses \[\]$",
    ),
    "doubled": ({"again": "scale"}, r"names \[\], .* \['scale'\] more than once, and misses \[\]$"),
    "a part and the whole": (
        {"whole": "h.{layer}.attn.bias"},
        r"names \[\], which the module lacks, \['h.0.attn.bias', 'h.1.attn.bias', .* more than once",
    ),
    "a layer twice": (
        {"first": fused(1, "0")},
        r"parts of h.0.attn.weight, of shape \[6, 18\], do not make it up: \['blocks.query.kernel', .*, 'first'\] "
        r"leave out 0 of its 108 numbers, and hold 36 more than once",
    ),
    "an uncovered part": (
        {"blocks.key.bias": fused_bias(2)},
        r"parts of h.0.attn.bias, of shape \[18\], do not make it up: .* leave out 6 of its 18 numbers, and hold 6 ",
    ),
    "a part that is not there": (
        {"blocks.key.bias": fused_bias(3)},
        r"^blocks.key.bias is to be the part 3 of 'part', which is of size 3 in h.\{layer\}.attn.bias$",
    ),
    "an empty part": (
        {"scale": Weight("wte.weight", "v d -> v d", part={"v": (4, 4)}), "embed": "scale"},
        r"^scale is to be the part \(4, 4\) of 'v', which is of size 9 in wte.weight$",
    ),
    "a part of another axis": (
        {"blocks.key.bias": Weight("h.{layer}.attn.bias", "(part c) -> part c", {"part": 3}, {"parts": 1})},
        r"^blocks.key.bias is to be a part by \['parts'\]; '\(part c\) -> part c' gives the axes \['part', 'c'\]$",
    ),
    "a pattern that drops an axis": (
        {"embed": ("wte.weight", "v d -> v")},
        r"embed is to be wte.weight, of shape \[9, 6\], by 'v d -> v'; expected a pattern like 'o i -> i o' that can",
    ),
    "a size that does not divide": (
        {"embed": Weight("wte.weight", "(a b) d -> a b d", {"a": 4})},
        r"embed is to be wte.weight, of shape \[9, 6\], by .* with {'a': 4}; expected",
    ),
    "another kind of row": (
        {"embed": ("wte.weight", "v d -> d v", "x")},
        r"says \('wte.weight', 'v d -> d v', 'x'\) for embed; expected a name, \(name, pattern\), a Weight, or None",
    ),
    "a place that is left out": (
        {"embed": [Weight("wte.weight", "v d -> v n d", into={"n": 1})]},
        r"parts of embed, of shape \[9, 2, 6\], do not make it up: \['wte.weight'\] leave out 54 of its 108 ",
    ),
    "no left side": (
        {"scale": [Weight("scale", "-> n", into={"n": 0})]},
        r"^the weight mapping does not fit: scale is to be scale, of shape \[\], by '-> n'; expected a pattern",
    ),
    "pieces of two shapes": (
        {
            "scale": None,
            "head.kernel": [
                Weight("head.weight", "v d -> n d v", into={"n": 0}),
                Weight("scale", " -> n", into={"n": 1}),
            ],
        },
        r"^head.kernel is to be made of head.weight and scale, which would be \[2, 6, 9\] and \[2\]; expected one",
    ),
    "a place of another size": (
        {"embed": [Weight("wte.weight", "v d -> v d", into={"v": (0, 8)})]},
        r"^embed is to be the part \(0, 8\) of 'v', which is of size 9 in wte.weight$",
    ),
    "an array that is a folder": (
        {"embed.x": "scale", "scale": "wte.weight", "embed": "head.weight", "head.kernel": ABSENT},
        r"^the weight mapping makes embed an array, and has embed.x within it$",
    ),
    "nothing to keep": ({"angles": None}, r"keeps \['angles'\] as they are, and there is no `like` that has them"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_one_sentence_with_both_lists(mistake):
    change, message = MISTAKES[mistake]
    rows = {path: row for path, row in (FUSED | change).items() if row is not ABSENT}
    with parity_error(message) as error:
        Weights(rows, module_tensors())
    assert "\n" not in str(error.value)


def test_layers_of_different_shapes_are_not_stacked():
    tensors = {"h.0.up": np.ones(3), "h.1.up": np.ones(4)}
    message = r"^up is to stack h.\{layer\}.up, whose layers differ in shape: h.0.up is \[3\], h.1.up is \[4\]$"
    with parity_error(message):
        Weights({"up": "h.{layer}.up"}, tensors)


LIKE = {"up": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "steps": jnp.array(0)}
ROWS = {"up.kernel": ("up.weight", "o i -> i o"), "up.bias": "up.bias"}
UP = {"up.weight": np.ones((3, 2)), "up.bias": np.ones(3)}


@pytest.mark.parametrize(
    "like, message",
    [
        (
            LIKE["up"],
            r"it names \['up.bias', 'up.kernel'\], which they lack, and misses \['bias', 'kernel'\]; map",
        ),
        (LIKE | {"angles": jnp.ones(2)}, r"names \[\], which they lack, and misses \['angles'\]; .* None if it stays"),
        (
            {"up": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(3)}},
            r"^up.kernel is \[3, 2\] in our parameters, and the weight mapping makes \[2, 3\] of up.weight, "
            r"of shape \[3, 2\], by 'o i -> i o'$",
        ),
        ({"up": {"kernel": jnp.ones((2, 3)), "bias": 1.0}}, r"^up.bias is float in our parameters, and .* makes \[3\]"),
        (LIKE | {"t": jax.ShapeDtypeStruct((), np.int32)}, r"names \[\], which they lack, and misses \['t'\]"),
    ],
)
def test_a_mapping_that_contradicts_our_parameters(like, message):
    with parity_error(message):
        Weights(ROWS, UP, like=like)


def test_numbers_that_do_not_fit_the_mapping():
    weights = Weights(ROWS, UP, like=LIKE)
    with parity_error(r"our parameters lack \['up.bias'\], which .*; they have \['up.kernel'\]"):
        weights.back({"up": {"kernel": np.ones((2, 3))}})
    with parity_error(r"^up.kernel is \[3, 2\]; the weight mapping makes \[2, 3\] there$"):
        weights.back({"up": {"kernel": np.ones((3, 2)), "bias": np.ones(3)}})


def test_a_large_model_need_not_lie_in_memory_twice():
    weights = Weights(ROWS, UP)
    copies, views = weights.flat(UP), weights.flat(UP, np.asarray)
    for path, name in zip(ROWS, UP, strict=True):
        assert np.shares_memory(views[path], UP[name])
        assert not np.shares_memory(copies[path], UP[name])
