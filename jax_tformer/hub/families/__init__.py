"""Describes a family of Hugging Face models by two tables, and converts its configs and weights in both directions.

Settings map fields of their config.json to fields of our config, and Rows map their arrays to ours. Reading and writing
use the same tables, so they cannot disagree. "Our" arrays have the names and layouts of `torch_ref`, which
`jax_tformer.hub.names` converts to parameters.

Every file of this folder that defines `FAMILIES` adds its classes; see docs/adding-a-family.md.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

import einops
import jax
import numpy as np

from jax_tformer.config import Activation, StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError, require
from jax_tformer.files import changed_fields, differences, from_dict
from jax_tformer.functional import transformer
from jax_tformer.hub.names import (
    Lazy,
    View,
    Views,
    Weights,
    WeightsError,
    copy_array,
    listed,
    once,
    read,
    reference_shape,
    require_fit,
    same_bytes,
    slots,
)
from jax_tformer.model.parameters import flatten, unflatten

Arrays = dict[str, np.ndarray]
Settings = Mapping[str, Any]
Fields = dict[str, Any]
"""The fields of a config.json, one that is there or one that is being made."""

MATRIX = "(n o) i -> n o i"
"""The layout of nn.Linear and nn.Embedding, as in ours; n of our arrays make up one of theirs, mostly 1."""
CONV1D = "i (n o) -> n o i"
"""The layout of GPT-2's Conv1D: inputs first."""
VECTOR = "(n o) -> n o"

BIASES = "decoder.query_bias decoder.key_bias decoder.value_bias decoder.output_bias"
"""Those of a decoder's attention, which one field of theirs decides."""
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


_MOST_LAYERS = 1000
"""Layers are counted one by one, so a stranger's config.json could otherwise ask for a count without end."""


class CannotExpress(InputError):
    """A config that no model of a type has; `changed` are the fields in the way: its value of each, and ours."""

    def __init__(self, message: str, model_type: str, changed: Mapping[str, tuple[Any, Any]]) -> None:
        super().__init__(message)
        self.model_type = model_type
        self.changed = changed


NEUTRAL: Mapping[str, tuple[object, ...]] = {"per_layer_config": (None,), "transformers_weights": (None,)}
"""What a model of any class of transformers obeys and ours cannot say -> the values with which it changes nothing."""
NEUTRAL_IN_DECODERS: Mapping[str, tuple[object, ...]] = {
    "is_causal": (True,),
    # The cache of `generate` has these windows, whether or not the class has any.
    "sliding_window": (None,),
    "layer_types": (None, "full_attention"),
    "attention_chunk_size": (None,),
    "kv_sharing_modes": (None,),
}
"""The same of classes with a decoder; of a list, every member must be one of the values."""


class Setting(NamedTuple):
    """A field of config.json, and all fields of our config (`decoder.num_layers`) that get its value."""

    theirs: str
    ours: str
    """Their names, in one text."""
    values: Mapping[Any, object] | None = None
    """Their value -> ours, if the names differ; of several with one meaning, the first is written."""
    default: Callable[[Settings], object] | None = None
    """Computes the value of an absent field from our fields read so far, by name; None: the template's value."""
    nullable: bool = False
    """Whether null means None in our fields too; otherwise null means the default, as an absent field does."""
    said: str | None = None
    """The field of config.json that decides it, where `theirs` is made by `flatten`."""

    @property
    def paths(self) -> list[str]:
        """All fields of our config that get its value."""
        return self.ours.split()


def named(**fields: str) -> tuple[Setting, ...]:
    """Makes the settings that take their value as it is."""
    return tuple(Setting(theirs, ours) for theirs, ours in fields.items())


class Row(NamedTuple):
    """One of their arrays; `*` stands for the number of the layer in all names.

    A row for one of our arrays that an earlier row has filled is a tie: its array may be absent, or must be equal.
    """

    theirs: str
    ours: str | None
    """Our array that it becomes, or several in one text; None: deliberately dropped, and may be absent."""
    axes: str | None = None
    """None: MATRIX or VECTOR, as our array is."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Sizes that `axes` names and shapes leave open, such as the number of heads."""
    filled: str | None = None
    """Our array that stands in a dropped one when it is written: no output reads it, and transformers expects it."""
    optional: bool = False
    """Whether the row counts only for configs whose model has these arrays, like the bias of a projection."""


Rows = tuple[Row, ...]


