"""Arrays under other names and in other layouts: parameters of ours, and the same weights in `torch_ref`.

Both sides give every module the same name, so one short table of leaves is enough: each leaf's name there. Its axes
(`jax_tformer.model.parameters`) say how it is rearranged. Neither depends on the architecture.

Conversions are built from views, which are read part by part, where somebody asks. A view has a shape and a type, and
`view[slices]` returns an array. NumPy arrays are views, and so are arrays in files; rearranged, stacked and split ones
are views again. So one engine converts arrays in memory and arrays in files.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import safetensors
from numpy.typing import ArrayLike
from safetensors.numpy import load_file, save_file

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError, reason_of, require
from jax_tformer.files import from_dict, parse_json, to_dict
from jax_tformer.functional import Params, transformer
from jax_tformer.model.parameters import Shape, axes_of, flatten, is_vector, unflatten

Region = tuple[slice, ...]
"""A slice with start and stop for each axis."""
_BLOCK = 2**22
"""About as many bytes are copied at a time."""


class View(Protocol):
    """What can be read in part; `np.ndarray` is one."""

    @property
    def shape(self) -> Shape:
        """Sizes of the axes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""

    def __getitem__(self, region: Region, /) -> np.ndarray:
        """Reads a part."""


Views = Mapping[str, View]
"""Arrays by name, of which nothing is read yet."""


def whole(view: View) -> Region:
    """Returns the region that is all of `view`."""
    return tuple(slice(0, size) for size in view.shape)


def read(view: View, dtype: np.dtype[Any] | None = None, region: Region | None = None) -> np.ndarray:
    """Reads a region (all, by default) into a new contiguous array, converted to `dtype`, block by block."""
    region = whole(view) if region is None else region
    out = _aligned(tuple(map(_length, region)), view.dtype if dtype is None else dtype)
    # Numbers too large for the type become infinite, as in any conversion.
    with np.errstate(over="ignore"):
        for block in blocks(region, view.dtype.itemsize):
            out[tuple(map(_within, block, region))] = view[block]
    return out


