"""Configurations as JSON: written with the run and inside weight files, read back strictly."""

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

import dacite

from jax_tformer.errors import InputError

C = TypeVar("C")


def to_dict(config: Any) -> dict[str, Any]:
    """The config as nested dicts of plain JSON values."""
    return dataclasses.asdict(config)


def from_dict(kind: type[C], values: Any, *, where: str) -> C:
    """A `kind` from nested dicts; raises InputError (naming `where`) for unknown, missing or ill-typed fields."""
    if not isinstance(values, dict):
        raise InputError(f"{where} holds {type(values).__name__}; expected an object with the fields of a config")
    try:
        return dacite.from_dict(kind, values, dacite.Config(strict=True))
    except (dacite.DaciteError, InputError) as error:
        raise InputError(f"{where} is not a valid {kind.__name__}: {' '.join(str(error).split())}") from error


def write_json(path: Path, values: Any) -> None:
    """Writes `values` so that a reader sees the old file or the new one, never half of either."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> Any:
    """What the file holds; raises InputError if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: it is not JSON ({error}); restore it, or start a new run with --run"
        ) from error


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """One line for each field in which two configs (as dicts) differ: `model.d_model: 256 -> 512`."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{prefix}: {json.dumps(old)} -> {json.dumps(new)}"]
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        inner = f"{prefix}.{key}" if prefix else str(key)
        lines += differences(old.get(key), new.get(key), inner)
    return lines
