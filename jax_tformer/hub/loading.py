"""Opens a folder that Hugging Face's `save_pretrained` wrote."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from jax_tformer.config import Dtype
from jax_tformer.config.errors import InputError
from jax_tformer.data.tokenizers import Tokenizer, load_tokenizer
from jax_tformer.files import hub_folder, user_path
from jax_tformer.functional import AnyTransformer, Params, transformer
from jax_tformer.hub.families import config_from_huggingface, family_of
from jax_tformer.hub.names import listed, parameter_views
from jax_tformer.hub.origin import TOKENIZER_FILES, Origin, read_origin
from jax_tformer.hub.tables import known_names, our_views
from jax_tformer.hub.tensors import TYPES, Region, View, open_tensors, read
from jax_tformer.model.parameters import dtype_of
from jax_tformer.training.sharding import parameter_shardings

_HUB_FILES = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"]


def load_pretrained(
    folder_or_name: str | Path, *, dtype: Dtype | None = None, mesh: Mesh | None = None, revision: str | None = None
) -> tuple[AnyTransformer, Params, Tokenizer | None]:
    """Loads a Hugging Face folder: returns the net, its parameters, and the tokenizer (None if the folder has none).

    `folder_or_name` is a folder, or a name on the hub with the commit to use as `revision`. Weights are safetensors, in
    one file or in shards. They are read part by part, so that the memory stays near that of the parameters.

    `dtype` is the type of parameters and arithmetic. None keeps the stored type, of several the widest; float16 becomes
    float32. With a `mesh` (of `training.sharding.make_mesh`) each device reads its own part, else the default device
    gets all. `net.origin` holds what the folder says beyond our config; `save_pretrained` writes it back.

    Raises InputError, before any weight is read, for classes and settings that we do not have, for files that are
    missing, truncated or pickles, for weights that do not fit config.json (WeightsError), and for a tokenizer of
    another vocabulary.
    """
    folder = _folder(folder_or_name, revision)
    origin = read_origin(folder)
    tokenizer = matching_tokenizer(folder, origin)
    stored = open_tensors(folder)
    types = {name: tensor.type for name, tensor in stored.items()}
    net, params = assembled(folder, origin, stored, types, dtype=dtype, mesh=mesh)
    return net, params, tokenizer


def matching_tokenizer(folder: Path, origin: Origin) -> Tokenizer | None:
    """Loads the folder's tokenizer, if it has one; raises InputError if its ids are not those of the model."""
    config = config_from_huggingface(origin.config)
    if "tokenizer.json" not in origin.files:
        return None
    tokenizer = load_tokenizer(folder)
    _require_vocabulary(folder, origin, tokenizer, config.vocab_size or 0)
    return tokenizer


def assembled(
    folder: Path,
    origin: Origin,
    stored: Mapping[str, View],
    types: Mapping[str, str],
    *,
    dtype: Dtype | None = None,
    mesh: Mesh | None = None,
) -> tuple[AnyTransformer, Params]:
    """Makes the net of config.json, and reads its parameters from the arrays `stored`; see `load_pretrained`.

    `types` are the arrays' types as safetensors calls them.
    """
    config = config_from_huggingface(origin.config, stored)
    rows = family_of(origin.config).rows(config)
    used = {name: types[name] for name, known in known_names(rows, config, stored).items() if known is not None}
    _require_types(folder, used)
    origin = replace(origin, types=used, converted=dtype is not None)
    config = config.with_dtype(_usable(dtype or origin.dtype))
    net = transformer(config)
    net.origin = origin
    return net, _placed(parameter_views(our_views(rows, config, stored), net.shapes), net.shapes, mesh)


def _folder(folder_or_name: str | Path, revision: str | None) -> Path:
    path = user_path(folder_or_name)
    if path.is_dir():
        if revision is not None:
            raise InputError(f"{path} is a folder, which has no revision; leave it out")
        return path
    if path.exists():
        raise InputError(f"{path} is a file; expected its folder, with config.json and the weights as safetensors")
    return hub_folder("model", str(folder_or_name), revision, "revision", [*_HUB_FILES, *TOKENIZER_FILES])


def _require_vocabulary(folder: Path, origin: Origin, tokenizer: Tokenizer, rows: int) -> None:
    """Tables may have more rows than the tokenizer has ids (they are padded), but no id may be beyond either.

    Except for special tokens without a role, which are refused where a text has them.
    """
    if tokenizer.table_rows > rows:
        raise InputError(
            f"{folder} has a tokenizer of {tokenizer.table_rows:,} ids and a model of {rows:,}; expected at most as "
            "many ids as the model's table has rows; is it the tokenizer of another model?"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        id = origin.config.get(name)
        if type(id) is int and tokenizer.vocab_size <= id < rows:
            raise InputError(
                f"{folder} has a tokenizer of {tokenizer.vocab_size:,} ids, but {name} is {id}; expected an id of the "
                "tokenizer; is it the tokenizer of another model?"
            )


def _require_types(folder: Path, types: Mapping[str, str]) -> None:
    if unread := {name for name, type_ in types.items() if type_ not in TYPES}:
        found = ", ".join(sorted({types[name] for name in unread}))
        raise InputError(
            f"{folder} stores {listed(unread, 2)} as {found}; expected {', '.join(TYPES)}; load a copy that is not "
            "quantised"
        )


def _usable(dtype: Dtype) -> Dtype:
    """Returns `dtype`; raises InputError for another name, and for float64 where JAX would make it float32."""
    if dtype not in get_args(Dtype):
        raise InputError(f"dtype is {dtype!r}; expected one of {', '.join(get_args(Dtype))}, or None")
    try:
        dtype_of(dtype)
    except ValueError as error:
        raise InputError(f"{error}; or load with dtype='float32'") from error
    return dtype


def _placed(views: Mapping[str, View], shapes: Params, mesh: Mesh | None) -> Params:
    """Reads parameter after parameter onto the devices; of a mesh, each gets only its part."""
    declared = traverse_util.flatten_dict(shapes, sep=".")
    shardings = {} if mesh is None else traverse_util.flatten_dict(parameter_shardings(mesh, shapes), sep=".")
    placed = {}
    for path, view in views.items():
        dtype = np.dtype(declared[path].dtype)
        if mesh is None:
            placed[path] = jax.device_put(read(view, dtype))
        else:
            placed[path] = _spread(view, dtype, shardings[path])
    params: Params = traverse_util.unflatten_dict(placed, sep=".")
    return params


def _spread(view: View, dtype: np.dtype, sharding: jax.sharding.NamedSharding) -> jax.Array:
    parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # parameters are arrays
        region: Region = tuple(slice(*along.indices(size)[:2]) for along, size in zip(index, view.shape, strict=True))
        # Devices that hold copies share what was read.
        key = tuple((along.start, along.stop) for along in region)
        if key not in parts:
            parts[key] = read(view, dtype, region)
        return parts[key]

    return jax.make_array_from_callback(view.shape, sharding, part)
