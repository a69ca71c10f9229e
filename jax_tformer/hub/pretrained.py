"""Opens and writes folders of Hugging Face: what their `save_pretrained` wrote, and what `from_pretrained` opens."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import Mesh
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jax_tformer.config import DropoutConfig, Dtype, TransformerConfig
from jax_tformer.config.errors import WHY, InputError, explained, require
from jax_tformer.data.tokenizers import Tokenizer, load_tokenizer
from jax_tformer.files import Json, hub_folder, new_folder, require_new_folder, user_path, write_json
from jax_tformer.functional import AnyTransformer, Params, transformer
from jax_tformer.hub.families import (
    FAMILIES,
    CannotExpress,
    Family,
    Fields,
    Layout,
    config_from_huggingface,
    family_called,
    family_of,
    write_settings,
)
from jax_tformer.hub.folder import (
    CONFIG,
    GENERATION,
    INDEX,
    STORED,
    TOKENIZER_FILES,
    TYPES,
    Origin,
    Stored,
    open_tensors,
    read_origin,
)
from jax_tformer.hub.names import (
    View,
    Views,
    WeightsError,
    listed,
    parameter_views,
    read,
    reference_views,
    require_fit,
)
from jax_tformer.lora import merge_lora
from jax_tformer.model.parameters import dtype_of, flatten, unflatten
from jax_tformer.training.sharding import parameter_shardings

_HUB_FILES = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"]
Loaded = tuple[AnyTransformer, Params, Tokenizer | None]
StoredDtype = Literal["float64", "float32", "bfloat16", "float16"]
_SIZE = re.compile(r"(\d+\.?\d*)(?:([KMGT])(I?)B)?")


def load_pretrained(
    folder_or_name: str | Path, *, dtype: Dtype | None = None, mesh: Mesh | None = None, revision: str | None = None
) -> Loaded:
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
    return assembled(folder, read_origin(folder), open_tensors, dtype=dtype, mesh=mesh)


def assembled(
    folder: Path,
    origin: Origin,
    open_arrays: Callable[[Path], Views],
    *,
    dtype: Dtype | None = None,
    mesh: Mesh | None = None,
) -> Loaded:
    """Makes the net of config.json, with the parameters that `open_arrays` finds in the folder, and its tokenizer.

    See `load_pretrained`.
    """
    rows = config_from_huggingface(origin.config).vocab_size or 0
    tokenizer = load_tokenizer(folder) if "tokenizer.json" in origin.files else None
    if tokenizer is not None:
        # Tables may have more rows than the tokenizer has ids (they are padded), but no id may be beyond either, except
        # for special tokens without a role, which are refused where a text has them.
        require(
            tokenizer.table_rows <= rows,
            f"{folder} has a tokenizer of {tokenizer.table_rows:,} ids and a model of {rows:,}; expected at most as "
            "many ids as the model's table has rows; is it the tokenizer of another model?",
        )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            id = origin.config.get(name)
            require(
                type(id) is not int or not tokenizer.vocab_size <= id < rows,
                f"{folder} has a tokenizer of {tokenizer.vocab_size:,} ids, but {name} is {id}; expected an id of the "
                "tokenizer; is it the tokenizer of another model?",
            )
    stored = open_arrays(folder)
    config = config_from_huggingface(origin.config, stored)
    layout = Layout(family_of(origin.config).rows(config), config)
    named = {name: stored[name] for name, known in layout.known(stored).items() if known is not None}
    used = {name: x.type if isinstance(x, Stored) else STORED[x.dtype.name] for name, x in named.items()}
    if unread := {name for name, type_ in used.items() if type_ not in TYPES}:
        found = ", ".join(sorted({used[name] for name in unread}))
        raise InputError(
            f"{folder} stores {listed(unread, 2)} as {found}; expected {', '.join(TYPES)}; load a copy that is not "
            "quantised"
        )
    origin = replace(origin, types=used, converted=dtype is not None, tokenizer=tokenizer)
    dtype = dtype or origin.dtype
    require(dtype in get_args(Dtype), f"dtype is {dtype!r}; expected one of {', '.join(get_args(Dtype))}, or None")
    # Where JAX would make float32 of it.
    with explained(f"{WHY}; or load with dtype='float32'", ValueError):
        dtype_of(dtype)
    config = config.with_dtype(dtype)
    net = transformer(config)
    net.origin = origin
    return net, _placed(parameter_views(layout.ours(stored), net.shapes), net.shapes, mesh), tokenizer


def _folder(folder_or_name: str | Path, revision: str | None) -> Path:
    path = user_path(folder_or_name)
    if path.is_dir():
        require(revision is None, f"{path} is a folder, which has no revision; leave it out")
        return path
    require(
        not path.exists(), f"{path} is a file; expected its folder, with config.json and the weights as safetensors"
    )
    return hub_folder("model", str(folder_or_name), revision, "revision", [*_HUB_FILES, *TOKENIZER_FILES])


def _placed(views: Views, shapes: Params, mesh: Mesh | None) -> Params:
    """Reads parameter after parameter onto the devices; of a mesh, each gets only its part."""
    declared = flatten(shapes)
    shardings = {} if mesh is None else flatten(parameter_shardings(mesh, shapes))
    placed = {}
    # The largest first: the file's pages of an array take memory as well, while it is read.
    for path in sorted(views, key=lambda path: -declared[path].size):
        view = views[path]
        dtype = np.dtype(declared[path].dtype)
        placed[path] = jax.device_put(read(view, dtype)) if mesh is None else _spread(view, dtype, shardings[path])
    return unflatten(placed)


def _spread(view: View, dtype: np.dtype, sharding: jax.sharding.NamedSharding) -> jax.Array:
    parts = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # parameters are arrays
        # Devices that hold copies share what was read.
        key = tuple((along.start, along.stop) for along in index)
        if key not in parts:
            parts[key] = read(view, dtype, index)
        return parts[key]

    return jax.make_array_from_callback(view.shape, sharding, part)


def save_pretrained(
    folder: str | Path,
    net: AnyTransformer,
    params: Params,
    tokenizer: Tokenizer | None = None,
    *,
    architecture: str | None = None,
    dtype: StoredDtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes a new folder that `AutoModel*.from_pretrained` and `load_pretrained` open, with no array missing.

    It holds config.json, model.safetensors (from `max_shard_size` on, shards with an index), the tokenizer and
    generation_config.json. A net that `load_pretrained` returned keeps its class, the names and types under which its
    arrays were stored (unless `load_pretrained` was given a `dtype`), all that config.json said beyond our config, and
    the tokenizer's files as they were. Any other net becomes the first class that can express its config.

    Adapters are merged into the parameters that they change; `save_adapters` writes them alone.

    `architecture` names the class in `transformers`, and `dtype` the type to store. The folder is written beside
    itself and then moved into place, so a folder by that name is complete.

    Raises InputError if the folder holds something, if no class (or not this one) can express the config, if `params`
    are not those of `net` (WeightsError), or if the tokenizer has ids beyond the model's table.
    """
    net, params = merge_lora(net, params)
    out = user_path(folder)
    most = parse_size(max_shard_size)
    require_new_folder(out)
    require(dtype is None or dtype in STORED, f"dtype is {dtype!r}; expected one of {', '.join(STORED)}, or None")
    rows = net.config.vocab_size or 0
    if tokenizer is not None and tokenizer.table_rows > rows:
        raise InputError(
            f"the tokenizer has {tokenizer.table_rows:,} ids and the model's table {rows:,} rows; expected at most "
            "as many; save the model with the tokenizer that it was trained with"
        )
    chosen, said = described(net, architecture)
    origin = net.origin if net.origin is not None and net.origin.architecture == chosen else None
    given = {path: leaf for path, leaf in flatten(params).items() if hasattr(leaf, "shape")}
    require_fit("net", given, {path: leaf.shape for path, leaf in flatten(net.shapes).items()})
    if odd := sorted({leaf.dtype.name for leaf in given.values()} - STORED.keys()):
        raise WeightsError(f"the parameters hold {odd[0]}; expected {', '.join(STORED)}")
    # Views of all arrays by the names in the file, and the type to store of each.
    layout = Layout(FAMILIES[chosen].rows(net.config), net.config)
    stored = {} if origin is None else origin.types
    known = layout.known(stored)
    ours = reference_views({path: _on_host(leaf) for path, leaf in given.items()}, net.shapes)
    theirs = layout.theirs(ours, None if origin is None else set(filter(None, known.values())))
    spelled = {name: spelling for spelling, name in known.items() if name is not None}
    tensors = {spelled.get(name, name): view for name, view in theirs.items()}
    types = {name: STORED[dtype or view.dtype.name] for name, view in tensors.items()}
    # As stored, unless the caller has chosen a type since.
    keep = origin is not None and not origin.converted and origin.dtype == net.config.compute.parameter_dtype
    if keep and dtype is None:
        types = {name: stored.get(name, type_) for name, type_ in types.items()}
    config = _config_json(net, chosen, said, tensors, types, tokenizer)
    told = f"cannot write {out}: {WHY}; expected a place with room for it"
    with explained(told, (OSError, SafetensorError)), new_folder(out) as whole:
        write_tensors(whole, tensors, types, most)
        write_json(whole / CONFIG, config | _write_tokenizer(whole, net, tokenizer))


