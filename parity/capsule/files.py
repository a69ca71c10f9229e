"""A capsule on disk: a folder of safetensors and one JSON file, written whole or not at all, and read strictly.

A capsule may come from a stranger. Nothing in it is unpickled or run, no file name is taken from it, and whatever does
not fit is refused in one line.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from parity.gates.measure import ParityError

ABOUT = "capsule.json"
FORMAT, VERSION = "parity capsule", 1
PARTS = ("weights", "inputs", "float64", "float32", "bfloat16")
"""The safetensors files that a capsule may have: what the side was given, and what it computed in each type."""
_LARGEST_ABOUT = 2**26
"""Bytes of `capsule.json`: some hundred for each tensor."""
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
_NAMES |= {
    f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
"""The types that a tensor of a capsule may have, as safetensors and as NumPy call them."""


class CapsuleWriter:
    """Takes the parts of a capsule one by one, so that only one has to be in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        (folder / ABOUT).touch()

    def add(self, part: str, tensors: Mapping[str, np.ndarray]) -> None:
        """Writes one part; raises ParityError for arrays of a type that a capsule does not hold."""
        # safetensors writes the memory as it lies, whatever the strides say.
        laid_out = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        if strange := [name for name, array in laid_out.items() if str(array.dtype) not in _NAMES.values()]:
            kind = laid_out[strange[0]].dtype
            raise ParityError(f"{strange[0]} is of type {kind}; a capsule holds {', '.join(_NAMES.values())}")
        path = self._folder / f"{part}.safetensors"
        try:
            save_file(laid_out, path)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ParityError(f"the {part} of the capsule cannot be written: {_line(error)}") from error
        # safetensors writes for its owner alone.
        path.chmod((self._folder / ABOUT).stat().st_mode)
        self._files[part] = {
            "sha256": _sha256(path),
            "tensors": {name: [str(array.dtype), *array.shape] for name, array in laid_out.items()},
        }

    def describe(self, about: Mapping[str, Any]) -> None:
        """Writes `capsule.json`, which ends with a digest of everything."""
        document = {"format": FORMAT, "version": VERSION, **about, "files": self._files}
        document["digest"] = _digest(document)
        (self._folder / ABOUT).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def new_capsule(path: str | Path) -> Iterator[CapsuleWriter]:
    """A writer of the capsule `path`, which appears under its name when all has been written, or never.

    Raises ParityError if something stands there already, or where the system does not let it be written.
    """
    path = Path(os.path.expanduser(path))
    if os.path.lexists(path):
        raise ParityError(f"{path} exists; a capsule is never overwritten: give another name, or remove it")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        yield CapsuleWriter(partial)
        partial.rename(path)
    except OSError as error:
        raise ParityError(f"the capsule {path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class CapsuleReader:
    """A capsule that has been found whole; its parts are read when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        """Raises ParityError for anything but a whole capsule of a version that this one reads."""
        self.path = Path(os.path.expanduser(path))
        self.about = _read_about(self.path)
        self._files: dict[str, dict[str, Any]] = self.about["files"]
        for part, file in self._files.items():
            self._check(part, file)

    def __contains__(self, part: str) -> bool:
        return part in self._files

    def names(self, part: str) -> list[str]:
        """Of the tensors of a part, in the order in which they were recorded."""
        return list(self._files[part]["tensors"])

    def read(self, part: str) -> dict[str, np.ndarray]:
        """The tensors of a part."""
        with self._open(part) as file:
            return {name: file.get_tensor(name) for name in self.names(part)}

    def damaged(self, what: str) -> ParityError:
        """To be raised: says what does not fit, and what to do."""
        return _damaged(self.path, what)

    def _check(self, part: str, file: dict[str, Any]) -> None:
        path = self.path / f"{part}.safetensors"
        if not path.is_file():
            raise self.damaged(f"{path.name} is missing")
        try:
            if _sha256(path) != file["sha256"]:
                raise self.damaged(f"{path.name} is not the file that was recorded (its SHA-256 differs)")
        except OSError as error:
            raise self.damaged(f"{path.name} cannot be read ({error.strerror})") from error
        with self._open(part) as opened:
            held = {}
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                tensor = opened.get_slice(name)
                dtype = tensor.get_dtype()
                held[name] = [_NAMES.get(dtype, dtype), *tensor.get_shape()]
        listed = file["tensors"]
        if missing := sorted(listed.keys() - held.keys()):
            raise self.damaged(f"{path.name} lacks the tensors {missing}")
        if more := sorted(held.keys() - listed.keys()):
            raise self.damaged(f"{path.name} has tensors that {ABOUT} does not list: {more}")
        for name, expected in listed.items():
            if held[name] != expected:
                raise self.damaged(f"{name} in {path.name} is {_kind(held[name])}; expected {_kind(expected)}")

    @contextmanager
    def _open(self, part: str) -> Iterator[Any]:
        path = self.path / f"{part}.safetensors"
        try:
            with safe_open(path, framework="numpy") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise self.damaged(f"{path.name} is no safetensors file ({_line(error)})") from error


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    if not folder.exists():
        raise ParityError(f"there is no capsule {folder}; expected a folder that parity.record wrote")
    if not path.is_file():
        raise ParityError(f"{folder} is no capsule: it has no {ABOUT}; expected a folder that parity.record wrote")
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_ABOUT + 1)
        if len(data) > _LARGEST_ABOUT:
            raise _damaged(folder, f"{ABOUT} has more than {_LARGEST_ABOUT:,} bytes")
        about = json.loads(data)
    except OSError as error:
        raise _damaged(folder, f"{ABOUT} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{ABOUT} is not JSON ({_line(error)})") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ParityError(f"{folder} is no capsule: {ABOUT} does not say {FORMAT!r}; expected one by parity.record")
    version = about.get("version")
    if not isinstance(version, int) or version < 1:
        raise _damaged(folder, f"its version is {version!r}")
    if version > VERSION:
        raise ParityError(
            f"{folder} is a capsule of version {version}, and this parity reads up to {VERSION}; install a newer one"
        )
    digest = about.pop("digest", None)
    try:
        found = _digest(about)
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{ABOUT} is not what was recorded ({_line(error)})") from error
    if digest != found:
        raise _damaged(folder, f"{ABOUT} is not what was recorded (its digest differs)")
    files = about.get("files")
    if not isinstance(files, dict) or not {"weights", "inputs", "float64"} <= files.keys() <= set(PARTS):
        raise _damaged(folder, f"{ABOUT} lists other files than {', '.join(PARTS)}")
    for part, file in files.items():
        tensors = file.get("tensors") if isinstance(file, dict) and isinstance(file.get("sha256"), str) else None
        rows = tensors.values() if isinstance(tensors, dict) else [None]
        if not all(isinstance(row, list) and row and isinstance(row[0], str) for row in rows):
            raise _damaged(folder, f"{ABOUT} does not describe the tensors of {part}")
    return about


def _damaged(folder: Path, what: str) -> ParityError:
    return ParityError(f"the capsule {folder} is damaged: {what}; copy it again, or record it anew")


def _kind(row: list[Any]) -> str:
    dtype, *shape = row
    return f"{dtype} {shape}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, allow_nan=False).encode()).hexdigest()
