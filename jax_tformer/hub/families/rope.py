"""Rotary positions in a config.json: an object `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""

from collections.abc import Mapping

from jax_tformer.config.errors import InputError, require
from jax_tformer.hub.families import Fields, Setting, Settings

PREFIX = "rope_parameters."
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_READ = {"default": (), "linear": ("factor",), "llama3": _LLAMA3}
"""Kind of scaling -> what it reads, besides the base."""


def _original_positions(read: Settings) -> object:
    """The positions before scaling are, where nothing says so, those of the whole model."""
    scaled = read["decoder.rotary.scaling"] == "llama3"
    return read["decoder.max_positions" if scaled else "decoder.rotary.original_positions"]


SETTINGS = (
    Setting(f"{PREFIX}rope_theta", "decoder.position_base"),
    Setting(
        f"{PREFIX}rope_type", "decoder.rotary.scaling", {"default": "none", "linear": "linear", "llama3": "llama3"}
    ),
    Setting(f"{PREFIX}factor", "decoder.rotary.factor"),
    Setting(f"{PREFIX}low_freq_factor", "decoder.rotary.low_frequency_factor"),
    Setting(f"{PREFIX}high_freq_factor", "decoder.rotary.high_frequency_factor"),
    Setting(
        f"{PREFIX}original_max_position_embeddings", "decoder.rotary.original_positions", default=_original_positions
    ),
)


def rope_object(config: Settings, name: str = "rope_parameters") -> Fields:
    """Returns a field of `config` that should hold an object; {} for null and for an absent one."""
    given = config.get(name)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"{name} is {given!r} in the Hugging Face config; expected an object")
    return dict(given)


def flatten(config: Settings) -> Fields:
    """Returns `config` with a field `rope_parameters.NAME` for each NAME that the table of settings has."""
    rope = rope_object(config, "rope_scaling") or rope_object(config)
    rope.setdefault("rope_theta", config.get("rope_theta"))
    require_whole({"partial_rotary_factor": config.get("partial_rotary_factor"), **rope})
    return {**config, **only_positions(config, flat_rope(rope))}


def require_whole(rope: Settings) -> None:
    """Raises InputError if only a part of each head turns."""
    if (turning := rope.get("partial_rotary_factor")) not in (None, 1):
        raise InputError(f"partial_rotary_factor is {turning!r} in the Hugging Face config; only 1.0 is supported")


def only_positions(config: Settings, flat: Fields) -> Fields:
    """Returns `flat`; raises InputError if `config` says beside it that the positions before scaling were others."""
    name = "original_max_position_embeddings"
    above = config.get(name)
    within = flat.get(f"{PREFIX}{name}", config.get("max_position_embeddings"))
    require(
        flat[f"{PREFIX}rope_type"] != "llama3" or name not in config or above == within,
        f"{name} is {above!r} in the Hugging Face config, and {within!r} by its rope_parameters, two places of one "
        "setting; expected one value; remove the wrong one",
    )
    return flat


def flat_rope(rope: Settings) -> Fields:
    """Returns what an object of rotary positions says, as flat fields.

    Leaves out what its kind of scaling does not read. Raises InputError if something that it reads is absent.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    read = _READ.get(kind, ()) if isinstance(kind, str) else ()
    if absent := [name for name in read if name not in rope and name != "original_max_position_embeddings"]:
        raise InputError(f"{PREFIX}rope_type is {kind!r} in the Hugging Face config, and {absent[0]} is missing")
    known = {name: rope[name] for name in ("rope_theta", *read) if name in rope}
    return {f"{PREFIX}{name}": value for name, value in (known | {"rope_type": kind}).items()}


def nest(written: Settings) -> Fields:
    """Inverts `flatten`, in the newer of the two forms."""
    rest = {name: value for name, value in written.items() if not name.startswith(PREFIX)}
    return {**rest, "rope_parameters": nested_rope(written)}


def nested_rope(written: Settings) -> Fields:
    """Inverts `flat_rope`."""
    kept = ("rope_type", "rope_theta", *_READ[str(written[f"{PREFIX}rope_type"])])
    return {name: written[f"{PREFIX}{name}"] for name in kept}
