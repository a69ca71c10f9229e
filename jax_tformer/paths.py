"""Paths as users type them."""

from pathlib import Path

from jax_tformer.errors import InputError


def user_path(path: str | Path) -> Path:
    """`path` with a leading ~ resolved; raises InputError if it names a user that does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path} begins with the home of a user who is not known here; write it out") from error
