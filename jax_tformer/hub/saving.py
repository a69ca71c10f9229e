"""Writes a folder that Hugging Face's `from_pretrained` opens."""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import traverse_util

from jax_tformer.config import DropoutConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.data.tokenizers import Tokenizer, load_tokenizer
from jax_tformer.files import new_folder, require_new_folder, user_path, write_json
from jax_tformer.functional import AnyTransformer, Params
from jax_tformer.hub.families import FAMILIES, config_from_huggingface
from jax_tformer.hub.names import WeightsError, reference_views, require_fit
from jax_tformer.hub.origin import CONFIG, GENERATION, Origin
from jax_tformer.hub.tables import CannotExpress, Family, known_names, their_views, write_settings
from jax_tformer.hub.tensors import STORED, Region, View, parse_size, write_tensors
from jax_tformer.lora import merge_lora

StoredDtype = Literal["float64", "float32", "bfloat16", "float16"]
DTYPES = {type_: dtype for dtype, type_ in STORED.items()}


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
    out, most = user_path(folder), parse_size(max_shard_size)
    require_new_folder(out)
    if dtype is not None and dtype not in STORED:
        raise InputError(f"dtype is {dtype!r}; expected one of {', '.join(STORED)}, or None")
    rows = net.config.vocab_size or 0
    if tokenizer is not None and tokenizer.table_rows > rows:
        raise InputError(
            f"the tokenizer has {tokenizer.table_rows:,} ids and the model's table {rows:,} rows; expected at most "
            "as many; save the model with the tokenizer that it was trained with"
        )
    chosen, said = described(net, architecture)
    origin: Origin | None = net.origin if net.origin is not None and net.origin.architecture == chosen else None
    tensors, types = _tensors(net, params, chosen, origin, dtype)
    changed = _changed_ids(net.origin, tokenizer)
    config = _config_json(net, chosen, said, tensors, types, tokenizer) | changed
    try:
        with new_folder(out) as whole:
            write_tensors(whole, tensors, types, most)
            _write_tokenizer(whole, net, tokenizer, changed)
            write_json(whole / CONFIG, config)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}; expected a place with room for it") from error


def described(net: AnyTransformer, architecture: str | None = None) -> tuple[str, dict[str, object]]:
    """Returns the class (this one, or the first that can), and the fields of config.json that say what our config says.

    Raises CannotExpress if none can express the config, with what is in the way of the nearest.
    """
    if architecture is not None and architecture not in FAMILIES:
        raise InputError(f"architecture is {architecture!r}; expected one of {', '.join(FAMILIES)}")
    if architecture is not None or net.origin is not None:
        chosen = architecture or net.origin.architecture
        return chosen, _settings(FAMILIES[chosen], net.config)
    problems: list[InputError] = []
    for name, family in FAMILIES.items():
        try:
            return name, _settings(family, net.config)
        except InputError as error:
            problems.append(error)
    # Of the classes with the same stacks, the one with the fewest differences.
    nearest = min(problems, key=lambda error: len(error.changed) if isinstance(error, CannotExpress) else math.inf)
    told = f"no class can express this config, of {', '.join(FAMILIES)}; the nearest: {nearest}"
    raise CannotExpress(told, nearest.model_type, nearest.changed) if isinstance(nearest, CannotExpress) else nearest


def _settings(family: Family, config: TransformerConfig) -> dict[str, object]:
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


def _tensors(
    net: AnyTransformer, params: Params, chosen: str, origin: Origin | None, dtype: StoredDtype | None
) -> tuple[dict[str, View], dict[str, str]]:
    """Returns views of all arrays by the names in the file, and the type to store of each."""
    flat = traverse_util.flatten_dict(params, sep=".")
    given = {path: leaf for path, leaf in flat.items() if hasattr(leaf, "shape")}
    declared = traverse_util.flatten_dict(net.shapes, sep=".")
    require_fit("net", given, {path: leaf.shape for path, leaf in declared.items()}, ())
    if odd := sorted({leaf.dtype.name for leaf in given.values()} - STORED.keys()):
        raise WeightsError(f"the parameters hold {odd[0]}; expected {', '.join(STORED)}")
    rows = FAMILIES[chosen].rows(net.config)
    stored = {} if origin is None else origin.types
    known = known_names(rows, net.config, stored)
    ours = reference_views({path: _on_host(leaf) for path, leaf in given.items()}, net.shapes)
    theirs = their_views(rows, net.config, ours, names=None if origin is None else set(filter(None, known.values())))
    spelled = {name: spelling for spelling, name in known.items() if name is not None}
    tensors = {spelled.get(name, name): view for name, view in theirs.items()}
    # As stored, unless the caller has chosen a type since.
    keep = origin is not None and not origin.converted and origin.dtype == net.config.compute.parameter_dtype
    own = {name: STORED[view.dtype.name] for name, view in tensors.items()}
    if dtype is not None:
        return tensors, dict.fromkeys(tensors, STORED[dtype])
    return tensors, {name: stored.get(name, type_) if keep else type_ for name, type_ in own.items()}


