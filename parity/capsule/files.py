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

from parity.gates.measure import ParityError, as_array
from parity.gates.pytrees import Tensors

ABOUT = "capsule.json"
FORMAT, VERSION = "parity capsule", 2
PARTS = ("weights", "inputs", "float64", "float32", "bfloat16", "values")
"""The safetensors files that a capsule may have: what the side was given, what it computed in each type, and how."""
_LARGEST_ABOUT = 2**26
"""Bytes of `capsule.json`: some hundred for each tensor."""
_EXPECTED = "expected a folder that parity.record wrote"


class DamageError(ValueError):
    """What does not fit in a capsule."""


class CapsuleWriter:
    """Takes the parts of a capsule one by one, so that only one has to be in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        (folder / ABOUT).touch()

    def add(self, part: str, tensors: Tensors) -> None:
        """Writes one part; raises ParityError for arrays of a type that a capsule does not hold."""
        # safetensors writes the memory as it lies, whatever the strides say.
        laid_out = {name: np.asarray(as_array(array), order="C") for name, array in tensors.items()}
        path = self._folder / f"{part}.safetensors"
        try:
            save_file(laid_out, path)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ParityError(f"the {part} of the capsule cannot be written: {_line(error)}") from error
        # safetensors writes for its owner alone.
        path.chmod((self._folder / ABOUT).stat().st_mode)
        kinds = {name: [str(array.dtype), *array.shape] for name, array in laid_out.items()}
        self._files[part] = {"sha256": _sha256(path), "tensors": kinds}

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
    """A capsule whose hashes are right; its parts are read when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        """Raises ParityError for anything but a whole capsule of a version that this one reads."""
        self.path = Path(os.path.expanduser(path))
        if not self.path.exists():
            raise ParityError(f"there is no capsule {self.path}; {_EXPECTED}")
        if not (self.path / ABOUT).is_file():
            raise ParityError(f"{self.path} is no capsule: it has no {ABOUT}; {_EXPECTED}")
        with self.reading():
            self.about = self._read_about()
            self.tensors: dict[str, dict[str, list[Any]]] = {}
            """Part -> tensor, in the order in which they were recorded -> [type, *shape]."""
            for part, file in self.about["files"].items():
                if part not in PARTS:
                    raise DamageError(f"{ABOUT} lists other files than {', '.join(PARTS)}")
                if _sha256(self._file(part)) != file["sha256"]:
                    raise DamageError(f"{part}.safetensors is not the file that was recorded (its SHA-256 differs)")
                self.tensors[part] = dict(file["tensors"])

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Whatever fails in here means that the capsule is damaged: ParityError says what failed, and what to do."""
        try:
            yield
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            said = error if isinstance(error, DamageError) else f"{type(error).__name__}: {error}"
            line = f"the capsule {self.path} is damaged: {_line(said)}; copy it again, or record it anew"
            raise ParityError(line) from error

    def read(self, part: str) -> Tensors:
        """The tensors of a part."""
        with self.reading(), safe_open(self._file(part), framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in self.tensors[part]}
            for name, array in tensors.items():
                if [str(array.dtype), *array.shape] != self.tensors[part][name]:
                    found, listed = [str(array.dtype), *array.shape], self.tensors[part][name]
                    raise DamageError(f"{name} in {part}.safetensors is {found}; expected {listed}")
            return tensors

    def _file(self, part: str) -> Path:
        return self.path / f"{part}.safetensors"

    def _read_about(self) -> dict[str, Any]:
        with (self.path / ABOUT).open("rb") as file:
            data = file.read(_LARGEST_ABOUT + 1)
        if len(data) > _LARGEST_ABOUT:
            raise DamageError(f"{ABOUT} has more than {_LARGEST_ABOUT:,} bytes")
        about = json.loads(data)
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ParityError(
                f"{self.path} is no capsule: {ABOUT} does not say {FORMAT!r}; expected one by parity.record"
            )
        version = about["version"]
        if not isinstance(version, int) or version < 1:
            raise DamageError(f"its version is {version!r}")
        if version > VERSION:
            said = f"{self.path} is a capsule of version {version}, and this parity reads up to {VERSION}"
            raise ParityError(f"{said}; install a newer one")
        if about.pop("digest", None) != _digest(about):
            raise DamageError(f"{ABOUT} is not what was recorded (its digest differs)")
        return about


def _line(said: object) -> str:
    return " ".join(str(said).split())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, allow_nan=False).encode()).hexdigest()