def blocks(region: Region, itemsize: int) -> list[Region]:
    """Splits a region along its first axis into regions of about 4 MB each, in order; an empty one has none."""
    extents = list(map(_length, region))
    if not region or not math.prod(extents):
        return [] if region else [region]
    step = max(1, _BLOCK // (math.prod(extents[1:]) * itemsize))
    start = region[0].start
    stop = region[0].stop
    return [(slice(begin, min(begin + step, stop)), *region[1:]) for begin in range(start, stop, step)]


def same_bytes(first: View, second: View) -> bool:
    """Whether two views have one shape, type and content, bit for bit."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return all(
        first[block].tobytes() == second[block].tobytes() for block in blocks(whole(first), first.dtype.itemsize)
    )


class Rearranged:
    """`source` with its axes rearranged as in einops, "(n o) i -> n o i"; `sizes` are what the shape leaves open.

    Each axis, of the source or of the result, is a group of named ones.
    """

    def __init__(self, source: View, axes: str, sizes: Mapping[str, int] | None = None) -> None:
        self._source = source
        self.dtype = source.dtype
        self._before, self._after = map(_groups, axes.split("->"))
        self._sizes = dict(sizes or {})
        misfit = ValueError(f"{axes!r} with {self._sizes} does not fit the shape {list(source.shape)}")
        if len(self._before) != len(source.shape):
            raise misfit
        for group, size in zip(self._before, source.shape, strict=True):
            open_ = [name for name in group if name not in self._sizes]
            known = math.prod(self._sizes[name] for name in group if name in self._sizes)
            if len(open_) > 1 or (size % known if open_ else size != known):
                raise misfit
            self._sizes |= dict.fromkeys(open_, size // known)
        names = list(chain(*self._before))
        self._order = [names.index(name) for name in chain(*self._after)]
        self.shape = tuple(math.prod(self._lengths(group)) for group in self._after)

    def __getitem__(self, region: Region) -> np.ndarray:
        wanted: dict[str, slice] = {}
        held: dict[str, slice] = {}
        outer = []
        cropped = []
        for group, part in zip(self._after, region, strict=True):
            ends = [np.unravel_index(index, self._lengths(group)) for index in (part.start, part.stop - 1)]
            ranges, span = self._cover(group, *ends)
            wanted |= ranges
            cropped.append(_within(part, span))
        for group in self._before:
            first = [wanted[name].start for name in group]
            last = [wanted[name].stop - 1 for name in group]
            ranges, span = self._cover(group, first, last)
            held |= ranges
            outer.append(span)
        block = self._source[tuple(outer)].reshape([_length(part) for part in held.values()])
        block = block[tuple(_within(wanted[name], part) for name, part in held.items())].transpose(self._order)
        shape = [math.prod(_length(wanted[name]) for name in group) for group in self._after]
        return block.reshape(shape)[tuple(cropped)]

    def _lengths(self, group: Sequence[str]) -> Shape:
        return tuple(self._sizes[name] for name in group)

    def _cover(self, group: Sequence[str], first: Sequence[Any], last: Sequence[Any]) -> tuple[dict[str, slice], slice]:
        """Returns ranges of a group's axes that hold all from `first` to `last`, and the one range that they make.

        From the first axis on of which there is more than one index, the later ones are whole.
        """
        ranges = {}
        several = False
        for name, low, high in zip(group, first, last, strict=True):
            ranges[name] = slice(0, self._sizes[name]) if several else slice(int(low), int(high) + 1)
            several = several or low != high
        start = int(np.ravel_multi_index([part.start for part in ranges.values()], self._lengths(group)))
        return ranges, slice(start, start + math.prod(map(_length, ranges.values())))


def _length(part: slice) -> int:
    return part.stop - part.start


def _within(part: slice, span: slice) -> slice:
    """Returns where `part` lies in `span`."""
    return slice(part.start - span.start, part.stop - span.start)


@lru_cache(maxsize=256)
def rearranged_shape(shape: Shape, axes: str, sizes: tuple[tuple[str, int], ...] = ()) -> Shape:
    """Returns the shape of a view of `shape` once it is `Rearranged`, by arithmetic: no size takes memory."""
    nothing: Any = SimpleNamespace(shape=shape, dtype=None)
    return Rearranged(nothing, axes, dict(sizes)).shape


class Stacked:
    """Views of one shape and type along a new first axis."""

    def __init__(self, sources: Sequence[View]) -> None:
        self._sources = sources
        self.shape = (len(sources), *sources[0].shape)
        self.dtype = sources[0].dtype

    def __getitem__(self, region: Region) -> np.ndarray:
        return np.stack([source[region[1:]] for source in self._sources[region[0]]])


class Part:
    """One entry along the first axis of a view."""

    def __init__(self, source: View, index: int) -> None:
        self._source = source
        self._index = index
        self.shape = source.shape[1:]
        self.dtype = source.dtype

    def __getitem__(self, region: Region) -> np.ndarray:
        return self._source[(slice(self._index, self._index + 1), *region)][0]


def _groups(side: str) -> list[list[str]]:
    """Splits "1 (n o) i" into [[], [n, o], [i]]."""
    found = re.findall(r"\((.*?)\)|(\S+)", side)
    return [[name for name in (group or axis).split() if name != "1"] for group, axis in found]


def _aligned(shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """An empty array at an address that JAX takes over as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


LEAVES = {
    "kernel": "weight",
    "bias": "bias",
    "scale": "weight",
    "embedding": "weight",
    "a": "a.weight",
    "b": "b.weight",
}
"""The last part of our path -> the end of their name; a and b are those of adapters."""
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
    axes: str
    """How our array, without the L axis, becomes theirs, as in einops."""
    shape: Shape
    """Of our array, without the L axis."""
    dtype: np.dtype


def slots(shapes: Params) -> dict[str, Slot]:
    """Returns their name of every array -> its place in ours; `shapes` is a tree of arrays or of ShapeDtypeStruct.

    A matrix x W is W^T there, with one axis for the inputs and one for the outputs, and a vector has one axis. Raises
    WeightsError if no rule covers a parameter, or if two parameters would get the same name.
    """
    found: dict[str, Slot] = {}
    for path, leaf in flatten(shapes).items():
        module, _, last = path.rpartition(".")
        try:
            named = f"{module}.{LEAVES[last]}"
            before, _, after = axes_of(path).partition(" -> ")
        except KeyError as error:
            raise WeightsError(
                f"no rule says what {path} is called in the reference; add its axes to AXES in "
                "jax_tformer/model/parameters.py (a vector also to is_vector), and a new leaf to LEAVES in "
                "jax_tformer/hub/names.py"
            ) from error
        theirs = f"({after}) ({before})" if after else f"({before})" if is_vector(path) else before
        axes = f"{before} {after}".strip() + f" -> {theirs}"
        stacked = f".{STACKED}." in path
        shape = tuple(leaf.shape[1:] if stacked else leaf.shape)
        for layer in range(leaf.shape[0]) if stacked else (None,):
            name = named if layer is None else named.replace(f".{STACKED}.", f".{STACKED}.{layer}.", 1)
            if name in found:
                raise WeightsError(f"{path} and {found[name].path} would both be called {name}")
            found[name] = Slot(path, layer, axes, shape, np.dtype(leaf.dtype))
    return found


def to_reference(params: Params) -> dict[str, np.ndarray]:
    """Converts our parameters to the names and layouts of `torch_ref`, bit for bit."""
    ours = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    return {name: read(view) for name, view in reference_views(ours, params).items()}


def reference_views(ours: Views, shapes: Params) -> Views:
    """Returns views of our arrays (by path) with the names and layouts of `torch_ref`; nothing is read yet."""
    views = {}
    for name, slot in slots(shapes).items():
        layer = ours[slot.path] if slot.layer is None else Part(ours[slot.path], slot.layer)
        views[name] = Rearranged(layer, slot.axes)
    return views


def from_reference(weights: Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]], shapes: Params) -> Params:
    """Inverts `to_reference`: returns parameters with the tree, shapes and dtypes of `shapes` (`net.shapes`).

    Raises WeightsError, which lists all arrays without a place, places without an array, and what else does not fit.
    """
    given = once(weights)
    types = {name: slot.dtype for name, slot in slots(shapes).items()}
    views = parameter_views(given, shapes, types=types)
    return unflatten({path: read(view) for path, view in views.items()})