def _config_json(
    net: AnyTransformer,
    chosen: str,
    said: dict[str, object],
    tensors: Mapping[str, View],
    types: Mapping[str, str],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Returns config.json: as it was, with what has changed since.

    A setting that still says the same keeps its words: the names of the classes, say, if their number is the same.
    """
    dtype = DTYPES[Counter(types.values()).most_common(1)[0][0]]
    origin: Origin | None = net.origin
    if origin is None or origin.architecture != chosen:
        # Of RoBERTa, a setting decides the padding token.
        return {"architectures": [chosen], **_special_ids(net, tokenizer), **said, "dtype": dtype}
    config = dict(origin.config)

    def says_the_same(config: dict[str, Any]) -> bool:
        with suppress(InputError):
            return replace(config_from_huggingface(config, tensors), compute=net.config.compute) == net.config
        return False

    if not says_the_same(config):
        for setting in FAMILIES[chosen].settings:
            config.pop(setting.synonym or "", None)
        config |= said
        for name in said.keys() & origin.config.keys() - {"label2id"}:
            if says_the_same(config | {name: origin.config[name]}):
                config[name] = origin.config[name]
        if "label2id" in origin.config and config.get("id2label") == origin.config.get("id2label"):
            config["label2id"] = origin.config["label2id"]
    if dict(types) != {name: origin.types.get(name, type_) for name, type_ in types.items()}:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    return config


def _changed_ids(origin: Origin | None, tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The special ids of the tokenizer, where they differ from those of the one that came with the model."""
    loaded = None if origin is None or tokenizer is None else _as_loaded(origin.files)
    if loaded is None:
        return {}
    names = {"bos_token_id": "start_id", "eos_token_id": "end_id", "pad_token_id": "pad_id"}
    ids = {name: getattr(tokenizer, role) for name, role in names.items()}
    return {name: id for name, id in ids.items() if id != getattr(loaded, names[name])}


def _special_ids(net: AnyTransformer, tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The ids of the tokenizer; the defaults of the class would be those of its first checkpoint."""
    if tokenizer is None:
        return {}
    ids = {"pad_token_id": tokenizer.pad_id}
    if net.config.decoder is not None:
        ids |= {"bos_token_id": tokenizer.start_id, "eos_token_id": tokenizer.end_id}
    # Null is no value of this one in every class.
    if net.config.encoder is not None and net.config.decoder is not None and tokenizer.start_id is not None:
        ids["decoder_start_token_id"] = tokenizer.start_id
    return ids


def _write_tokenizer(
    folder: Path, net: AnyTransformer, tokenizer: Tokenizer | None, changed: Mapping[str, int | None]
) -> None:
    """Writes generation_config.json and the tokenizer, in the files that it came in if the net came with it.

    `changed` are the special ids of another tokenizer.
    """
    files = dict(net.origin.files) if net.origin is not None else {}
    generation = files.pop(GENERATION, None)
    loaded = _as_loaded(files)
    if tokenizer is not None and (loaded is None or tokenizer.to_json() != loaded.to_json()):
        files = {}
        tokenizer.save(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if generation is not None:
        (folder / GENERATION).write_bytes(generation)
        if changed:
            write_json(folder / GENERATION, {**json.loads(generation), **changed})
    elif net.origin is None and net.config.decoder is not None and tokenizer is not None:
        write_json(folder / GENERATION, _special_ids(net, tokenizer))


def _as_loaded(files: Mapping[str, bytes]) -> Tokenizer | None:
    """Returns the tokenizer in these files; None if there is none."""
    if "tokenizer.json" not in files:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return load_tokenizer(folder)


class _OnDevices:
    """An array on devices as a view: only what is read is fetched."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, np.dtype(array.dtype)

    def __getitem__(self, region: Region) -> np.ndarray:
        return np.asarray(self._array[region])


def _on_host(leaf: Any) -> View:
    """Returns a view of a parameter; raises InputError if it is partly on devices of another process."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if not leaf.is_fully_addressable:
        raise InputError("the parameters are spread over processes; expected all in this one; gather them first")
    devices = list(leaf.devices())
    # The processor's memory is the host's, so nothing is copied.
    return np.asarray(leaf) if len(devices) == 1 and devices[0].platform == "cpu" else _OnDevices(leaf)
