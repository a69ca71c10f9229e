"""The two-way rules between our parameters and the names and layouts of `torch_ref`.

Both sides call every module alike, so one short table of leaves says everything: which leaf becomes which, and how its
axes go. It knows nothing of architectures; what it converts is decided by the parameters themselves.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import einops
import numpy as np
from flax import traverse_util
from numpy.typing import ArrayLike

from jax_tformer.errors import InputError
from jax_tformer.model.functional import Params


class Rule(NamedTuple):
    """Parameters whose path ends in `ours` are called `theirs` at the end, with axes rearranged as `axes` says."""

    ours: str
    theirs: str
    axes: str


RULES = (
    Rule("query.kernel", "query.weight", "d h c -> (h c) d"),
    Rule("key.kernel", "key.weight", "d k c -> (k c) d"),
    Rule("value.kernel", "value.weight", "d k c -> (k c) d"),
    Rule("output.kernel", "output.weight", "h c d -> d (h c)"),
    Rule("query.bias", "query.bias", "h c -> (h c)"),
    Rule("key.bias", "key.bias", "k c -> (k c)"),
    Rule("value.bias", "value.bias", "k c -> (k c)"),
    Rule("kernel", "weight", "i o -> o i"),
    Rule("bias", "bias", "o -> o"),
    Rule("scale", "weight", "d -> d"),
    Rule("embedding", "weight", "v d -> v d"),
)
"""The first rule that matches holds."""

STACKED = "blocks"
"""Below a module of this name, our arrays carry a leading L axis and theirs a layer number in the name."""


class WeightsError(InputError):
    """Weights that do not fit; the message lists what is missing, unexpected, doubled, mis-shaped or mis-typed."""


class Slot(NamedTuple):
    """Where one of their arrays lies in our parameters."""

    path: str
    layer: int | None
    rule: Rule
    shape: tuple[int, ...]
    """Of our array, without the L axis."""
    dtype: np.dtype


def slots(shapes: Params) -> dict[str, Slot]:
    """Their name of every array -> its place in ours. `shapes` is a tree of arrays or of ShapeDtypeStruct.

    Raises WeightsError for a parameter that no rule covers, or if two would get one name.
    """
    found: dict[str, Slot] = {}
    for path, leaf in traverse_util.flatten_dict(shapes, sep=".").items():
        rule = _rule(path)
        stem = path.removesuffix(rule.ours)
        stacked = f".{STACKED}." in f".{stem}"
        shape = tuple(leaf.shape[1:] if stacked else leaf.shape)
        for layer in range(leaf.shape[0]) if stacked else (None,):
            numbered = stem if layer is None else stem.replace(f"{STACKED}.", f"{STACKED}.{layer}.", 1)
            name = numbered + rule.theirs
            if name in found:
                raise WeightsError(f"{path} and {found[name].path} would both be called {name}")
            found[name] = Slot(path, layer, rule, shape, np.dtype(leaf.dtype))
    return found


def to_reference(params: Params) -> dict[str, np.ndarray]:
    """Our parameters under the names and in the layouts of `torch_ref`, bit for bit."""
    ours = {path: np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(params, sep=".").items()}
    theirs = {}
    for name, slot in slots(params).items():
        array = ours[slot.path] if slot.layer is None else ours[slot.path][slot.layer]
        theirs[name] = np.ascontiguousarray(einops.rearrange(array, slot.rule.axes))
    return theirs


def from_reference(weights: Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]], shapes: Params) -> Params:
    """The inverse of `to_reference`: parameters with the tree, shapes and dtypes of `shapes` (`net.shapes`).

    Every array must find its place and every place its array: raises WeightsError, which lists all that do not.
    """
    expected = slots(shapes)
    given, doubled = once(weights)
    complaints = _compare(given, expected, doubled)
    if complaints:
        raise WeightsError("the weights do not fit the model: " + "; ".join(complaints))
    layers: dict[str, dict[int | None, np.ndarray]] = {}
    for name, slot in expected.items():
        before, after = slot.rule.axes.split(" -> ")
        sizes = dict(zip(before.split(), slot.shape, strict=True))
        array = einops.rearrange(given[name], f"{after} -> {before}", **sizes)
        layers.setdefault(slot.path, {})[slot.layer] = array
    arrays = {
        path: np.ascontiguousarray(parts[None]) if None in parts else np.stack([parts[i] for i in range(len(parts))])
        for path, parts in layers.items()
    }
    params: Params = traverse_util.unflatten_dict(arrays, sep=".")
    return params


def reference_shape(slot: Slot) -> tuple[int, ...]:
    """The shape of the array on their side."""
    return einops.rearrange(np.empty(slot.shape, bool), slot.rule.axes).shape


def _rule(path: str) -> Rule:
    for rule in RULES:
        if f".{path}".endswith(f".{rule.ours}"):
            return rule
    raise WeightsError(f"no rule says what {path} is called in the reference; add one to jax_tformer.weights.names")


def once(weights: Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays by name, and the names that are given more than once."""
    given: dict[str, np.ndarray] = {}
    doubled = []
    for name, array in weights.items() if isinstance(weights, Mapping) else weights:
        if name in given:
            doubled.append(name)
        given[name] = np.asarray(array)
    return given, doubled


def _compare(given: dict[str, np.ndarray], expected: dict[str, Slot], doubled: list[str]) -> list[str]:
    shapes, dtypes = [], []
    for name in sorted(given.keys() & expected.keys()):
        shape, dtype = reference_shape(expected[name]), expected[name].dtype
        if given[name].shape != shape:
            shapes.append(f"{name} is {list(given[name].shape)}, expected {list(shape)}")
        elif given[name].dtype != dtype:
            dtypes.append(f"{name} is {given[name].dtype}, expected {dtype}")
    groups = {
        "missing": sorted(expected.keys() - given.keys()),
        "unexpected": sorted(given.keys() - expected.keys()),
        "given twice": sorted(doubled),
        "of another shape": shapes,
        "of another type": dtypes,
    }
    return [f"{len(names)} {label} ({listed(names)})" for label, names in groups.items() if names]


def listed(names: Iterable[str], most: int = 6) -> str:
    """The names in order, the first few of many."""
    names = sorted(names)
    rest = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
