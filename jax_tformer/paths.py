"""Paths as users type them, and where this library keeps what it may lose."""

import os
from pathlib import Path

from jax_tformer.errors import InputError


def user_path(path: str | Path) -> Path:
    """`path` with a leading ~ resolved; raises InputError if it names a user that does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path} begins with the home of a user who is not known here; write it out") from error


def cache_folder() -> Path:
    """Where compiled programs, tokenizers and ids are kept: $XDG_CACHE_HOME/jax-tformer, or ~/.cache/jax-tformer."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jax-tformer"
