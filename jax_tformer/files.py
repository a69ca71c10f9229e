"""Files: paths and hub names as users type them, files and folders written as a whole, strict reading, and the cache.

A run folder may come from a stranger. `read_text` and `read_json` therefore never wait for a pipe, never fill the
memory, and fail only with an InputError.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import dacite

from jax_tformer.config.errors import WHY, InputError, explained, require

C = TypeVar("C")
Json = dict[str, Any]
"""An object of JSON."""
Changes = dict[str, tuple[Any, Any]]
"""Field -> (value before, value from now on)."""
SMALL = 2**24
"""The most bytes of a small file, such as a config."""
_DEEPEST = 64
"""The deepest nesting of objects and lists; a config has five levels."""
_TOO_DEEP = f"it is nested more than {_DEEPEST} deep"
_KINDS = {"d": "a folder", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}
"""What the first letter of a mode says, as `ls -l` shows it."""
_CACHE_BYTES = 2**32


def user_path(path: str | Path) -> Path:
    """`path` with a leading ~ resolved; raises InputError if it names a user that does not exist."""
    with explained(f"{path} begins with the home of an unknown user; expected a full path", RuntimeError):
        return Path(path).expanduser()


def hub_folder(what: str, name: str, revision: str | None, option: str, files: Sequence[str]) -> Path:
    """The folder of a commit (`revision`) on the Hugging Face hub, in the hub's own cache.

    Downloads those of its files that match the patterns `files`. `what` ("tokenizer") and `option`
    ("--data.tokenizer.revision") are for messages. Raises InputError if the hub does not give it, and without a
    revision: the message names the newest.
    """
    from huggingface_hub import repo_info, snapshot_download

    kind = "dataset" if what == "data set" else "model"
    try:
        if revision is None:
            newest = repo_info(name, repo_type=kind).sha
        else:
            return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # network, proxy, hub and name errors share no base class
        inside = {"tokenizer": "tokenizer.json", "data set": "Parquet or JSON lines"}.get(what, "config.json")
        raise InputError(
            f"the {what} {name!r} is no folder here and the Hugging Face hub did not give it "
            f"({type(error).__name__}); expected a folder with {inside}, or a hub name and a network"
        ) from error
    raise InputError(
        f"the {what} {name!r} comes from the hub, where it may change; expected the commit to use; "
        f"the newest is {option} {newest}"
    )


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def from_dict(kind: type[C], values: Any, *, where: str) -> C:
    """A `kind` from nested dicts; raises InputError (naming `where`) for unknown, missing or ill-typed fields."""
    if not isinstance(values, dict):
        raise InputError(f"{where} holds {type(values).__name__}; expected an object with the fields of a config")
    with explained(f"{where} is not a valid {kind.__name__}: {WHY}", (dacite.DaciteError, InputError)):
        # JSON says 1 for 1.0, and JAX has no integers of this size.
        hooks = {float: lambda value: float(value) if type(value) is int else value}
        return dacite.from_dict(kind, values, dacite.Config(strict=True, type_hooks=hooks, cast=[tuple]))


def write_json(path: Path, values: Any) -> None:
    """Writes `values` as `write_text` writes."""
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes `text` in UTF-8 as `write_bytes` writes."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, *parts: bytes | memoryview) -> None:
    """Replaces the file atomically: even after a power cut it is the old one or the new one, whole."""
    unfinished = path.with_name(path.name + ".partial")
    with named_errors(path):
        try:
            with open(unfinished, "wb") as file:
                file.writelines(parts)
            sync(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        sync(path.parent)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Gives an OSError the name of the file: the one of a full disk, unlike that of opening a file, has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def require_new_folder(out: Path) -> None:
    """Raises InputError if something is in `out`, or if it cannot be written."""
    require(
        not out.exists() or (out.is_dir() and not any(out.iterdir())),
        f"{out} is there already; expected a new or empty folder",
    )
    require_writable(out)


def require_writable(folder: Path) -> None:
    """Raises InputError unless something can be written to `folder`, or to where it would be made; leaves no trace."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with explained(f"cannot write to {existing} ({WHY}); choose another folder, or change its permissions"):
        # Tried, because on some systems (/proc, a full disk) the permissions allow what writing does not.
        tempfile.TemporaryFile(dir=existing).close()