def described(net: AnyTransformer, architecture: str | None = None) -> tuple[str, Fields]:
    """Returns the class (this one, or the first that can), and the fields of config.json that say what our config says.

    Raises CannotExpress if none can express the config, with what is in the way of the nearest.
    """
    if chosen := architecture or (net.origin and net.origin.architecture):
        return chosen, _settings(family_called(chosen), net.config)
    problems = []
    for name, family in FAMILIES.items():
        try:
            return name, _settings(family, net.config)
        except InputError as error:
            problems.append(error)
    # Of the classes with the same stacks, the one with the fewest differences.
    nearest = min(problems, key=lambda error: len(error.changed) if isinstance(error, CannotExpress) else math.inf)
    told = f"no class can express this config, of {', '.join(FAMILIES)}; the nearest: {nearest}"
    raise CannotExpress(told, nearest.model_type, nearest.changed) if isinstance(nearest, CannotExpress) else nearest


def _settings(family: Family, config: TransformerConfig) -> Fields:
    """Returns the settings of a config, if need be without what only training uses: initializer and dropout."""
    template = family.template
    fresh = replace(config, initializer=template.initializer, residual_init_scale=template.residual_init_scale)
    std = any("initializer_std" in setting.paths for setting in family.settings)
    fresh = fresh if std else replace(fresh, initializer_std=template.initializer_std)
    for candidate in (config, fresh):
        with suppress(InputError):
            return write_settings(family, candidate)
    # What no setting names is the family's own.
    none = DropoutConfig(attention_output=template.dropout.attention_output)
    return write_settings(family, replace(fresh, dropout=none))


