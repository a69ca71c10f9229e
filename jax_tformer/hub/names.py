"""Converts parameters between our names and layouts and those of `torch_ref`, in both directions,
and saves and loads parameters as safetensors with these names.

Both sides give every module the same name, so one short table of leaves is enough: each leaf's name there. Its axes
(`jax_tformer.model.parameters`) say how it is rearranged. Neither depends on the architecture.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
from flax import traverse_util
from numpy.typing import ArrayLike
from safetensors.numpy import load_file, save_file

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.files import from_dict, parse_json, to_dict
from jax_tformer.functional import Params, transformer
from jax_tformer.hub.tensors import Part, Rearranged, Stacked, View, read, rearranged_shape
from jax_tformer.model.parameters import axes_of, is_vector

LEAVES = {
    "lora.a": "lora.a.weight",
    "lora.b": "lora.b.weight",
    "kernel": "weight",
    "bias": "bias",
    "scale": "weight",
    "embedding": "weight",
}
"""The end of our path -> the end of their name."""


class Rule(NamedTuple):
    """A parameter whose path ends in `ours` ends in `theirs` there; `axes` rearranges it, as in einops."""

    ours: str
    theirs: str
    axes: str

    @staticmethod
    def of(path: str) -> "Rule":
        """Returns the rule of a parameter of ours; raises WeightsError if there is none.

        A matrix x W is W^T there, with one axis for the inputs and one for the outputs, and a vector has one axis.
        """
        ours = next((leaf for leaf in LEAVES if f".{path}".endswith(f".{leaf}")), None)
        try:
            before, _, after = axes_of(path).partition(" -> ")
        except KeyError:
            ours = None
        if ours is None:
            raise WeightsError(f"no rule says what {path} is called in the reference; add it to model.parameters")
        theirs = f"({after}) ({before})" if after else f"({before})" if is_vector(path) else before
        return Rule(ours, LEAVES[ours], f"{before} {after}".strip() + f" -> {theirs}")


CONFIG_KEY = "jax_tformer.config"
"""Where the config stands in the header of a file."""
STACKED = "blocks"
"""In a module of this name, our arrays have a leading L axis, and theirs a layer number in the name."""


class WeightsError(InputError):
    """Weights that do not fit; the message lists missing and unexpected names, duplicates, wrong shapes and types."""


class Slot(NamedTuple):
    """The place of one of their arrays in our parameters."""

    path: str
    layer: int | None
    rule: Rule
    shape: tuple[int, ...]
    """Of our array, without the L axis."""
    dtype: np.dtype


def slots(shapes: Params) -> dict[str, Slot]:
    """Returns their name of every array -> its place in ours; `shapes` is a tree of arrays or of ShapeDtypeStruct.

    Raises WeightsError if no rule covers a parameter, or if two parameters would get the same name.
    """
    found: dict[str, Slot] = {}
    for path, leaf in traverse_util.flatten_dict(shapes, sep=".").items():
        rule = Rule.of(path)
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
    """Converts our parameters to the names and layouts of `torch_ref`, bit for bit."""
    ours = {path: np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(params, sep=".").items()}
    return {name: read(view) for name, view in reference_views(ours, params).items()}


def reference_views(ours: Mapping[str, View], shapes: Params) -> dict[str, View]:
    """Returns views of our arrays (by path) with the names and layouts of `torch_ref`; nothing is read yet."""
    views: dict[str, View] = {}
    for name, slot in slots(shapes).items():
        layer = ours[slot.path] if slot.layer is None else Part(ours[slot.path], slot.layer)
        views[name] = Rearranged(layer, slot.rule.axes)
    return views


def from_reference(weights: Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]], shapes: Params) -> Params:
    """Inverts `to_reference`: returns parameters with the tree, shapes and dtypes of `shapes` (`net.shapes`).

    Raises WeightsError, which lists all arrays without a place, places without an array, and what else does not fit.
    """
    given, doubled = once(weights)
    types = {name: slot.dtype for name, slot in slots(shapes).items()}
    views = parameter_views(given, shapes, doubled, types=types)
    params: Params = traverse_util.unflatten_dict({path: read(view) for path, view in views.items()}, sep=".")
    return params


def parameter_views(
    given: Mapping[str, View],
    shapes: Params,
    doubled: Iterable[str] = (),
    *,
    types: Mapping[str, np.dtype] | None = None,
) -> dict[str, View]:
    """Returns views of arrays of `torch_ref` as our parameters, by path; nothing is read yet.

    Raises WeightsError as `from_reference` does; without `types`, any type fits.
    """
    expected = slots(shapes)
    wanted = {name: reference_shape(slot) for name, slot in expected.items()}
    require_fit("model", given, wanted, doubled, types=types)
    layers: dict[str, list[View]] = {}
    stacked: dict[str, bool] = {}
    for name, slot in expected.items():
        before, after = slot.rule.axes.split(" -> ")
        sizes = dict(zip(before.split(), slot.shape, strict=True))
        # The layers of a stack come in order.
        layers.setdefault(slot.path, []).append(Rearranged(given[name], f"{after} -> {before}", sizes))
        stacked[slot.path] = slot.layer is not None
    return {path: Stacked(parts) if stacked[path] else parts[0] for path, parts in layers.items()}


def reference_shape(slot: Slot) -> tuple[int, ...]:
    """Returns the shape of the array in `torch_ref`."""
    return rearranged_shape(slot.shape, slot.rule.axes)


def once(weights: Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the arrays by name, and the names that occur more than once."""
    given: dict[str, np.ndarray] = {}
    doubled = []
    for name, array in weights.items() if isinstance(weights, Mapping) else weights:
        if name in given:
            doubled.append(name)
        given[name] = np.asarray(array)
    return given, doubled