@contextmanager
def locked(path: Path, out: Path) -> Iterator[None]:
    """Locks a file or folder while `out` is written; raises InputError if another process has locked it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with explained(f"another process is writing {out}; wait for it, or choose another folder", BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out`, to write to, that takes its place in the end: a folder by that name is complete.

    The next call removes what a killed one has left there. Raises InputError if another process is writing `out`, or if
    something else has the name beside it.
    """
    beside = out.parent / f".{out.name}.partial"
    whole = beside / out.name
    lock = beside / "lock"
    beside.parent.mkdir(parents=True, exist_ok=True)
    there = os.listdir(beside) if beside.is_dir() and not beside.is_symlink() else [str(beside)]
    require(
        not os.path.lexists(beside) or {*there} in (set(), {"lock"}, {"lock", out.name}),
        f"{beside} is in the way, and is no unfinished copy of {out.name}; move it elsewhere",
    )
    beside.mkdir(exist_ok=True)
    lock.touch()
    with locked(lock, out):
        try:
            if whole.exists():
                shutil.rmtree(whole)
            whole.mkdir()
            yield whole
            for path in [*whole.iterdir(), whole]:
                sync(path)
            whole.replace(out)
        finally:
            shutil.rmtree(whole, ignore_errors=True)
            lock.unlink()
            with suppress(OSError):  # somebody else's file is in it by now
                beside.rmdir()


def read_json(path: Path, most: int = SMALL) -> Any:
    """The JSON value in a file; raises InputError as `read_text` does, and if `parse_json` refuses it."""
    text = read_text(path, most)
    with explained(f"{path} is damaged: it is not JSON ({WHY}); restore it, or start a new run with --run", ValueError):
        return parse_json(text)


def value_in(path: Path, name: str) -> Any:
    """The value of `name` in the JSON object of a file; None if it is not there, or the file is missing or damaged."""
    try:
        return read_json(path)[name]
    except (InputError, LookupError, TypeError):
        return None


def read_text(path: Path, most: int = SMALL) -> str:
    """The text of a file; raises InputError unless it is a regular file of at most `most` bytes, in UTF-8."""
    problem = not_regular(path)
    if problem is None:
        with named_errors(path), open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            problem = f"has more than {most:,} bytes"
    require(not problem, f"{path} {problem}; expected a file of text; restore it, or name another folder")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is damaged: byte 0x{data[error.start]:02x} at byte {error.start:,} is not UTF-8; "
            "restore it, or name another folder"
        ) from error


def not_regular(path: Path) -> str | None:
    """Says what `path` is instead of a regular file that can be read, such as "is a pipe"; None if it is one.

    Ask before opening it, since a pipe would block for ever.
    """
    try:
        letter = stat.filemode(path.stat().st_mode)[0]
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError:
        return "has a NUL in its name"
    if letter != "-":
        return f"is {_KINDS.get(letter, 'no regular file')}"
    return None if os.access(path, os.R_OK) else "cannot be read (its permissions forbid it)"


def parse_json(text: str) -> Any:
    """Parses JSON; raises ValueError for anything else, for too deep nesting, and for NaN or too large numbers."""
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [values]
    for _ in range(_DEEPEST + 1):
        # Not so of NaN.
        if not all(abs(x) <= sys.float_info.max for x in level if isinstance(x, int | float)):
            raise ValueError("a number is NaN or too large")
        within = (x.values() if isinstance(x, dict) else x if isinstance(x, list) else () for x in level)
        level = [*chain.from_iterable(within)]
    if level:
        raise ValueError(_TOO_DEEP)
    return values