def parameter_views(given: Views, shapes: Params, *, types: Mapping[str, np.dtype] | None = None) -> dict[str, View]:
    """Returns views of arrays of `torch_ref` as our parameters, by path; nothing is read yet.

    Raises WeightsError as `from_reference` does; without `types`, any type fits.
    """
    expected = slots(shapes)
    wanted = {name: reference_shape(slot) for name, slot in expected.items()}
    require_fit("model", given, wanted, types=types)
    layers: dict[str, list[View]] = {}
    stacked = {}
    for name, slot in expected.items():
        before, after = slot.axes.split(" -> ")
        sizes = dict(zip(before.split(), slot.shape, strict=True))
        # The layers of a stack come in order.
        layers.setdefault(slot.path, []).append(Rearranged(given[name], f"{after} -> {before}", sizes))
        stacked[slot.path] = slot.layer is not None
    return {path: Stacked(parts) if stacked[path] else parts[0] for path, parts in layers.items()}


def reference_shape(slot: Slot) -> Shape:
    """Returns the shape of the array in `torch_ref`."""
    return rearranged_shape(slot.shape, slot.axes)


def once(weights: Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]]) -> dict[str, np.ndarray]:
    """Returns the arrays by name; raises WeightsError for names that occur more than once."""
    named = list(weights.items() if isinstance(weights, Mapping) else weights)
    counts = Counter(name for name, _ in named)
    if doubled := [name for name, count in counts.items() if count > 1]:
        raise WeightsError(f"the weights hold {len(doubled)} given twice ({listed(doubled)}); expected each name once")
    return {name: np.asarray(array) for name, array in named}


def require_fit(
    what: str,
    given: Views,
    shapes: Mapping[str, Shape],
    *,
    doubled: Iterable[str] = (),
    types: Mapping[str, np.dtype] | None = None,
    optional: Iterable[str] = (),
) -> None:
    """Raises WeightsError, which lists all differences, unless `given` has the names, `shapes` and `types` expected."""
    wrong_shapes = []
    wrong_types = []
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
        weights = load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"cannot read weights from {path}: {reason_of(error)}") from error
    require(
        CONFIG_KEY in metadata, f"{path} has no {CONFIG_KEY} in its header; expected a file written by save_weights"
    )
    try:
        values = parse_json(metadata[CONFIG_KEY])
    except ValueError as error:
        raise InputError(f"the config in the header of {path} is not JSON ({error})") from error
    config = from_dict(TransformerConfig, values, where=str(path))
    return from_reference(weights, transformer(config).shapes), config
