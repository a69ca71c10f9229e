"""Describes a family of Hugging Face models by two tables, and converts its configs and weights in both directions.

Settings map fields of their config.json to fields of our config, and Rows map their arrays to ours. Reading and writing
use the same tables, so they cannot disagree. "Our" arrays have the names and layouts of `torch_ref`, which
`jax_tformer.weights.names` converts to parameters.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import einops
import numpy as np
from flax import traverse_util
from numpy.typing import ArrayLike

from jax_tformer.config import Activation, TransformerConfig
from jax_tformer.errors import InputError
from jax_tformer.files import differences, from_dict, to_dict
from jax_tformer.model.functional import transformer
from jax_tformer.weights.names import WeightsError, listed, once, reference_shape, require_fit, slots

Arrays = dict[str, np.ndarray]
Settings = Mapping[str, object]
"""The fields of a config.json."""
Weights = Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]]

MATRIX = "(n o) i -> n o i"
"""The layout of nn.Linear and nn.Embedding, as in ours; n of our arrays make up one of theirs, mostly 1."""
CONV1D = "i (n o) -> n o i"
"""The layout of GPT-2's Conv1D: inputs first."""
VECTOR = "(n o) -> n o"

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Hugging Face's activation -> ours. `gelu_fast` rounds sqrt(2 / pi) to ten digits, which changes it by 2e-13."""


class Setting(NamedTuple):
    """A field of config.json, and all fields of our config (`decoder.num_layers`) that get its value."""

    theirs: str
    ours: tuple[str, ...]
    values: Mapping[str, object] | Mapping[bool, object] | None = None
    """Their value -> ours, if the names differ; of several with one meaning, the first is written."""
    synonym: str | None = None
    """Another name by which Hugging Face reads the field."""
    default: Callable[[Settings], object] | None = None
    """Computes the value of an absent field from our fields read so far, by name; None: the template's value."""


class Row(NamedTuple):
    """One of their arrays; `*` stands for the number of the layer in all names.

    A row for one of our arrays that an earlier row has filled is a tie: its array may be absent, or must be equal.
    """

    theirs: str
    ours: tuple[str, ...] | None
    """Our arrays that it becomes; None: deliberately dropped, and may be absent."""
    axes: str = MATRIX
    idle: int = 0
    """How many leading rows of theirs are never used: reading drops them, writing makes them zero."""


def pair(theirs: str, ours: str, axes: str = MATRIX) -> tuple[Row, Row]:
    """Makes the rows of one module's weight and bias."""
    return Row(f"{theirs}.weight", (f"{ours}.weight",), axes), Row(f"{theirs}.bias", (f"{ours}.bias",), VECTOR)


@dataclass(frozen=True)
class Family:
    """Describes one class of Hugging Face models."""

    model_type: str
    template: TransformerConfig
    """Our config for a config.json without settings; fields that no setting names are the same in the whole family."""
    settings: tuple[Setting, ...]
    fixed: Settings
    """Fields of config.json that change the function; only this value, the default, is supported."""
    rows: Callable[[TransformerConfig], tuple[Row, ...]]


def read_settings(family: Family, config: Settings) -> TransformerConfig:
    """Returns our config for a config.json; absent and null settings mean Hugging Face's defaults.

    Raises InputError for settings that our config cannot express, and for values of a wrong type.
    """
    for name, only in family.fixed.items():
        if (given := config.get(name)) not in (None, only):
            raise InputError(f"{name} is {given!r} in the Hugging Face config; only {only!r} is supported")
    flat = traverse_util.flatten_dict(to_dict(family.template), sep=".")
    for setting in family.settings:
        given = config.get(setting.theirs)
        if given is None and setting.synonym is not None:
            given = config.get(setting.synonym)
        if given is not None:
            flat |= dict.fromkeys(setting.ours, _translated(setting, given))
        elif setting.default is not None:
            flat |= dict.fromkeys(setting.ours, setting.default(flat))
    return from_dict(TransformerConfig, traverse_util.unflatten_dict(flat, sep="."), where="the Hugging Face config")


def write_settings(family: Family, config: TransformerConfig) -> dict[str, object]:
    """Inverts `read_settings`; raises InputError, which lists what the family cannot express.

    Leaves out `config.compute`, which is not part of a model there.
    """
    flat = traverse_util.flatten_dict(to_dict(config), sep=".")
    for side in ("encoder", "decoder"):
        if (getattr(config, side) is None) != (getattr(family.template, side) is None):
            raise InputError(f"a model of type {family.model_type!r} and this config do not both have an {side}")
    written = {"model_type": family.model_type, **family.fixed}
    for setting in family.settings:
        value = flat[setting.ours[0]]
        names = [name for name, meaning in (setting.values or {value: value}).items() if meaning == value]
        # A value without a name is read back as the default, so the comparison below finds it.
        written[setting.theirs] = names[0] if names else None
    read = replace(read_settings(family, written), compute=config.compute)
    if read != config:
        lost = "; ".join(differences(to_dict(read), to_dict(config)))
        raise InputError(f"a model of type {family.model_type!r} cannot express this (possible -> asked): {lost}")
    return written


