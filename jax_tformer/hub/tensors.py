"""Arrays that are read part by part, where somebody asks: views of arrays, and files of safetensors.

A view has a shape and a type, and `view[slices]` returns an array. NumPy arrays are views, and so are arrays in files.
Conversions of weights are built from views (rearranged, stacked or split), so that one engine converts arrays in memory
and arrays in files.
"""

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import einops
import ml_dtypes
import numpy as np
import safetensors
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file

from jax_tformer.config.errors import InputError
from jax_tformer.files import not_regular, read_json, write_json

Region = tuple[slice, ...]
"""A slice with start and stop for each axis."""
_BLOCK = 2**22
"""About as many bytes are copied at a time."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The types of weights that we read, as safetensors calls them."""
STORED = {dtype.name: type_ for type_, dtype in TYPES.items()}
"""NumPy's name of a type -> what safetensors calls it."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".npz")
_MOST_INDEX = 100_000_000
_SIZE = re.compile(r"(\d+\.?\d*)(?:([KMGT])(I?)B)?")


class View(Protocol):
    """What can be read in part; `np.ndarray` is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""

    def __getitem__(self, region: Region, /) -> np.ndarray:
        """Reads a part."""


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
    start, stop = region[0].start, region[0].stop
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
        self._source, self.dtype, sizes = source, source.dtype, dict(sizes or {})
        before, after = axes.split("->")
        self._before, self._after = _groups(before), _groups(after)
        names = list(chain(*self._before))
        # It has the shape, and one number in memory.
        outline = np.broadcast_to(False, source.shape)
        try:
            lengths = einops.rearrange(outline, f"{before}-> {' '.join(names)}", **sizes).shape
        except einops.EinopsError as error:
            raise ValueError(f"{axes!r} with {sizes} does not fit the shape {list(source.shape)}") from error
        self._sizes = dict(zip(names, lengths, strict=True))
        self._order = [names.index(name) for name in chain(*self._after)]
        self.shape = tuple(math.prod(self._lengths(group)) for group in self._after)

    def __getitem__(self, region: Region) -> np.ndarray:
        wanted: dict[str, slice] = {}
        held: dict[str, slice] = {}
        outer, cropped = [], []
        for group, part in zip(self._after, region, strict=True):
            ends = [np.unravel_index(index, self._lengths(group)) for index in (part.start, part.stop - 1)]
            ranges, span = self._cover(group, *ends)
            wanted |= ranges
            cropped.append(_within(part, span))
        for group in self._before:
            first, last = [wanted[name].start for name in group], [wanted[name].stop - 1 for name in group]
            ranges, span = self._cover(group, first, last)
            held |= ranges
            outer.append(span)
        block = self._source[tuple(outer)].reshape([_length(part) for part in held.values()])
        block = block[tuple(_within(wanted[name], part) for name, part in held.items())].transpose(self._order)
        shape = [math.prod(_length(wanted[name]) for name in group) for group in self._after]
        return block.reshape(shape)[tuple(cropped)]

    def _lengths(self, group: Sequence[str]) -> tuple[int, ...]:
        return tuple(self._sizes[name] for name in group)

    def _cover(self, group: Sequence[str], first: Sequence[Any], last: Sequence[Any]) -> tuple[dict[str, slice], slice]:
        """Returns ranges of a group's axes that hold all from `first` to `last`, and the one range that they make.

        From the first axis on of which there is more than one index, the later ones are whole.
        """
        ranges: dict[str, slice] = {}
        several = False
        for name, low, high in zip(group, first, last, strict=True):
            ranges[name] = slice(0, self._sizes[name]) if several else slice(int(low), int(high) + 1)
            several = several or low != high
        start = int(np.ravel_multi_index([part.start for part in ranges.values()], self._lengths(group)))
        return ranges, slice(start, start + math.prod(map(_length, ranges.values())))


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _within(part: slice, span: slice) -> slice:
    """Returns where `part` lies in `span`."""
    return slice(part.start - span.start, part.stop - span.start)


