"""Reads and writes safetensors part by part: one file, or shards with an index."""

import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from jax_tformer.config.errors import InputError
from jax_tformer.files import not_regular, read_json, write_json
from jax_tformer.hub.views import Region, View, blocks

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
_OTHER_TYPES = {
    **{f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(bool),
}
"""Of arrays that old files hold beside the weights, such as masks."""
_PAGE = 4096
"""Disks give no less at once, so shorter runs are read together with what lies between them."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".npz")
_MOST_HEADER = 100_000_000
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_METADATA = {"format": "pt"}
"""Without it `transformers` refuses the file."""


class Stored:
    """An array in a safetensors file: a view, of which each part is read when it is asked for."""

    def __init__(self, file: FileIO, begin: int, shape: tuple[int, ...], type_: str) -> None:
        self._file, self._begin = file, begin
        self.shape, self.type = shape, type_
        """The type as safetensors calls it."""
        self.dtype = TYPES[type_] if type_ in TYPES else _OTHER_TYPES.get(type_, np.dtype(np.uint8))
        self.strides = tuple(math.prod(shape[axis + 1 :]) * self.dtype.itemsize for axis in range(len(shape)))

    def __getitem__(self, region: Region) -> np.ndarray:
        extents = [part.stop - part.start for part in region]
        # The last axes that are read in full lie together, with the range of the axis before them.
        axis = len(extents) - 1
        while axis > 0 and extents[axis] == self.shape[axis]:
            axis -= 1
        runs = math.prod(extents[: max(axis, 0)])
        run = math.prod(extents[max(axis, 0) :]) * self.dtype.itemsize
        if runs > 1 and run < _PAGE:
            wider = self[(*region[:axis], slice(0, self.shape[axis]), *region[axis + 1 :])]
            return wider[(*(slice(None),) * axis, region[axis])]
        out = np.empty(extents, self.dtype)
        if not run:
            return out
        data: Any = out.reshape(-1).view(np.uint8)
        for number, outer in enumerate(np.ndindex(*extents[: max(axis, 0)])):
            first = [part.start + step for part, step in zip(region, outer, strict=False)]
            first += [part.start for part in region[len(first) :]]
            begin = sum(index * stride for index, stride in zip(first, self.strides, strict=True))
            self._read(data[number * run : (number + 1) * run], self._begin + begin)
        return out

    def _read(self, data: Any, begin: int) -> None:
        self._file.seek(begin)
        done = 0
        while done < len(data):
            got = self._file.readinto(data[done:])
            if not got:
                raise InputError(f"{self._file.name} became shorter while it was read; restore it, and try again")
            done += got


@contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Stored]]:
    """Opens the safetensors of a folder: the arrays of model.safetensors, or of the shards that its index names.

    Raises InputError for pickles, and for files that are missing, truncated, outside of the folder, or not as the
    index says.
    """
    with ExitStack() as opened:
        if os.path.lexists(folder / WEIGHTS):
            yield _read_header(opened, inside(folder, WEIGHTS))
        elif os.path.lexists(folder / INDEX):
            yield _open_shards(opened, folder)
        else:
            raise InputError(what_instead(folder))


@contextmanager
def open_file(folder: Path, name: str) -> Iterator[dict[str, Stored]]:
    """Opens one file of safetensors in a folder; raises InputError as `open_tensors` does."""
    with ExitStack() as opened:
        yield _read_header(opened, inside(folder, name))


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


def _open_shards(opened: ExitStack, folder: Path) -> dict[str, Stored]:
    index = inside(folder, INDEX)
    content = read_json(index, _MOST_HEADER)
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
        found = _read_header(opened, inside(folder, file))
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


def _read_header(opened: ExitStack, path: Path) -> dict[str, Stored]:
    """Opens one file; the library checks that its header is sound and that all of the data is there."""
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
        file = opened.enter_context(FileIO(str(path), "rb"))
        (length,) = struct.unpack("<Q", file.read(8))
        header: Mapping[str, Any] = json.loads(file.read(length))
        return {
            name: Stored(file, 8 + length + said["data_offsets"][0], tuple(said["shape"]), said["dtype"])
            for name, said in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, struct.error, safetensors.SafetensorError) as error:
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
    text = str(size).strip().upper()
    digits = text.rstrip("KMGTIB")
    unit = text[len(digits) :]
    try:
        number = float(digits) * ({"": 1} | _UNITS)[unit]
    except (ValueError, KeyError):
        number = -1
    if isinstance(size, bool) or not 1 <= number < 2**63:
        raise InputError(f"max_shard_size is {size!r}; expected bytes, or a size such as '5GB' or '200MiB'")
    return int(number)


def write_tensors(folder: Path, tensors: Mapping[str, View], types: Mapping[str, str], most: int) -> None:
    """Writes model.safetensors, or shards of at most `most` bytes (of one array if it is larger) with an index.

    `types` are the types to store, by name. Raises InputError for a number that its type cannot hold.
    """
    sizes = {name: _size(view, types[name]) for name, view in tensors.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        _write(folder / WEIGHTS, {name: tensors[name] for name in shards[0]}, types)
        return
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(folder / file, {name: tensors[name] for name in names}, types)
        files |= dict.fromkeys(names, file)
    count = sum(int(np.prod(view.shape)) for view in tensors.values())
    metadata = {"total_parameters": count, "total_size": sum(sizes.values())}
    write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(files.items()))})


def _write(path: Path, tensors: Mapping[str, View], types: Mapping[str, str]) -> None:
    """Writes the bytes that the library's own save_file writes, without holding them all."""
    order = sorted(tensors, key=lambda name: (-TYPES[types[name]].itemsize, name))
    header: dict[str, object] = {"__metadata__": _METADATA}
    end = 0
    for name in order:
        begin, end = end, end + _size(tensors[name], types[name])
        header[name] = {"dtype": types[name], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    said = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    said += b" " * (-len(said) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(said)) + said)
        for name in order:
            for block in _converted(name, tensors[name], types[name]):
                file.write(block.reshape(-1).view(np.uint8).data)


def _converted(name: str, view: View, type_: str) -> Iterable[np.ndarray]:
    dtype = TYPES[type_]
    for region in blocks(view):
        block = view[region]
        if block.dtype != dtype:
            with np.errstate(over="ignore"):
                narrow = block.astype(dtype)
            if not np.isfinite(narrow).all() and np.isfinite(block).all():
                raise InputError(f"{name} holds numbers that {type_} cannot; save with dtype='float32'")
            block = narrow
        yield np.ascontiguousarray(block)


def _size(view: View, type_: str) -> int:
    return int(np.prod(view.shape)) * TYPES[type_].itemsize