def require_fit(
    what: str,
    given: Mapping[str, View],
    shapes: Mapping[str, tuple[int, ...]],
    doubled: Iterable[str],
    *,
    types: Mapping[str, np.dtype] | None = None,
    optional: Iterable[str] = (),
) -> None:
    """Raises WeightsError, which lists all differences, unless `given` has the names, `shapes` and `types` expected."""
    wrong_shapes, wrong_types = [], []
    for name in given.keys() & shapes.keys():
        if given[name].shape != shapes[name]:
            wrong_shapes.append(f"{name} is {list(given[name].shape)}, expected {list(shapes[name])}")
        elif types is not None and given[name].dtype != types[name]:
            wrong_types.append(f"{name} is {given[name].dtype}, expected {types[name]}")
    groups = {
        "missing": shapes.keys() - given.keys() - set(optional),
        "unexpected": given.keys() - shapes.keys(),
        "given twice": doubled,
        "of another shape": wrong_shapes,
        "of another type": wrong_types,
    }
    if told := [f"{len(list(names))} {label} ({listed(names)})" for label, names in groups.items() if names]:
        raise WeightsError(f"the weights do not fit the {what}: {'; '.join(told)}")


def listed(names: Iterable[str], most: int = 6) -> str:
    """Lists the names in order, only the first few of many."""
    names = sorted(names)
    rest = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def save_weights(path: Path | str, params: Params, config: TransformerConfig) -> None:
    """Writes a file for `load_weights`, and for PyTorch: `reference(config).load_state_dict(load_file(path))`.

    Raises WeightsError if `params` are not those of `config`.
    """
    weights = to_reference(params)
    from_reference(weights, transformer(config).shapes)
    save_file(weights, path, metadata={CONFIG_KEY: json.dumps(to_dict(config))})


def load_weights(path: Path | str) -> tuple[Params, TransformerConfig]:
    """Loads parameters (NumPy arrays) and config from a file of `save_weights`.

    Raises InputError if the file is missing, damaged or without a config, and WeightsError if they do not fit.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        weights: dict[str, np.ndarray] = load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"cannot read weights from {path}: {' '.join(str(error).split())}") from error
    if CONFIG_KEY not in metadata:
        raise InputError(f"{path} has no {CONFIG_KEY} in its header; expected a file written by save_weights")
    try:
        values = parse_json(metadata[CONFIG_KEY])
    except ValueError as error:
        raise InputError(f"the config in the header of {path} is not JSON ({error})") from error
    config = from_dict(TransformerConfig, values, where=str(path))
    return from_reference(weights, transformer(config).shapes), config
