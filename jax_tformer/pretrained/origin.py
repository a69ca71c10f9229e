"""What a Hugging Face folder holds beyond our config: special ids, generation defaults, task settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_tformer.errors import InputError
from jax_tformer.files import read_json

CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True)
class Origin:
    """Where a model came from. `net.origin` holds it; it changes no number, so equality of nets ignores it."""

    config: Mapping[str, Any]
    """config.json, as it was."""
    generation: Mapping[str, Any] | None = None
    """generation_config.json, as it was; None: there was none."""
    types: Mapping[str, str] = field(default_factory=dict)
    """The stored type of each array by its name there ("F16"); empty where the caller chose the type."""

    @property
    def architecture(self) -> str:
        """The class in `transformers`."""
        return str(self.config["architectures"][0])


def read_origin(folder: Path) -> Origin:
    """Reads config.json and generation_config.json; raises InputError if one is damaged, or the first is missing."""
    if not (folder / CONFIG).exists():
        raise InputError(f"{folder} has no {CONFIG}; expected a folder that save_pretrained wrote")
    generation = _object(folder / GENERATION) if (folder / GENERATION).exists() else None
    return Origin(_object(folder / CONFIG), generation)


def _object(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} holds {type(values).__name__}; expected a JSON object; restore it")
    return values