def _translated(setting: Setting, given: object) -> object:
    if setting.values is None:
        return given
    for theirs, ours in setting.values.items():
        if theirs == given:
            return ours
    allowed = ", ".join(map(repr, setting.values))
    raise InputError(f"{setting.theirs} is {given!r} in the Hugging Face config; expected one of {allowed}")


class Place(NamedTuple):
    """One of their arrays in one layer, and those of ours that it holds."""

    theirs: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    axes: str
    idle: int
    tied: bool
    """Whether an earlier place holds the same numbers."""


def read_rows(rows: tuple[Row, ...], config: TransformerConfig, weights: Weights) -> Arrays:
    """Converts their arrays to ours, bit for bit, each in its own type.

    Raises WeightsError, which lists all arrays without a place, places without an array, and what else does not fit.
    """
    places = _places(rows, _shapes(config))
    dropped = re.compile(
        "|".join(re.escape(row.theirs).replace(r"\*", r"\d+") for row in rows if row.ours is None) or "(?!)"
    )
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    given, doubled = once((name, array) for name, array in pairs if not dropped.fullmatch(name))
    tied = [place.theirs for place in places if place.tied]
    require_fit("config", given, {place.theirs: place.shape for place in places}, doubled, optional=tied)
    ours: Arrays = {}
    for place in places:
        if place.theirs not in given:
            continue
        parts = einops.rearrange(given[place.theirs][place.idle :], place.axes, n=len(place.ours))
        for name, part in zip(place.ours, parts, strict=True):
            if place.tied and part.tobytes() != ours[name].tobytes():
                raise WeightsError(f"{place.theirs} should repeat the array that becomes {name}, and differs from it")
            ours[name] = np.ascontiguousarray(part)
    return ours


def write_rows(rows: tuple[Row, ...], config: TransformerConfig, weights: Weights) -> Arrays:
    """Inverts `read_rows`. Writes tied arrays once, as Hugging Face does, and leaves out dropped ones.

    Raises WeightsError, which lists all that does not fit `config`.
    """
    shapes = _shapes(config)
    given, doubled = once(weights)
    require_fit("config", given, shapes, doubled)
    theirs = {}
    for place in _places(rows, shapes):
        parts = [given[name] for name in place.ours]
        if len({part.dtype for part in parts}) > 1:
            raise WeightsError(f"{', '.join(place.ours)} become one array; expected one type, not several")
        if not place.tied:
            whole = einops.rearrange(np.stack(parts), _inverse(place.axes))
            idle = np.zeros((place.idle, *whole.shape[1:]), whole.dtype)
            theirs[place.theirs] = np.ascontiguousarray(np.concatenate([idle, whole]))
    return theirs


@lru_cache(maxsize=8)
def _shapes(config: TransformerConfig) -> Mapping[str, tuple[int, ...]]:
    return {name: reference_shape(slot) for name, slot in slots(transformer(config).shapes).items()}


def _places(rows: tuple[Row, ...], shapes: Mapping[str, tuple[int, ...]]) -> list[Place]:
    """Expands the rows to all layers; raises WeightsError unless they fill exactly our arrays (`shapes`)."""
    places: list[Place] = []
    filled: set[str] = set()
    for row in rows:
        if row.ours is None:
            continue
        for layer in map(str, range(_layers(row.ours[0], shapes))):
            theirs, ours = row.theirs.replace("*", layer), tuple(name.replace("*", layer) for name in row.ours)
            if absent := [name for name in ours if name not in shapes]:
                raise WeightsError(f"{theirs} becomes {listed(absent)}, which a model of this config does not have")
            whole = einops.rearrange(np.empty((len(ours), *shapes[ours[0]]), bool), _inverse(row.axes))
            shape = (row.idle + whole.shape[0], *whole.shape[1:])
            places.append(Place(theirs, shape, ours, row.axes, row.idle, ours[0] in filled))
            filled.update(ours)
    if unfilled := shapes.keys() - filled:
        raise WeightsError(f"this family has nothing that becomes {listed(unfilled)}")
    return places


def _layers(ours: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns how many layers the stack of this name has; 1 if the name has no `*`."""
    stack, star, _ = ours.partition("*")
    numbered = re.compile(re.escape(stack) + r"(\d+)\.")
    return 1 + max((int(match[1]) for name in shapes if star and (match := numbered.match(name))), default=0)


def _inverse(axes: str) -> str:
    before, after = axes.split(" -> ")
    return f"{after} -> {before}"
