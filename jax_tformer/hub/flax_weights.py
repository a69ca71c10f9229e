"""Reads the weights of the Flax models that `transformers` had: flax_model.msgpack, without unpickling anything."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from jax_tformer.config.errors import InputError
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.files import read_json, user_path
from jax_tformer.functional import AnyTransformer, Params
from jax_tformer.hub.loading import assembled, matching_tokenizer
from jax_tformer.hub.origin import read_origin
from jax_tformer.hub.tensor_files import STORED, TYPES, inside
from jax_tformer.hub.views import View

FLAX, FLAX_INDEX = "flax_model.msgpack", "flax_model.msgpack.index.json"
_ARRAY = 1
"""The number by which flax.serialization marks an array: its shape, the name of its type, and its bytes."""
_CHUNKED = "__msgpack_chunked_array__"
"""Marks an object that holds an array of more than 1 GB in flat pieces."""
_DTYPES = {name: TYPES[type_] for name, type_ in STORED.items()}


def load_flax(folder: str | Path) -> tuple[AnyTransformer, Params, Tokenizer | None]:
    """Loads a folder of one of the Flax models that `transformers` had, such as FlaxGPT2LMHeadModel.

    Returns what `load_pretrained` returns, and `save_pretrained` then writes it as safetensors. Takes memory for the
    file as well, since msgpack is read whole. Raises InputError as `load_pretrained` does.
    """
    path = user_path(folder)
    if not path.is_dir():
        raise InputError(f"{path} is no folder; expected one with config.json and {FLAX}")
    origin = read_origin(path)
    named = origin.config.get("architectures")
    if isinstance(named, list):
        classes = [str(name).removeprefix("Flax") for name in named]
        origin = replace(origin, config={**origin.config, "architectures": classes})
    tokenizer = matching_tokenizer(path, origin)
    weights = flax_weights(path)
    types = {name: STORED.get(array.dtype.name, array.dtype.name) for name, array in weights.items()}
    net, params = assembled(path, origin, weights, types)
    return net, params, tokenizer


def flax_weights(folder: Path) -> dict[str, View]:
    """Returns the arrays of a folder by the names and in the layouts that PyTorch has for them.

    Both frameworks gave the modules the same names. A kernel is the transposed weight, and what Flax calls scale and
    embedding is a weight, too. Raises InputError for files that are missing, truncated or anything else.
    """
    weights: dict[str, View] = {}
    for path in _files(folder):
        for name, array in _flattened(_unpacked(path), (), path):
            *module, leaf = name
            if leaf == "kernel":
                array = array.T
            if leaf in ("kernel", "scale", "embedding"):
                leaf = "weight"
            called = ".".join((*module, leaf))
            if called in weights:
                raise InputError(f"{path} holds {called} twice; expected every array once")
            weights[called] = array
    return weights


def _files(folder: Path) -> list[Path]:
    if (folder / FLAX).exists():
        return [inside(folder, FLAX)]
    if not (folder / FLAX_INDEX).exists():
        raise InputError(f"{folder} has neither {FLAX} nor {FLAX_INDEX}; expected the weights of a Flax model")
    content = read_json(inside(folder, FLAX_INDEX))
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise InputError(f"{folder / FLAX_INDEX} has no weight_map; expected the name of a file for each array")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".msgpack"):
            raise InputError(
                f"{folder / FLAX_INDEX} names {file!r}; expected a file of this folder that ends in .msgpack"
            )
    return [inside(folder, file) for file in sorted(set(files.values()))]


def _unpacked(path: Path) -> Any:
    """Parses msgpack; the library makes objects, texts, numbers and bytes of it, and we make the arrays."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            unpacker = msgpack.Unpacker(
                file, ext_hook=_array, raw=False, strict_map_key=False, max_buffer_size=max(size, 1)
            )
            tree = unpacker.unpack()
            if unpacker.tell() != size:
                raise ValueError(f"{size - unpacker.tell():,} bytes follow the weights")
            return tree
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} is truncated or damaged ({reason}); restore it, or load it again") from error


def _array(kind: int, data: bytes) -> np.ndarray:
    if kind != _ARRAY:
        raise ValueError(f"it holds an object of kind {kind}, which is no array")
    shape, name, content = msgpack.unpackb(data, raw=True, strict_map_key=True)
    dtype = _DTYPES.get(name.decode("ascii", "replace"))
    if dtype is None:
        raise ValueError(f"it holds an array of type {name[:20]!r}")
    sound = all(type(length) is int and length >= 0 for length in shape)
    if not sound or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"it holds {len(content):,} bytes for an array of {list(shape)[:8]}")
    return np.frombuffer(content, dtype).reshape(shape)


def _flattened(tree: Any, name: tuple[str, ...], path: Path) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Yields the arrays of nested objects with their names; a name may itself hold several, with a slash between."""
    if isinstance(tree, np.ndarray):
        yield name, tree
    elif isinstance(tree, Mapping) and tree.get(_CHUNKED):
        yield name, _joined(tree, name, path)
    elif isinstance(tree, Mapping):
        for key, below in tree.items():
            yield from _flattened(below, (*name, *str(key).split("/")), path)
    else:
        where = "/".join(name) or "all of it"
        raise InputError(f"{path} holds {type(tree).__name__} where an array should be ({where}); restore it")


def _joined(tree: Mapping[str, Any], name: tuple[str, ...], path: Path) -> np.ndarray:
    try:
        shape = [int(tree["shape"][str(axis)]) for axis in range(len(tree["shape"]))]
        pieces = [tree["chunks"][str(number)] for number in range(len(tree["chunks"]))]
        return np.concatenate(pieces).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} holds {'/'.join(name)} in pieces that do not fit ({error}); restore it") from error
