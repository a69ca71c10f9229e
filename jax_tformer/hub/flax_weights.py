"""Reads the weights of the Flax models that `transformers` had: flax_model.msgpack, without unpickling anything."""

from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
from flax import serialization, traverse_util

from jax_tformer.config.errors import WHY, InputError, explained, require
from jax_tformer.files import user_path
from jax_tformer.hub.folder import STORED, inside, read_index, read_origin
from jax_tformer.hub.names import Views
from jax_tformer.hub.pretrained import Loaded, assembled

FLAX = "flax_model.msgpack"
FLAX_INDEX = "flax_model.msgpack.index.json"
_DAMAGES = (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException, RecursionError, MemoryError)
"""What the parser and NumPy raise for bytes that are no arrays."""


def load_flax(folder: str | Path) -> Loaded:
    """Loads a folder of one of the Flax models that `transformers` had, such as FlaxGPT2LMHeadModel.

    Returns what `load_pretrained` returns, and `save_pretrained` then writes it as safetensors. Takes memory for the
    file as well, since msgpack is read whole. Raises InputError as `load_pretrained` does.
    """
    path = user_path(folder)
    require(path.is_dir(), f"{path} is no folder; expected one with config.json and {FLAX}")
    origin = read_origin(path)
    named = origin.config.get("architectures")
    if isinstance(named, list):
        classes = [str(name).removeprefix("Flax") for name in named]
        origin = replace(origin, config={**origin.config, "architectures": classes})
    return assembled(path, origin, flax_weights)


def flax_weights(folder: Path) -> Views:
    """Returns the arrays of a folder by the names and in the layouts that PyTorch has for them.

    Both frameworks gave the modules the same names. A kernel is the transposed weight, and what Flax calls scale and
    embedding is a weight, too. Raises InputError for files that are missing, truncated or anything else.
    """
    files = [FLAX]
    if not (folder / FLAX).exists():
        require(
            (folder / FLAX_INDEX).exists(),
            f"{folder} has neither {FLAX} nor {FLAX_INDEX}; expected the weights of a Flax model",
        )
        files = sorted(set(read_index(folder, FLAX_INDEX, ".msgpack").values()))
    weights = {}
    for path in (inside(folder, file) for file in files):
        # Objects, texts, numbers, and arrays of numbers whose sizes are checked; nothing is unpickled.
        with explained(f"{path} is truncated or damaged ({WHY}); restore it, or load it again", _DAMAGES):
            tree = serialization.msgpack_restore(path.read_bytes())
            arrays = traverse_util.flatten_dict({"": tree}, sep="/")
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype.name not in STORED:
                kind = array.dtype.name if isinstance(array, np.ndarray) else type(array).__name__
                where = name.strip("/") or "all of it"
                raise InputError(f"{path} holds {kind} where an array of floats should be ({where}); restore it")
            *module, leaf = name.strip("/").split("/")
            called = ".".join((*module, "weight" if leaf in ("kernel", "scale", "embedding") else leaf))
            require(called not in weights, f"{path} holds {called} twice; expected every array once")
            weights[called] = array.T if leaf == "kernel" else array
    return weights
