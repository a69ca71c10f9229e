"""Files: paths as users type them, small files written whole and read strictly, and the folder of what may be lost.

A run folder may come from a stranger. Whatever is read of one is read by `read_text` and `read_json`, which neither
wait for a pipe, nor fill the memory, nor fail in another way than with one line.
"""

import dataclasses
import hashlib
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import dacite

from jax_tformer.errors import InputError

C = TypeVar("C")
SMALL = 2**24
"""Bytes of a file that says how something is, not what it is."""
_DEEPEST = 64
"""Objects and lists inside of each other; a config has five."""
_LONGEST_NUMBER = 40
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
_CACHE_BYTES = 2**32
_DAY = 24 * 60 * 60


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


def to_dict(config: Any) -> dict[str, Any]:
    """The config as nested dicts of plain JSON values."""
    return dataclasses.asdict(config)


def from_dict(kind: type[C], values: Any, *, where: str) -> C:
    """A `kind` from nested dicts; raises InputError (naming `where`) for unknown, missing or ill-typed fields."""
    if not isinstance(values, dict):
        raise InputError(f"{where} holds {type(values).__name__}; expected an object with the fields of a config")
    try:
        return dacite.from_dict(kind, values, dacite.Config(strict=True, type_hooks={float: _as_float}))
    except (dacite.DaciteError, InputError) as error:
        raise InputError(f"{where} is not a valid {kind.__name__}: {' '.join(str(error).split())}") from error


def _as_float(value: Any) -> Any:
    # JSON says 1 for 1.0, and JAX has no integers of this size.
    return float(value) if type(value) is int else value


def write_json(path: Path, values: Any) -> None:
    """Writes `values` as `write_text` writes."""
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes `text` so that there is the old file or the new one and never half of either, even after a power cut."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def read_json(path: Path, most: int = SMALL) -> Any:
    """What the file holds; raises InputError as `read_text` does, and if it is not JSON as `parse_json` wants it."""
    text = read_text(path, most)
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: it is not JSON ({error}); restore it, or start a new run with --run"
        ) from error


def read_text(path: Path, most: int = SMALL) -> str:
    """The text of a file; raises InputError unless it is a regular file of at most `most` bytes, in UTF-8."""
    try:
        problem = not_regular(path)
        if problem is None:
            with open(path, "rb") as file:
                data = file.read(most + 1)
            if len(data) > most:
                problem = f"has more than {most:,} bytes"
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; restore it, or name another folder") from error
    if problem:
        raise InputError(f"{path} {problem}; expected a file of text; restore it, or name another folder")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is damaged: byte 0x{data[error.start]:02x} at byte {error.start:,} is not UTF-8; "
            "restore it, or name another folder"
        ) from error


def not_regular(path: Path) -> str | None:
    """What `path` "is ..." where it is no regular file, to be asked before it is opened: a pipe would wait for ever.

    None for a regular file. Raises OSError if there is nothing there.
    """
    try:
        mode = path.stat().st_mode
    except ValueError:  # of a NUL in its name
        return "has a name that no file can have"
    if stat.S_ISREG(mode):
        return None
    return "is " + next((kind for test, kind in _KINDS.items() if test(mode)), "no regular file")


def parse_json(text: str) -> Any:
    """What `text` says; raises ValueError for what is not JSON, is nested too deeply, or has a number that is none."""
    too_deep = ValueError(f"it is nested more than {_DEEPEST} deep")
    try:
        values = json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=_short)
    except RecursionError:
        raise too_deep from None
    level = [values]
    for _ in range(_DEEPEST + 1):
        level = [
            part
            for outer in level
            if isinstance(outer, dict | list)
            for part in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return values
    raise too_deep


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:_LONGEST_NUMBER]} is too large a number")
    return number


def _short(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"{digits[:_LONGEST_NUMBER]}... is too large a number")
    return int(digits)


def changed_fields(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs (as dicts) differ, each with both values: `{"model.d_model": (256, 512)}`."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {prefix: (old, new)}
    changed: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(key for key in new if key not in old)]:
        changed |= changed_fields(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    return changed


def shortened(items: list[str], most: int = 3) -> str:
    """The first of `items`, and how many there are besides."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return ", ".join([*items[:most], *more])


def differences(old: Any, new: Any) -> list[str]:
    """One line for each field in which two configs (as dicts) differ: `model.d_model: 256 -> 512`."""
    return [
        f"{name}: {json.dumps(before)} -> {json.dumps(now)}" for name, (before, now) in changed_fields(old, new).items()
    ]


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


def combined_hash(parts: Iterable[str | memoryview]) -> str:
    """SHA-256, in hexadecimal, of the hashes of all parts: moving text from the end of one to the next shows."""
    digest = hashlib.sha256()
    for part in parts:
        # What is no valid Unicode is for others to refuse.
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def kept(key: Iterable[str | memoryview], make: Callable[[], bytes | memoryview]) -> memoryview:
    """What `make` gives, or gave in an earlier run with the same `key`, which must hold all that decides it.

    It is kept in a file of the cache folder, behind its checksum. Whatever goes wrong there, the only loss is time.
    """
    try:
        path = cache_folder() / "data" / combined_hash(key)
    except InputError:  # there is no home
        return memoryview(make())
    with suppress(OSError):
        found = memoryview(path.read_bytes())
        if found[:32] == hashlib.sha256(found[32:]).digest():
            with suppress(OSError):  # the cache may only be read
                os.utime(path)
            return found[32:]
    content = memoryview(make())
    if content.nbytes <= cache_bytes():
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(suffix=".partial", dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.writelines((hashlib.sha256(content).digest(), content))
                os.replace(partial, path)
            except BaseException:
                os.unlink(partial)
                raise
            bound_cache(cache_folder())
    return content
