"""Layers with a window and without in one stack: config.json lists the kind of each, and we say the pattern."""

from collections.abc import Callable, Sequence

from jax_tformer.config.errors import InputError
from jax_tformer.hub.families import Fields, Setting, Settings

WINDOWED = "sliding_attention"
FULL = "full_attention"
SETTINGS = (
    Setting("window", "decoder.window", nullable=True, said="sliding_window"),
    Setting("window_layers", "decoder.window_layers", nullable=True),
)
"""Fields that no config.json has: `flatten` makes them of others."""


def flatten(config: Settings, window: object, layers: int, is_windowed: Callable[[int], bool]) -> Fields:
    """Returns `config` with the window and the pattern of its layers; `layers` is their number unless it says one.

    Where it does not list the kinds of layers, `is_windowed` tells that of each.
    """
    given = config.get("num_hidden_layers")
    kinds = config.get("layer_types")
    layers = given if isinstance(given, int) else layers
    if kinds is None:
        flags = [window is not None and is_windowed(layer) for layer in range(layers)]
    elif not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {WINDOWED, FULL}:
        raise InputError(
            f"layer_types is {kinds!r} in the Hugging Face config; expected a list of num_hidden_layers, {layers}, of "
            f"{WINDOWED!r} and {FULL!r}"
        )
    else:
        flags = [kind == WINDOWED for kind in kinds]
    # What says so has been read, and is not asked for again.
    config = {name: value for name, value in config.items() if name not in ("layer_types", "sliding_window")}
    if not any(flags):
        return {**config, "window": None, "window_layers": None}
    if window is None:
        raise InputError(f"layer_types has {WINDOWED!r} in the Hugging Face config, and sliding_window is missing")
    return {**config, "window": window, "window_layers": shortest(flags)}


def shortest(flags: Sequence[bool]) -> tuple[bool, ...] | None:
    """Returns the shortest beginning that, repeated and cut off, is all of `flags`; None if all are True."""
    if all(flags):
        return None
    periods = range(1, len(flags) + 1)
    period = next(p for p in periods if all(flag == flags[i % p] for i, flag in enumerate(flags)))
    return tuple(flags[:period])


def flags_of(written: Settings) -> list[bool]:
    """Returns which layers have the window, by what `flatten` has made."""
    pattern = written["window_layers"] or (written["window"] is not None,)
    return [pattern[layer % len(pattern)] for layer in range(written["num_hidden_layers"])]


def nest(written: Settings) -> Fields:
    """Replaces the window and the pattern by the kinds of all layers; leaves `sliding_window` to the family."""
    rest = {name: value for name, value in written.items() if name not in ("window", "window_layers")}
    return {**rest, "layer_types": [WINDOWED if flag else FULL for flag in flags_of(written)]}
