"""Paths as users type them, and where this library keeps what it may lose."""

import os
import time
from pathlib import Path

from jax_tformer.errors import InputError


def user_path(path: str | Path) -> Path:
    """`path` with a leading ~ resolved; raises InputError if it names a user that does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path} begins with the home of a user who is not known here; write it out") from error


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk, and would be there after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Where compiled programs, tokenizers and ids are kept: $XDG_CACHE_HOME/jax-tformer, or ~/.cache/jax-tformer.

    Raises InputError for a user without a home, as a container may have.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "jax-tformer"
    except RuntimeError as error:
        raise InputError(
            "this user has no home to keep compiled programs in; set XDG_CACHE_HOME to a folder"
        ) from error


_CACHE_BYTES = 2**32
_DAY = 24 * 60 * 60


def cache_bytes() -> int:
    """What all files in the cache folder may take: $JAX_TFORMER_CACHE_BYTES, or 4 GiB.

    Raises InputError if the variable is not a whole number.
    """
    given = os.environ.get("JAX_TFORMER_CACHE_BYTES", "").strip()
    if not given:
        return _CACHE_BYTES
    if not (given.isascii() and given.isdigit()):
        raise InputError(
            f"JAX_TFORMER_CACHE_BYTES is {given!r}; expected a whole number of bytes, such as {_CACHE_BYTES}"
        )
    return int(given)


def bound_cache(folder: Path) -> None:
    """Removes from the cache `folder` what was used longest ago, until the rest takes no more than `cache_bytes`.

    What other processes remove, or read, at the same time does them no harm: a file that is open stays readable, and
    one that is gone is made anew. When a file was used is what the system keeps of it, on most to the day.
    """
    bound, now = cache_bytes(), time.time()
    files = []
    for parent, _, names in os.walk(folder):
        for path in (os.path.join(parent, name) for name in names):
            try:
                found = os.stat(path, follow_symlinks=False)
            except OSError:
                continue
            files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    total = sum(size for _, size, _ in files)
    for used, size, path in sorted(files):
        # What a process that was killed had begun to write.
        unfinished = path.endswith(".partial") and used < now - _DAY
        if total > bound or unfinished:
            try:
                os.unlink(path)
            except OSError:
                continue
            total -= size