def _config_json(
    net: AnyTransformer,
    chosen: str,
    said: Fields,
    tensors: Views,
    types: Mapping[str, str],
    tokenizer: Tokenizer | None,
) -> Json:
    """Returns config.json: as it was, with what has changed since.

    A setting that still says the same keeps its words: the names of the classes, say, if their number is the same.
    """
    dtype = TYPES[Counter(types.values()).most_common(1)[0][0]].name
    origin = net.origin
    if origin is None or origin.architecture != chosen:
        # Of RoBERTa, a setting decides the padding token.
        return {"architectures": [chosen], **_special_ids(net, tokenizer), **said, "dtype": dtype}
    config = dict(origin.config)

    def says_the_same(config: Json) -> bool:
        with suppress(InputError):
            return replace(config_from_huggingface(config, tensors), compute=net.config.compute) == net.config
        return False

    if not says_the_same(config):
        for name in FAMILIES[chosen].synonyms:
            config.pop(name, None)
        config |= said
        for name in said.keys() & origin.config.keys() - {"label2id"}:
            if says_the_same(config | {name: origin.config[name]}):
                config[name] = origin.config[name]
        if "label2id" in origin.config and config.get("id2label") == origin.config.get("id2label"):
            config["label2id"] = origin.config["label2id"]
    if dict(types) != {name: origin.types.get(name, type_) for name, type_ in types.items()}:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    return config


