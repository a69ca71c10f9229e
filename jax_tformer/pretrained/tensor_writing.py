"""Writes safetensors array by array: one file, or shards with an index from a size on."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from jax_tformer.errors import InputError
from jax_tformer.files import write_json
from jax_tformer.pretrained.tensor_files import INDEX, TYPES, WEIGHTS
from jax_tformer.weights.views import View, blocks

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_METADATA = {"format": "pt"}
"""Without it `transformers` refuses the file."""


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
