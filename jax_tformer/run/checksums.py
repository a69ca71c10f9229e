"""Checksums over the files of one folder, so that a changed, cut or lost file is noticed before it is used.

CRC-32 and not a cryptographic hash: the enemy is a failing disk and not a forger, and it is several times faster,
which counts where a checkpoint of gigabytes is read twice and where the training step shares the processor.
"""

import json
import os
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from jax_tformer.files import read_json, sync

CHECKSUM_FILE = "checksums.json"
_CHUNK = 1 << 22


def seal(folder: Path) -> None:
    """Lists every file below `folder`, with its size in bytes and its CRC-32, in `folder`/checksums.json.

    Returns once all of it is on the disk. Raises OSError if a file cannot be read or the list cannot be written.
    """
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": _crc32(path, sync=True)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != CHECKSUM_FILE
    }
    with open(folder / CHECKSUM_FILE, "w", encoding="utf-8") as stream:
        json.dump({"files": files}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def is_sealed(folder: Path) -> bool:
    """Whether `folder` holds a list of checksums; what they say is not looked at."""
    return (folder / CHECKSUM_FILE).is_file()


def damage(folder: Path, parts: Collection[str] | None = None, sizes_only: bool = False) -> str | None:
    """The first thing that is wrong with a sealed folder, in a few words; None if it is as it was when sealed.

    `parts` limits the check to these subfolders and to the files at the top; `sizes_only` leaves out reading the
    files. Files that were added since are not looked at. Never raises for what it finds on the disk.
    """
    if not (folder / CHECKSUM_FILE).exists():
        return f"it has no {CHECKSUM_FILE}"
    try:
        listed = read_json(folder / CHECKSUM_FILE)["files"]
        expected = {str(name): (int(entry["bytes"]), int(entry["crc32"], 16)) for name, entry in listed.items()}
        # Also what is not listed: whoever reads the arrays may open it.
        for path in folder.rglob("*"):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                return f"{path.relative_to(folder)} is no regular file"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"its {CHECKSUM_FILE} is damaged"
    for name, (size, checksum) in expected.items():
        if "\0" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"its {CHECKSUM_FILE} names {name!r}, which is not in the folder"
        if parts is not None and "/" in name and name.split("/")[0] not in parts:
            continue
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if not sizes_only and int(_crc32(path), 16) != checksum:
                return f"{name} has changed since it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read ({getattr(error, 'strerror', error)})"
    return None


def _crc32(path: Path, sync: bool = False) -> str:
    checksum = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
        if sync:
            os.fsync(stream.fileno())
    return f"{checksum:08x}"