def _write_tokenizer(folder: Path, net: AnyTransformer, tokenizer: Tokenizer | None) -> Json:
    """Writes generation_config.json and the tokenizer, in the files that it came in if the net came with it.

    Returns the special ids of another tokenizer than that one, where they differ.
    """
    files, loaded = ({}, None) if net.origin is None else (net.origin.files, net.origin.tokenizer)
    changed = {}
    if tokenizer is not None and (loaded is None or tokenizer.as_json != loaded.as_json):
        changed = {} if loaded is None else dict(_role_ids(tokenizer).items() - _role_ids(loaded).items())
        files = {name: content for name, content in files.items() if name == GENERATION}
        tokenizer.save(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if GENERATION in files and changed:
        write_json(folder / GENERATION, {**json.loads(files[GENERATION]), **changed})
    elif net.origin is None and net.config.decoder is not None and tokenizer is not None:
        write_json(folder / GENERATION, _special_ids(net, tokenizer))
    return changed


def _special_ids(net: AnyTransformer, tokenizer: Tokenizer | None) -> Json:
    """The ids of the tokenizer; the defaults of the class would be those of its first checkpoint."""
    if tokenizer is None:
        return {}
    if net.config.decoder is None:
        return {"pad_token_id": tokenizer.pad_id}
    # Null is no value of the last one in every class.
    begins = net.config.encoder is not None and tokenizer.start_id is not None
    return _role_ids(tokenizer) | ({"decoder_start_token_id": tokenizer.start_id} if begins else {})


def _role_ids(tokenizer: Tokenizer) -> Json:
    return {"bos_token_id": tokenizer.start_id, "eos_token_id": tokenizer.end_id, "pad_token_id": tokenizer.pad_id}


def _on_host(leaf: Any) -> Any:
    """Returns a parameter from which layers can be read; raises InputError if another process has a part of it."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    require(
        leaf.is_fully_addressable,
        "the parameters are spread over processes; expected all in this one; gather them first",
    )
    devices = list(leaf.devices())
    # The processor's memory is the host's, so nothing is copied; from other devices, layer after layer is.
    return np.asarray(leaf) if len(devices) == 1 and devices[0].platform == "cpu" else leaf


def parse_size(size: int | str) -> int:
    """Returns the bytes of a size such as "5GB", "200MiB" or 1000; raises InputError for anything else."""
    match = _SIZE.fullmatch(str(size).strip().upper())
    number = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")) if match else 0
    require(1 <= number < 2**63, f"max_shard_size is {size!r}; expected bytes, or a size such as '5GB' or '200MiB'")
    return number


def write_tensors(folder: Path, tensors: Views, types: Mapping[str, str], most: int) -> None:
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
        arrays = {}
        for name in names:
            array = np.asarray(tensors[name])
            # Numbers too large for the type become infinite.
            with np.errstate(over="ignore"):
                found = arrays[name] = array.astype(TYPES[types[name]], copy=False)
            if found.dtype != array.dtype and not np.isfinite(found).all() and np.isfinite(array).all():
                raise InputError(f"{name} holds numbers that {types[name]} cannot; save with dtype='float32'")
        save_file(arrays, folder / file, {"format": "pt"})
    if split.is_sharded:
        metadata = {"total_parameters": sum(counts.values()), **split.metadata}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))})
