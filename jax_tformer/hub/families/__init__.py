"""Converts weights and configs of Hugging Face models to ours and back, as NumPy arrays and plain dicts.

Every file of this folder that defines `FAMILIES` adds its classes; see docs/adding-a-family.md.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.hub.names import once
from jax_tformer.hub.tables import (
    Arrays,
    Family,
    Weights,
    read_rows,
    read_settings,
    their_views,
    write_settings,
)
from jax_tformer.hub.tensors import View, read

_FILES = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
FAMILIES: dict[str, Family] = {
    name: family for file in _FILES for name, family in getattr(file, "FAMILIES", {}).items()
}
"""Class in `transformers`, which config.json names under `architectures` -> its tables."""


def config_from_huggingface(
    config: Mapping[str, object], weights: Mapping[str, View] | None = None
) -> TransformerConfig:
    """Returns our config of the model that a config.json (parsed) describes, computing in float32.

    `weights` are its arrays: some parts, such as the pooler of BertModel, are there if their arrays are. Without them,
    the model has the parts that the class has by default. Raises InputError for unknown classes, and for settings that
    our config cannot express.
    """
    if config.get("quantization_config") is not None:
        raise InputError("quantization_config is set in the Hugging Face config; expected weights of floating point")
    family = family_of(config)
    ours = read_settings(family, config)
    return ours if weights is None else family.adapted(ours, weights)


def family_of(config: Mapping[str, object]) -> Family:
    """Returns the tables of the class that a config.json names; raises InputError for unknown classes."""
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        raise InputError(f"architectures is {named!r} in the Hugging Face config; expected a list of one class")
    return _family(str(named[0]))


def from_huggingface(config: Mapping[str, object], weights: Weights) -> tuple[TransformerConfig, Arrays]:
    """Returns our config, and the weights with the names and layouts of `torch_ref`, bit for bit, in their own types.

    `config` is a parsed config.json; `weights` are their arrays by name, as a mapping or in pairs. Then
    `names.from_reference(weights, transformer(config).shapes)` makes our parameters. Raises InputError as
    `config_from_huggingface` does, and WeightsError for arrays that do not fit.
    """
    given, doubled = once(weights)
    ours = config_from_huggingface(config, given)
    return ours, read_rows(family_of(config).rows(ours), ours, given, doubled)


def to_huggingface(architecture: str, config: TransformerConfig, weights: Weights) -> tuple[dict[str, object], Arrays]:
    """Inverts `from_huggingface`: returns the fields of config.json, and the arrays of a model of that class.

    Raises InputError if the class is unknown or cannot express `config`, and WeightsError if the weights (as
    `names.to_reference` returns them) do not fit `config`.
    """
    family = _family(architecture)
    theirs = {"architectures": [architecture], **write_settings(family, config)}
    given, doubled = once(weights)
    views = their_views(family.rows(config), config, given, doubled)
    return theirs, {name: read(view) for name, view in views.items()}


def _family(architecture: str) -> Family:
    if architecture not in FAMILIES:
        raise InputError(f"{architecture!r} is not a known Hugging Face class; expected one of {', '.join(FAMILIES)}")
    return FAMILIES[architecture]