@lru_cache(maxsize=256)
def rearranged_shape(shape: tuple[int, ...], axes: str, sizes: tuple[tuple[str, int], ...] = ()) -> tuple[int, ...]:
    """Returns the shape of a view of `shape` once it is `Rearranged`, by arithmetic: no size takes memory."""
    nothing: Any = SimpleNamespace(shape=shape, dtype=None)
    return Rearranged(nothing, axes, dict(sizes)).shape


class Stacked:
    """Views of one shape and type along a new first axis."""

    def __init__(self, sources: Sequence[View]) -> None:
        self._sources = sources
        self.shape, self.dtype = (len(sources), *sources[0].shape), sources[0].dtype

    def __getitem__(self, region: Region) -> np.ndarray:
        return np.stack([source[region[1:]] for source in self._sources[region[0]]])


class Part:
    """One entry along the first axis of a view."""

    def __init__(self, source: View, index: int) -> None:
        self._source, self._index = source, index
        self.shape, self.dtype = source.shape[1:], source.dtype

    def __getitem__(self, region: Region) -> np.ndarray:
        part: np.ndarray = self._source[(slice(self._index, self._index + 1), *region)][0]
        return part


def _groups(side: str) -> list[list[str]]:
    """Splits "1 (n o) i" into [[], [n, o], [i]]."""
    found = re.findall(r"\((.*?)\)|(\S+)", side)
    return [[name for name in (group or axis).split() if name != "1"] for group, axis in found]


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An empty array at an address that JAX takes over as it is, without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


class Stored:
    """An array in a safetensors file: a view, of which each part is read when it is asked for.

    The file is open for a moment only, so that what was read of it takes no memory later.
    """

    def __init__(self, path: Path, name: str, shape: tuple[int, ...], type_: str) -> None:
        self._path, self._name = path, name
        self.shape, self.type = shape, type_
        """The type as safetensors calls it."""
        self.dtype = TYPES.get(type_, np.dtype(np.uint8))

    def __getitem__(self, region: Region) -> np.ndarray:
        try:
            with safetensors.safe_open(self._path, framework="numpy") as file:
                part: np.ndarray = file.get_slice(self._name)[region]
                return part
        except (OSError, safetensors.SafetensorError) as error:
            raise InputError(
                f"{self._path} changed while it was read ({error}); restore it, and load it again"
            ) from error