def modules(names: Mapping[str, str], theirs: str = "", ours: str = "", axes: str | None = None) -> Rows:
    """Makes the rows of the weights and biases of modules: their name -> ours, or several in one text.

    `theirs` and `ours` come before all names, and `axes` are those of the weights. Our model decides which have biases.
    """
    return tuple(
        Row(
            f"{theirs}{name}.{leaf}",
            " ".join(f"{ours}{each}.{leaf}" for each in our.split()),
            None if optional else axes,
            optional=optional,
        )
        for name, our in names.items()
        for leaf, optional in (("weight", False), ("bias", True))
    )


def head(theirs: str, config: TransformerConfig) -> Row:
    """Makes the row of the head's weight, which is the token table if they are tied."""
    return Row(theirs, "embedding.tokens.weight" if config.tied_head else "head.weight")


@dataclass(frozen=True)
class Family:
    """Describes one class of Hugging Face models."""

    model_type: str
    template: TransformerConfig
    """Our config for a config.json without settings; fields that no setting names are the same in the whole family."""
    settings: tuple[Setting, ...]
    rows: Callable[[TransformerConfig], Rows]
    fixed: Settings = field(default_factory=dict)
    """Fields of config.json that change the function; only this value, the default, is supported."""
    flatten: Callable[[Settings], Settings] = lambda config: config
    """Comes before the table when a config.json is read: brings what stands in nested objects, in older fields or in
    lists of layers into fields of their own, which the table can name. Raises InputError for what it cannot bring."""
    nest: Callable[[Settings], Settings] = lambda written: written
    """Inverts `flatten`; comes after the table when a config.json is written."""
    adapted: Callable[[TransformerConfig, Views], TransformerConfig] = lambda config, weights: config
    """Changes our config by what only their arrays tell: parts that config.json does not mention, or ties. Raises
    WeightsError for arrays that no row reads and that the config contradicts."""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Another name by which Hugging Face reads a field -> the field, as `attribute_map` of the class there has them."""


ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
"""What most families call the projections of attention."""
LAYER = {
    "self_attn_layer_norm": "self_attention_norm",
    "fc1": "feedforward.up",
    "fc2": "feedforward.down",
    "final_layer_norm": "feedforward_norm",
}
"""What families from fairseq call the rest of a layer."""


def canonical(config: TransformerConfig) -> TransformerConfig:
    """Returns a config of the same function in which words, and None, stand for the numbers that they would mean."""

    def stack(old: StackConfig | None) -> StackConfig | None:
        if old is None:
            return None
        words: dict[float, Any] = {1: "none", config.d_model: "model_width", config.head_width(old): "head_width"}
        scale = config.scale_width(old)
        return replace(
            old,
            key_value_heads=None if old.key_value_heads == old.num_heads else old.key_value_heads,
            head_width=None if old.head_width == config.d_model / old.num_heads else old.head_width,
            attention_scale=words.get(scale, scale),
        )

    return replace(config, encoder=stack(config.encoder), decoder=stack(config.decoder))


def read_settings(family: Family, config: Settings) -> TransformerConfig:
    """Returns our config for a config.json; absent and null settings mean Hugging Face's defaults.

    Raises InputError for settings that our config cannot express, and for values of a wrong type.
    """
    if (given := config.get("model_type")) not in (None, family.model_type):
        raise InputError(
            f"model_type is {given!r} in the Hugging Face config, and architectures names a class of type "
            f"{family.model_type!r}; expected one type; correct the wrong one"
        )
    config = _renamed(family, config)
    for setting in family.settings:
        layers = config.get(setting.theirs) if setting.paths[0].endswith(".num_layers") else 0
        require(
            not isinstance(layers, int) or layers <= _MOST_LAYERS,
            f"{setting.theirs} is {layers} in the Hugging Face config; expected at most {_MOST_LAYERS}",
        )
    config = family.flatten(config)
    # Of what the family cannot express, only one value is supported.
    neutral = {**NEUTRAL, **({} if family.template.decoder is None else NEUTRAL_IN_DECODERS)}
    neutral |= {name: (None, only) for name, only in family.fixed.items()}
    named = {setting.theirs for setting in family.settings}
    for name, values in neutral.items():
        given = config.get(name, values[0])
        fits = name in named or all(one in values for one in (given if isinstance(given, list) else [given]))
        require(fits, f"{name} is {given!r} in the Hugging Face config; only {values[-1]!r} is supported")
    flat = flatten(asdict(family.template))
    for setting in family.settings:
        given = config.get(setting.theirs)
        if given is not None:
            if setting.values is not None:
                known = [ours for theirs, ours in setting.values.items() if theirs == given]
                require(
                    known,
                    f"{setting.theirs} is {given!r} in the Hugging Face config; expected one of "
                    f"{', '.join(map(repr, setting.values))}",
                )
                given = known[0]
            flat |= dict.fromkeys(setting.paths, given)
        elif setting.nullable and setting.theirs in config:
            flat |= dict.fromkeys(setting.paths, None)
        elif setting.default is not None:
            flat |= dict.fromkeys(setting.paths, setting.default(flat))
    try:
        return canonical(from_dict(TransformerConfig, unflatten(flat), where="the Hugging Face config"))
    except InputError as error:
        raise InputError(_in_their_words(family, str(error), flat)) from error


def _in_their_words(family: Family, problem: str, flat: Settings) -> str:
    """Returns what our config says is wrong with `flat`, with the names that config.json has for our fields."""

    def named(match: re.Match[str]) -> str:
        ours = match[1]
        value = match[2]
        found = {
            setting.said or setting.theirs: [str(flat[path]) for path in setting.paths]
            for setting in family.settings
            if any(f".{path}".endswith(f".{ours}") for path in setting.paths)
        }
        alike = [name for name, values in found.items() if {value, str(value).removesuffix(".0")} & {*values}]
        return " or ".join(alike or found or [ours]) + match[0].removeprefix(ours)

    return re.sub(r"([a-z][a-z_.]+)(?: is (\S+?)[;,]?(?= )|(?=\"| / | set\b))", named, problem)


def write_settings(family: Family, config: TransformerConfig) -> Fields:
    """Inverts `read_settings`; raises CannotExpress, which lists what the family cannot express, and
    WeightsError if our model has other parts than theirs.

    Leaves out `config.compute`, which is not part of a model there.
    """
    flat = flatten(asdict(config))
    for side in ("encoder", "decoder"):
        stack = getattr(config, side)
        require(
            (stack is None) == (getattr(family.template, side) is None),
            f"a model of type {family.model_type!r} and this config do not both have an {side}",
        )
        if stack is not None:
            # Numbers that None stands for, which not every reader works out.
            flat[f"{side}.key_value_heads"] = stack.key_value_heads or stack.num_heads
            flat[f"{side}.head_width"] = config.head_width(stack)
    table = {"model_type": family.model_type, **family.fixed}
    for setting in family.settings:
        value = flat[setting.paths[0]]
        names = [name for name, meaning in (setting.values or {value: value}).items() if meaning == value]
        # A value without a name is read back as the default, so the comparison below finds it.
        table[setting.theirs] = names[0] if names else None
    written = dict(family.nest(table))
    # Stand-ins for the arrays that will be written: alike where they hold the same array of ours.
    rows = family.rows(config)
    arrays = {row.theirs: np.array(row.ours) for row in rows if row.ours is not None}
    config = canonical(config)
    read = replace(family.adapted(read_settings(family, written), arrays), compute=config.compute)
    if read != config:
        lost = "; ".join(differences(read, config))
        raise CannotExpress(
            f"a model of type {family.model_type!r} cannot express this (possible -> asked): {lost}",
            family.model_type,
            changed_fields(read, config),
        )
    Layout(rows, config)
    return written


def _renamed(family: Family, config: Settings) -> Settings:
    """Returns `config` with one name of each field."""
    renamed = dict(config)
    for synonym, name in family.synonyms.items():
        value = config.get(name)
        other = config.get(synonym)
        require(
            value is None or other is None or value == other,
            f"{name} is {value!r} and {synonym} is {other!r} in the Hugging Face config, two names of one setting; "
            "expected one value; remove the wrong one",
        )
        if value is None and synonym in config:
            renamed[name] = other
    return renamed


class Place(NamedTuple):
    """One of their arrays in one layer, and those of ours that it holds."""

    theirs: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    axes: str
    sizes: dict[str, int]
    tied: bool
    """Whether an earlier place holds the same numbers."""

    def split(self, theirs: np.ndarray) -> np.ndarray:
        """Returns `[n, ...]`: of one of their arrays the part for each of ours, in which more axes may be apart.

        Nothing is copied, so that who writes into the parts writes into the array.
        """
        before, after = self.axes.split(" -> ")
        apart = re.sub("[()]", "", after)
        return einops.rearrange(theirs, f"{before} -> {apart}", n=len(self.ours), **self.sizes)

    def part(self, theirs: View, number: int) -> np.ndarray:
        """Returns the part for one of our arrays."""
        return self.split(np.asarray(theirs))[number]

    def fuse(self, ours: Sequence[View]) -> np.ndarray:
        """Makes their array of ours."""
        theirs = np.empty(self.shape, ours[0].dtype)
        for part, array in zip(self.split(theirs), ours, strict=True):
            copy_array(part, np.asarray(array).reshape(part.shape))
        return theirs


class Layout:
    """The rows of a class for one config: where each of their arrays is among ours."""

    def __init__(self, rows: Rows, config: TransformerConfig) -> None:
        """Expands the rows to all layers; raises WeightsError unless they fill exactly the arrays of `config`."""
        self._rows = rows
        self._shapes = {name: reference_shape(slot) for name, slot in slots(transformer(config).shapes).items()}
        self.places = []
        filled = set()
        for row in rows:
            if row.ours is None:
                continue
            stack = config.stacks.get(row.ours.partition(".")[0])
            for layer in range(stack.num_layers if stack is not None and "*" in row.ours else 1):
                theirs, *ours = (name.replace("*", str(layer)) for name in (row.theirs, *row.ours.split()))
                if absent := [name for name in ours if name not in self._shapes]:
                    if row.optional:
                        continue
                    raise WeightsError(f"{theirs} becomes {listed(absent)}, which a model of this config does not have")
                self.places.append(self._place(row, theirs, *ours, tied=ours[0] in filled))
                filled.update(ours)
        if unfilled := self._shapes.keys() - filled:
            raise WeightsError(f"this family has nothing that becomes {listed(unfilled)}")

    def _place(self, row: Row, theirs: str, *ours: str, tied: bool = False) -> Place:
        shape = self._shapes[ours[0]]
        axes = row.axes or (VECTOR if len(shape) == 1 else MATRIX)
        return Place(theirs, _fused_shape((len(ours), *shape), axes, row.sizes), ours, axes, dict(row.sizes), tied)

    def known(self, names: Iterable[str]) -> dict[str, str | None]:
        """Returns, for each name in a file, its name in the rows; None for arrays that are dropped.

        Files of the bare model leave out the first part ("wte.weight" for "transformer.wte.weight"), and old ones call
        the parameters of norms gamma and beta. A name without a place stays as it is.
        """
        places = {place.theirs for place in self.places}
        dropped = re.compile(
            "|".join(re.escape(row.theirs).replace(r"\*", r"\d+") for row in self._rows if row.ours is None) or "(?!)"
        )
        first_parts = sorted({row.theirs.split(".")[0] for row in self._rows})
        known = {}
        for name in names:
            newer = re.sub(r"\.beta$", ".bias", re.sub(r"\.gamma$", ".weight", name))
            spellings = [name, newer, *(f"{first}.{newer}" for first in first_parts)]
            found = [spelling for spelling in spellings if spelling in places or dropped.fullmatch(spelling)]
            chosen = found[0] if found and (found[0] in (name, newer) or len(found) == 1) else name
            known[name] = None if dropped.fullmatch(chosen) else chosen
        return known

    def ours(self, weights: Views) -> dict[str, View]:
        """Returns views of their arrays as ours. Reads only arrays that should repeat others, to compare them.

        Raises WeightsError, which lists all arrays without a place, places without an array, and what else does not
        fit.
        """
        called = self.known(weights)
        given = {known: weights[name] for name, known in called.items() if known is not None}
        doubled = [name for name, known in called.items() if known is not None and given[known] is not weights[name]]
        # Of arrays that repeat each other, one is enough.
        filled = {place.ours[0] for place in self.places if place.theirs in given}
        optional = [place.theirs for place in self.places if place.tied or place.ours[0] in filled]
        shapes = {place.theirs: place.shape for place in self.places}
        require_fit("config", given, shapes, doubled=doubled, optional=optional)
        ours: dict[str, View] = {}
        for place in self.places:
            if place.theirs not in given:
                continue
            whole = given[place.theirs]
            for number, name in enumerate(place.ours):
                part = Lazy(self._shapes[name], whole.dtype, partial(place.part, whole, number))
                if name in ours and not same_bytes(part, ours[name]):
                    raise WeightsError(
                        f"{place.theirs} should repeat the array that becomes {name}, and differs from it"
                    )
                ours.setdefault(name, part)
        return ours

    def theirs(self, weights: Views, names: Collection[str] | None = None) -> Views:
        """Returns views of our arrays as theirs; of arrays that repeat each other, those in `names`, or the first.

        Tied arrays are written once, as Hugging Face does, and of dropped ones those that it expects. Raises
        WeightsError, which lists all that does not fit the config.
        """
        require_fit("config", weights, self._shapes)
        theirs = {}
        written = {place.ours[0] for place in self.places if names is not None and place.theirs in names}
        for place in self.places:
            parts = [weights[name] for name in place.ours]
            if len({part.dtype for part in parts}) > 1:
                raise WeightsError(f"{', '.join(place.ours)} become one array; expected one type, not several")
            chosen = not place.tied if names is None or place.ours[0] not in written else place.theirs in names
            if chosen:
                theirs[place.theirs] = Lazy(place.shape, parts[0].dtype, partial(place.fuse, parts))
        for row in self._rows:
            if row.filled is not None:
                unused = weights[row.filled]
                place = self._place(row, row.theirs, row.filled)
                theirs[row.theirs] = Lazy(place.shape, unused.dtype, partial(place.fuse, [unused]))
        return theirs


@lru_cache
def _fused_shape(shape: tuple[int, ...], axes: str, sizes: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """Returns the shape of their array that holds ours, `[n, ...]`; no size takes memory."""
    before, after = axes.split(" -> ")
    fuse = partial(einops.rearrange, pattern=f"{after} -> {before}", **dict(sizes))
    return jax.eval_shape(fuse, jax.ShapeDtypeStruct(shape, np.float32)).shape


def config_from_huggingface(config: Settings, weights: Views | None = None) -> TransformerConfig:
    """Returns our config of the model that a config.json (parsed) describes, computing in float32.

    `weights` are its arrays: some parts, such as the pooler of BertModel, are there if their arrays are. Without them,
    the model has the parts that the class has by default. Raises InputError for unknown classes, and for settings that
    our config cannot express.
    """
    require(
        config.get("quantization_config") is None,
        "quantization_config is set in the Hugging Face config; expected weights of floating point",
    )
    family = family_of(config)
    ours = read_settings(family, config)
    return ours if weights is None else family.adapted(ours, weights)


def family_of(config: Settings) -> Family:
    """Returns the tables of the class that a config.json names; raises InputError for unknown classes."""
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        raise InputError(f"architectures is {named!r} in the Hugging Face config; expected a list of one class")
    return family_called(str(named[0]))


def from_huggingface(config: Settings, weights: Weights) -> tuple[TransformerConfig, Arrays]:
    """Returns our config, and the weights with the names and layouts of `torch_ref`, bit for bit, in their own types.

    `config` is a parsed config.json; `weights` are their arrays by name, as a mapping or in pairs. Then
    `names.from_reference(weights, transformer(config).shapes)` makes our parameters. Raises InputError as
    `config_from_huggingface` does, and WeightsError for arrays that do not fit.
    """
    given = once(weights)
    ours = config_from_huggingface(config, given)
    views = Layout(family_of(config).rows(ours), ours).ours(given)
    return ours, {name: read(view) for name, view in views.items()}


def to_huggingface(architecture: str, config: TransformerConfig, weights: Weights) -> tuple[Fields, Arrays]:
    """Inverts `from_huggingface`: returns the fields of config.json, and the arrays of a model of that class.

    Raises InputError if the class is unknown or cannot express `config`, and WeightsError if the weights (as
    `names.to_reference` returns them) do not fit `config`.
    """
    family = family_called(architecture)
    theirs = {"architectures": [architecture], **write_settings(family, config)}
    views = Layout(family.rows(config), config).theirs(once(weights))
    return theirs, {name: np.asarray(view) for name, view in views.items()}


def family_called(architecture: str | None) -> Family:
    """Returns the tables of a class in `transformers`; raises InputError for a class that we do not have."""
    if architecture not in FAMILIES:
        raise InputError(
            f"architecture is {architecture!r}, not a known Hugging Face class; expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]


# The files import what stands above.
FAMILIES: dict[str, Family] = {}
for _file in iter_modules(__path__):
    FAMILIES |= getattr(import_module(f"{__name__}.{_file.name}"), "FAMILIES", {})
"""Class in `transformers`, which config.json names under `architectures` -> its tables."""
