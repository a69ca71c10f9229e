"""Arrays under other names and in other layouts: parameters of ours, and the same weights in `torch_ref`.

Both sides give every module the same name, so one short table of leaves is enough: each leaf's name there. Its axes
(`jax_tformer.model.parameters`) say how it is rearranged. Neither depends on the architecture.

NumPy splits axes and changes their order without a copy, in memory and in a file that is mapped. So the same functions
convert both, and what is in a file is read where somebody asks for it (`View`).
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import safetensors
from numpy.typing import ArrayLike
from safetensors.numpy import load_file, save_file

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import WHY, InputError, explained
from jax_tformer.files import from_dict, parse_json, shortened
from jax_tformer.functional import Params, transformer
from jax_tformer.model.parameters import Shape, axes_of, flatten, matrix_shape, unflatten

C = TypeVar("C")
Weights = Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]]
"""Arrays by name, or in pairs."""
Region = tuple[slice, ...]
"""A slice of each axis."""
_STRIP = 256
"""So many columns of a transpose are copied at a time."""


class View(Protocol):
    """What becomes an array where somebody reads it, with `np.asarray`; an array is one."""

    @property
    def shape(self) -> Shape:
        """Sizes of the axes."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""

    def __array__(self) -> np.ndarray:
        """Returns the array."""


Views = Mapping[str, View]
"""Arrays by name, of which nothing is read yet."""


@dataclass(frozen=True)
class Lazy:
    """An array that is made of another, without a copy if possible, where somebody reads it."""

    shape: Shape
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Makes the array."""
        return self.make().reshape(self.shape)


class Stacked:
    """Views of one shape and type along a new first axis, which are read one by one."""

    def __init__(self, layers: Sequence[View]) -> None:
        self.layers = layers
        self.shape = (len(layers), *layers[0].shape)
        self.dtype = layers[0].dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Makes the array."""
        return read(self)


def read(view: View, dtype: np.dtype | None = None, region: Region | None = None) -> np.ndarray:
    """Reads a region (all, by default) into a new contiguous array, converted to `dtype`."""
    region = tuple(map(slice, view.shape)) if region is None else region
    shape = tuple(len(range(size)[part]) for size, part in zip(view.shape, region, strict=True))
    kind = view.dtype if dtype is None else dtype
    # At an address that JAX takes over as it is, without a copy.
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    out = memory[begin : begin + size].view(kind).reshape(shape)
    pairs = [(out, view)]
    if isinstance(view, Stacked):
        pairs = list(zip(out, view.layers[region[0]], strict=True))
        region = region[1:]
    # Numbers too large for the type become infinite, as in any conversion.
    with np.errstate(over="ignore"):
        for target, part in pairs:
            copy_array(target, np.asarray(part)[region])
    return out


def copy_array(target: np.ndarray, source: np.ndarray) -> None:
    """Writes `source` into `target`, in strips where it is a transpose, which is up to three times as fast."""
    size = source.shape[-1]
    strip = max(size, 1) if source.flags.c_contiguous else _STRIP
    for start in range(0, size, strip):
        target[..., start : start + strip] = source[..., start : start + strip]


def same_bytes(first: View, second: View) -> bool:
    """Whether two views have one shape, type and content, bit for bit."""
    alike = first.shape == second.shape and first.dtype == second.dtype
    return alike and np.asarray(first).tobytes() == np.asarray(second).tobytes()


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
    shape: Shape
    """Of our array, without the L axis."""
    dtype: np.dtype
    is_matrix: bool
    """Whether it is W of a product x W, which is W^T there."""


def slots(shapes: Params) -> dict[str, Slot]:
    """Returns their name of every array -> its place in ours; `shapes` is a tree of arrays or of ShapeDtypeStruct.

    Raises WeightsError if no rule covers a parameter, or if two parameters would get the same name.
    """
    found: dict[str, Slot] = {}
    for path, leaf in flatten(shapes).items():
        module, _, last = path.rpartition(".")
        try:
            named = f"{module}.{LEAVES[last]}"
            is_matrix = " -> " in axes_of(path)
        except KeyError as error:
            raise WeightsError(
                f"no rule says what {path} is called in the reference; add its axes to AXES in "
                "jax_tformer/model/parameters.py (a vector also to is_vector), and a new leaf to LEAVES in "
                "jax_tformer/hub/names.py"
            ) from error
        stacked = f".{STACKED}." in path
        shape = tuple(leaf.shape[1:] if stacked else leaf.shape)
        for layer in range(leaf.shape[0]) if stacked else (None,):
            name = named if layer is None else named.replace(f".{STACKED}.", f".{STACKED}.{layer}.", 1)
            if name in found:
                raise WeightsError(f"{path} and {found[name].path} would both be called {name}")
            found[name] = Slot(path, layer, shape, np.dtype(leaf.dtype), is_matrix)
    return found


