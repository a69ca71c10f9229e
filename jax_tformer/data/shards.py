"""Reads shards: files of ids as `jax-tformer tokenize`, llm.c, nanoGPT or Megatron write them, of any size.

What is asked for is read at its position, and nothing is kept or mapped: pages of a mapped file count as memory of the
process, and one that is cut off meanwhile would end the process without a word.
"""

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import TextData
from jax_tformer.data.sources import check_file, shard_files
from jax_tformer.data.tokenizers import Tokenizer, load_tokenizer
from jax_tformer.files import kept, read_json, shortened

MANIFEST = "manifest.json"
HEADER_BYTES = 1024
"""256 int32: the number of the format, its version, how many ids follow, and zeros."""
FORMATS: dict[int, tuple[int, Any]] = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
"""Number of the format -> its version and the type of its ids: llm.c's for GPT-2, and for Llama 3."""
_INDEX = np.dtype([("mark", "S9"), ("version", "<u8"), ("kind", "u1"), ("rows", "<u8"), ("texts", "<u8")])
_INDEX_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_HELD_OUT = re.compile(r"(?<![a-z])(val|valid|validation|test)(?![a-z])", re.IGNORECASE)
_MEND = "restore it from where it came from, or write the shards again"


class TokenFile(NamedTuple):
    """A file of `size` ids of type `kind` after `offset` bytes."""

    path: Path
    kind: "np.dtype[Any]"
    offset: int
    size: int


@dataclass(frozen=True)
class StoredIds:
    """The ids `start` to `end` of files, one after the other."""

    files: Sequence[TokenFile]
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, part: slice) -> np.ndarray:
        """Reads some ids; raises InputError if a file has become shorter or is gone."""
        begin, end, _ = part.indices(len(self))
        first, missing, found = self.start + begin, max(0, end - begin), [np.empty(0, np.uint8)]
        for path, kind, offset, size in self.files:
            if missing and first < size:
                count, mend = min(missing, size - first), f"{_MEND}; then the same command continues the run"
                try:
                    found.append(np.fromfile(path, kind, count, offset=offset + first * kind.itemsize))
                except OSError as error:
                    raise InputError(f"{path} cannot be read any more ({error.strerror}); {mend}") from error
                require(len(found[-1]) == count, f"{path} has become shorter since the start; {mend}")
                missing, first = missing - count, first + count
            first -= size
        return np.concatenate(found)


Ids = np.ndarray | StoredIds
"""Ids in memory or in files, of which `ids[first:end]` is read."""


class Corpus(NamedTuple):
    """The ids of text or of shards, and what is known about them."""

    train: Ids
    held_out: Ids
    content: Sequence[str | memoryview]
    """The text, or the SHA-256 of every file of ids, in order."""
    held_out_bytes: int | None
    """UTF-8 bytes of the held-out text, if they are known."""
    notes: list[str]

    def bytes_for(self, labels: int) -> float | None:
        """Returns the bytes of held-out text for each of so many labels."""
        return self.held_out_bytes / labels if self.held_out_bytes and labels else None