def changed_fields(old: Any, new: Any, prefix: str = "") -> Changes:
    """The fields in which two configs, or dicts, differ, each with both values: `{"model.d_model": (256, 512)}`."""
    old, new = (
        dataclasses.asdict(values) if hasattr(values, "__dataclass_fields__") else values for values in (old, new)
    )
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {prefix: (old, new)}
    changed: Changes = {}
    for key in {**old, **new}:
        changed |= changed_fields(old.get(key), new.get(key), f"{prefix}.{key}".lstrip("."))
    return changed


def shortened(items: list[str], most: int = 3) -> str:
    """The first `most` of `items`, and how many more there are."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return ", ".join([*items[:most], *more])


def batched(items: Iterable[C], size: int) -> Iterator[list[C]]:
    """Yields the items in lists of `size`, each as soon as it is full; the last one may be shorter."""
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch


def list_files(folder: Path) -> str:
    """Returns the names of the files in a folder."""
    return ", ".join(sorted(path.name for path in folder.iterdir()))


def differences(old: Any, new: Any) -> list[str]:
    """One line for each field in which two configs, or dicts, differ: `model.d_model: 256 -> 512`."""
    return [
        f"{name}: {json.dumps(before)} -> {json.dumps(now)}" for name, (before, now) in changed_fields(old, new).items()
    ]


def cache_folder() -> Path:
    """The cache of compiled programs, tokenizers and ids: $XDG_CACHE_HOME/jax-tformer, or ~/.cache/jax-tformer.

    Raises InputError for a user without a home folder, as in some containers.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    with explained("this user has no home folder for the cache; set XDG_CACHE_HOME to a folder", RuntimeError):
        return (Path(base) if base else Path.home() / ".cache") / "jax-tformer"


def cache_bytes() -> int:
    """The largest size of the cache folder in bytes: $JAX_TFORMER_CACHE_BYTES, or 4 GiB.

    Raises InputError if the variable is not a whole number.
    """
    given = os.environ.get("JAX_TFORMER_CACHE_BYTES", "").strip() or str(_CACHE_BYTES)
    require(
        given.isascii() and given.isdigit(),
        f"JAX_TFORMER_CACHE_BYTES is {given!r}; expected a whole number of bytes, such as {_CACHE_BYTES}",
    )
    return int(given)


def bound_cache(folder: Path) -> None:
    """Removes the least recently used files of the cache `folder` until the rest fits into `cache_bytes`.

    Other processes may read or remove files at the same time: an open file stays readable, and a missing one is made
    again. The time of use is the system's access time, which most systems keep to the day.
    """
    files = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            with suppress(OSError):
                found = os.lstat(path)
                files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    excess = sum(size for _, size, _ in files) - cache_bytes()
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        with suppress(OSError):
            os.unlink(path)
            excess -= size


def combined_hash(parts: Iterable[str | memoryview]) -> str:
    """SHA-256, in hexadecimal, of the hashes of all parts, so that it also depends on where they are split."""
    digest = hashlib.sha256()
    for part in parts:
        # Lone surrogates are refused elsewhere.
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def kept(key: Iterable[str | memoryview], make: Callable[[], bytes | memoryview]) -> memoryview:
    """The result of `make`, cached under `key`, which must hold everything that the result depends on.

    The cache file begins with a checksum. If it is damaged or cannot be written, `make` simply runs again.
    """
    try:
        path = cache_folder() / "data" / combined_hash(key)
    except InputError:  # no home folder
        return memoryview(make())
    with suppress(OSError):
        found = memoryview(path.read_bytes())
        if found[:32] == hashlib.sha256(found[32:]).digest():
            with suppress(OSError):  # the cache may be read-only
                os.utime(path)
            return found[32:]
    content = memoryview(make())
    if content.nbytes <= cache_bytes():
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, hashlib.sha256(content).digest(), content)
            # Little is left to the start of the next program: to look at thousands of files takes a while.
            if 1000 * content.nbytes > cache_bytes():
                bound_cache(cache_folder())
    return content