def reference_shape(slot: Slot) -> Shape:
    """Returns the shape of the array in `torch_ref`: one axis for the inputs, one for the outputs, one of a vector."""
    shape = matrix_shape(slot.path, slot.shape)
    return shape[::-1] if slot.is_matrix else shape


def _to_theirs(ours: Any, slot: Slot) -> np.ndarray:
    layer = np.asarray(ours if slot.layer is None else ours[slot.layer])
    return layer.reshape(reference_shape(slot)[::-1]).T if slot.is_matrix else layer


def _to_ours(theirs: View, slot: Slot) -> np.ndarray:
    array = np.asarray(theirs)
    return array.T if slot.is_matrix else array


def to_reference(params: Params) -> dict[str, np.ndarray]:
    """Converts our parameters to the names and layouts of `torch_ref`, bit for bit."""
    ours = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    return {name: read(view) for name, view in reference_views(ours, params).items()}


def reference_views(ours: Mapping[str, Any], shapes: Params) -> Views:
    """Returns views of our arrays (by path) with the names and layouts of `torch_ref`; nothing is read yet."""
    return {
        name: Lazy(reference_shape(slot), ours[slot.path].dtype, partial(_to_theirs, ours[slot.path], slot))
        for name, slot in slots(shapes).items()
    }


def from_reference(weights: Weights, shapes: Params) -> Params:
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
    require_fit("model", given, {name: reference_shape(slot) for name, slot in expected.items()}, types=types)
    found: dict[str, View] = {}
    layers: dict[str, list[View]] = {}
    for name, slot in expected.items():
        found[slot.path] = Lazy(slot.shape, given[name].dtype, partial(_to_ours, given[name], slot))
        if slot.layer is not None:
            # They come in order.
            layers.setdefault(slot.path, []).append(found[slot.path])
    return found | {path: Stacked(views) for path, views in layers.items()}


def once(weights: Weights) -> dict[str, np.ndarray]:
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
    return shortened(sorted(names), most)


def save_weights(path: Path | str, params: Params, config: TransformerConfig) -> None:
    """Writes a file for `load_weights`, and for PyTorch: `reference(config).load_state_dict(load_file(path))`.

    Raises WeightsError if `params` are not those of `config`.
    """
    weights = to_reference(params)
    from_reference(weights, transformer(config).shapes)
    save_file(weights, path, metadata={CONFIG_KEY: json.dumps(asdict(config))})


def load_weights(path: Path | str) -> tuple[Params, TransformerConfig]:
    """Loads parameters (NumPy arrays) and config from a file of `save_weights`.

    Raises InputError if the file is missing, damaged or without a config, and WeightsError if they do not fit.
    """
    with explained(f"cannot read weights from {path}: {WHY}", (OSError, safetensors.SafetensorError)):
        config = read_header(path, CONFIG_KEY, TransformerConfig)
        weights = load_file(path)
    if config is None:
        raise InputError(f"{path} has no {CONFIG_KEY} in its header; expected a file written by save_weights")
    return from_reference(weights, transformer(config).shapes), config


def read_header(path: Path | str, key: str, kind: type[C]) -> C | None:
    """Returns the config that the header of a file of safetensors has under `key`; None if there is none.

    Raises InputError if it is damaged, and what the library raises for a file that it cannot read.
    """
    with safetensors.safe_open(path, framework="numpy") as file:
        said = (file.metadata() or {}).get(key)
    with explained(f"the header of {path} is damaged ({WHY}); restore it", ValueError):
        values = None if said is None else parse_json(said)
    return None if said is None else from_dict(kind, values, where=str(path))