def open_shards(data: TextData, tokenizer: Tokenizer) -> Corpus:
    """Opens the shards that `data` names; those with val, valid, validation or test in their names are held out.

    Without any, the fraction `data.held_out` at the end is. Each file is read once for its checksum, which the cache
    keeps as long as the file does not change. Raises InputError if a file is damaged or missing, or if the shards were
    written with another tokenizer.
    """
    paths = shard_files(data)
    manifest, files = read_manifest(paths[0].parent), [find_ids(path) for path in paths]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(digest, paths))
    if manifest is not None:
        _check_own(paths, manifest, tokenizer)
    held_out = [file for file in files if _HELD_OUT.search(file.path.stem)]
    train = [file for file in files if file not in held_out]
    told = "all shards are held out by their names; expected some without val, valid, validation or test in the name"
    require(bool(train), told)
    ends = [sum(file.size for file in part) for part in (train, held_out)]
    start = int(ends[0] * (1 - data.held_out))
    whole = StoredIds(train, 0, ends[0]), StoredIds(held_out, 0, ends[1])
    parts = whole if held_out else (replace(whole[0], end=start), replace(whole[0], start=start))
    note = f"{len(parts[0]):,} ids to train on, {len(parts[1]):,} held out"
    known = (manifest or {}).get("val", {"tokens": 0})
    return Corpus(*parts, digests, known["text_bytes"] if held_out and known["tokens"] else None, [note])


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal; from the cache if the file has not changed since."""
    told = path.stat()
    key = ["file", str(path.resolve()), str((told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns))]

    def make() -> bytes:
        with open(path, "rb") as file:
            return file_digest(file, "sha256").hexdigest().encode()

    return str(kept(key, make), "utf-8")


def find_ids(path: Path) -> TokenFile:
    """Finds the ids in a file of llm.c, Megatron or, where nothing says how they are written, nanoGPT (uint16).

    Raises InputError if the file has not the size that its header or index says.
    """
    check_file(path)
    size, header, index = path.stat().st_size, np.fromfile(path, "<i4", 3), path.with_suffix(".idx")
    if index.exists():
        found = TokenFile(path, *_read_index(index))
    elif size >= HEADER_BYTES and int(header[0]) in FORMATS:
        version, kind = FORMATS[int(header[0])]
        require(int(header[1]) == version, f"{path} is of version {header[1]}; expected {version}; {_MEND}")
        found = TokenFile(path, np.dtype(kind), HEADER_BYTES, int(header[2]))
    else:
        found = TokenFile(path, np.dtype(np.uint16), 0, -(-size // 2))
    wanted = found.offset + found.size * found.kind.itemsize
    require(size == wanted, f"{path} is damaged: it has {size:,} bytes; expected {wanted:,}; {_MEND}")
    return found


def _read_index(path: Path) -> "tuple[np.dtype[Any], int, int]":
    """Returns the type, offset and number of the ids that Megatron's index describes."""
    check_file(path)
    head = np.fromfile(path, _INDEX, 1)
    mark, version, kind, rows, texts = head[0] if len(head) else (b"", 0, 0, 0, 0)
    # NumPy takes the zeros at the end off.
    known = (bytes(mark), int(version)) == (b"MMIDIDX", 1) and int(kind) in _INDEX_TYPES
    require(known, f"{path} is no index of Megatron, version 1, of whole numbers, as expected beside a .bin; {_MEND}")
    size, least = path.stat().st_size, _INDEX.itemsize + 12 * int(rows) + 8 * int(texts)
    require(size >= least, f"{path} is damaged: it has {size:,} bytes; expected {least:,}; {_MEND}")
    lengths = np.fromfile(path, "<i4", int(rows), offset=_INDEX.itemsize)
    return np.dtype(_INDEX_TYPES[int(kind)]), 0, int(lengths.sum(dtype=np.int64))


def seal(values: dict[str, Any]) -> str:
    """Returns the checksum of all in a manifest but its "checksum"."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Reads the manifest of a folder of shards; None if others wrote them. Raises InputError if it is damaged."""
    path = folder / MANIFEST
    if not path.exists():
        told = f"{path} is missing; expected it beside shards and tokenizer.json; tokenize again, which goes on"
        require(not (folder / "tokenizer.json").exists(), told)
        return None
    values = read_json(path)
    intact = isinstance(values, dict) and values.get("checksum") == seal(values)
    require(intact, f"{path} is damaged: its checksum is another; {_MEND}")
    return dict(values)


def _check_own(paths: Sequence[Path], manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Raises InputError unless the files of a folder are those of its manifest, and the ids those of `tokenizer`."""
    folder, files = paths[0].parent, manifest["files"]
    strange = [str(path) for path in paths if path.name not in files]
    require(not strange, f"{MANIFEST} does not name {shortened(strange)}; expected its own shards alone; move it")
    for name, expected in files.items():
        path = folder / name
        require(path.exists(), f"{path} is missing; expected it, because {MANIFEST} names it; {_MEND}")
        require(digest(path) == expected, f"{path} is damaged: its checksum is not that in {MANIFEST}; {_MEND}")
    require(
        load_tokenizer(folder).spelling == tokenizer.spelling,
        f"the shards in {folder} were written with another tokenizer; expected that of the model: leave "
        "--data.tokenizer out to train with the one in the folder, or write shards with this one",
    )