def open_tensors(folder: Path) -> dict[str, Stored]:
    """Opens the safetensors of a folder: the arrays of model.safetensors, or of the shards that its index names.

    Raises InputError for pickles, and for files that are missing, truncated, outside of the folder, or not as the
    index says.
    """
    if os.path.lexists(folder / WEIGHTS):
        return open_file(folder, WEIGHTS)
    if os.path.lexists(folder / INDEX):
        return _open_shards(folder)
    raise InputError(what_instead(folder))


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a regular file in a folder; raises InputError if it is missing, or really elsewhere.

    In the Hugging Face cache files are links to the blobs of the same model, which counts as inside.
    """
    path = folder / name
    try:
        real, home = path.resolve(strict=True), folder.resolve()
        problem = not_regular(real)
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; restore the folder, or load it again") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot read {path}: {error}; restore the folder, or load it again") from error
    if problem:
        raise InputError(f"{path} {problem}; expected a file; restore the folder, or load it again")
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(place) for place in allowed):
        raise InputError(f"{path} is a link out of the folder, to {real}; expected the file itself; copy it there")
    return path


def _open_shards(folder: Path) -> dict[str, Stored]:
    index = inside(folder, INDEX)
    content = read_json(index, _MOST_INDEX)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise InputError(f"{index} has no weight_map; expected the name of a file for each array; restore it")
    for name, file in files.items():
        if not isinstance(file, str) or not file or file in (".", "..") or Path(file).name != file or "\\" in file:
            raise InputError(f"{index} says that {name} is in {file!r}; expected a file of this folder, by its name")
    if pickles := sorted({file for file in files.values() if not file.endswith(".safetensors")}):
        raise InputError(f"{index} names {pickles[0]}; expected files that end in .safetensors; {_CONVERT}")
    tensors: dict[str, Stored] = {}
    for file in sorted(set(files.values())):
        found = open_file(folder, file)
        listed = {name for name, at in files.items() if at == file}
        for names, problem in (
            (listed - found.keys(), "which the index promises"),
            (found.keys() - listed, "which the index does not list"),
        ):
            if names:
                has = "lacks" if names <= listed else "holds"
                raise InputError(f"{folder / file} {has} {_few(names)}, {problem}; restore the folder")
        tensors |= found
    return tensors


def open_file(folder: Path, name: str) -> dict[str, Stored]:
    """Opens one file of safetensors in a folder; raises InputError as `open_tensors` does.

    The library checks that its header is sound and that all of the data is there.
    """
    path = inside(folder, name)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Stored(path, name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()
            }
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        with open(path, "rb") as damaged:
            start = damaged.read(8)
        # Safetensors begin with the length of a header of less than 4 GB.
        if start.startswith(b"PK\x03\x04") or (start.startswith(b"\x80") and any(start[4:])):
            problem = "is a pickle by another name, which is not read, because it can run code"
            raise InputError(f"{path} {problem}; {_CONVERT}") from error
        reason = " ".join(str(error).split())
        raise InputError(f"{path} is truncated or damaged ({reason}); restore it, or load it again") from error


_CONVERT = (
    "where you trust it, let transformers rewrite it: AutoModel.from_pretrained(folder).save_pretrained(new_folder), "
    "with the AutoModel class of its head"
)


def what_instead(folder: Path) -> str:
    """Says what the folder holds instead of safetensors."""
    names = sorted(path.name for path in folder.iterdir())
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return (
            f"{folder} holds {gguf[0]}, which is GGUF and not read; expected safetensors; take the folder that it was "
            "made of, or let transformers rewrite it: AutoModelForCausalLM.from_pretrained(folder, "
            f"gguf_file={gguf[0]!r}).save_pretrained(new_folder)"
        )
    if "flax_model.msgpack" in names:
        return f"{folder} holds a flax_model.msgpack; write it as safetensors first: jax-tformer from-flax {folder} OUT"
    pickles = [name for name in names if name.endswith((*_PICKLES, ".bin.index.json"))]
    if pickles:
        return (
            f"{folder} holds {pickles[0]} and no {WEIGHTS}; expected safetensors, since reading other files can run "
            f"code; {_CONVERT}"
        )
    return f"{folder} has neither {WEIGHTS} nor {INDEX}; expected the weights in one of them; restore the folder"


def _few(names: Collection[str]) -> str:
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first


def parse_size(size: int | str) -> int:
    """Returns the bytes of a size such as "5GB", "200MiB" or 1000; raises InputError for anything else."""
    match = _SIZE.fullmatch(str(size).strip().upper())
    number = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")) if match else 0
    if not 1 <= number < 2**63:
        raise InputError(f"max_shard_size is {size!r}; expected bytes, or a size such as '5GB' or '200MiB'")
    return number


def write_tensors(folder: Path, tensors: Mapping[str, View], types: Mapping[str, str], most: int) -> None:
    """Writes model.safetensors, or shards of at most `most` bytes (of one array if it is larger) with an index.

    `types` are the types to store, by name. Takes memory for one shard. Raises InputError for a number that its type
    cannot hold.
    """
    counts = {name: math.prod(view.shape) for name, view in tensors.items()}
    split = split_state_dict_into_shards_factory(
        {name: count * TYPES[types[name]].itemsize for name, count in counts.items()},
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most,
    )
    for file, names in split.filename_to_tensors.items():
        # One shard at a time; without the format `transformers` refuses the file.
        save_file(
            {name: _converted(name, tensors[name], types[name]) for name in names}, folder / file, {"format": "pt"}
        )
    if split.is_sharded:
        metadata = {"total_parameters": sum(counts.values()), **split.metadata}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))})


def _converted(name: str, view: View, type_: str) -> np.ndarray:
    found = read(view, TYPES[type_])
    if found.dtype != view.dtype and not np.isfinite(found).all() and np.isfinite(read(view)).all():
        raise InputError(f"{name} holds numbers that {type_} cannot; save with dtype='float32'")
    return found
