"""Reads text and pairs from files, and decides what is held out.

A wrong file is told exactly. Texts stay UTF-8, because one emoji would make a Python string take four bytes for every
character.
"""

import glob
import hashlib
import io
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import PairData, TextData
from jax_tformer.data import generated, scan
from jax_tformer.data.tokenizers import Pieces
from jax_tformer.files import user_path

T = TypeVar("T")
_SUFFIXES = (".txt", ".md", ".rst", ".jsonl")
TABLES = (".json", ".csv")
"""Their texts would have to be taken out; as they are, a model learns quotes and commas."""


def check_files(data: TextData | PairData) -> None:
    """Raises InputError unless all files that `data` names are readable; does not open them."""
    if data.source == "files":
        for path in pair_files(data) if isinstance(data, PairData) else shard_files(data) or text_files(data):
            check_file(path)


def check_file(path: Path) -> None:
    """Raises InputError unless `path` is a readable file; does not open it."""
    try:
        require(path.exists(), f"{path} does not exist; expected a file; check the path")
        require(path.is_file(), f"{path} is not a file; expected a file of text")
        require(os.access(path, os.R_OK), f"{path} cannot be read; expected a readable file; change its permissions")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); expected a readable file") from error


def read_utf8(path: Path) -> bytes:
    """Reads a text file as UTF-8, with "\\n" as line ends; raises InputError if it is empty or not UTF-8."""
    check_file(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); expected a readable file") from error
    nul = data.find(b"\0")
    require(nul < 0, f"{path} is binary: a NUL byte at byte {nul:,}; expected UTF-8 text")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x} at byte {error.start:,}"
        raise InputError(f"{path} is not UTF-8: {byte}; convert it to UTF-8") from error
    require(bool(data) and not data.isspace(), f"{path} is empty; expected text")
    return data.removeprefix("\ufeff".encode()).replace(b"\r\n", b"\n")


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file; raises InputError as `read_utf8` does."""
    # str.splitlines would also split at separators inside sentences, and put parallel files out of step.
    for line in io.BytesIO(read_utf8(path)):
        yield line.decode().removesuffix("\n")


def read_json_lines(
    path: Path, fields: tuple[str, ...], lines: Iterable[str] | None = None
) -> Iterator[dict[str, str]]:
    """Yields the objects of a file, one per line; raises InputError if one has no text in one of the `fields`.

    `lines`: those of the file, if they are not to be read at once.
    """
    for number, line in enumerate(read_lines(path) if lines is None else lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number:,}: not JSON ({error}); expected one JSON object a line") from error
        for field in fields:
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                raise InputError(
                    f'{path}, line {number:,}: no text under "{field}"; expected an object with a string under '
                    + " and ".join(f'"{name}"' for name in fields)
                )
            try:
                record[field].encode()
            except UnicodeEncodeError as error:  # JSON escapes can spell half of a surrogate pair
                raise InputError(
                    f'{path}, line {number:,}: a lone surrogate under "{field}"; expected valid Unicode'
                ) from error
        yield record


def shard_files(data: TextData) -> list[Path]:
    """Finds the files of ids (.bin) that `data.path` names; none if it names text."""
    if data.source != "files" or data.path is None:
        return []
    place = user_path(data.path)
    if place.is_dir():
        return sorted(place.glob("*.bin"))
    if glob.has_magic(data.path) and not place.exists():
        return sorted(Path(file) for file in glob.glob(str(place), recursive=True) if file.endswith(".bin"))
    return [place] if place.suffix == ".bin" else []


def text_files(data: TextData, kinds: tuple[str, ...] = _SUFFIXES) -> list[Path]:
    """Finds the files that `data.path` names, in a folder those of these `kinds`.

    Raises InputError if there are none, or for one .json or .csv file.
    """
    path = data.path
    if path is None:
        raise InputError(
            "no text was named; give --data.path a text file, a folder of them, a glob or JSON lines with a text field"
        )
    place = user_path(path)
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.name.lower().endswith(kinds) and file.is_file())
        if not files:
            others = Counter(file.suffix for file in place.rglob("*.*") if file.is_file())
            most = others.most_common(1)[0][0] if others else ".log"
            raise InputError(
                f"{path} is a folder without {', '.join(kinds)} files; expected at least one; "
                f"other kinds of text are named by a pattern: '{path}/**/*{most}'"
            )
        return files
    if glob.has_magic(path) and not place.exists():
        files = sorted(file for file in map(Path, glob.glob(str(place), recursive=True)) if file.is_file())
        if not files:
            raise InputError(f"{path} matches no file; expected at least one; check the pattern")
        return files
    require(
        not place.is_file() or place.suffix.lower() not in TABLES,
        f"{path} would be read with all its quotes and commas; expected text, or .jsonl with a text field in every "
        "line; convert it, or name a copy .txt to train on it as it is",
    )
    return [place]


def load_text(data: TextData) -> memoryview:
    """Reads the text that `data` names, as UTF-8, with a blank line between documents.

    The blank line keeps the last word of a document apart from the first of the next, in characters that every corpus
    with paragraphs has.

    Raises InputError if the files do not exist, cannot be read, hold no text, or are not UTF-8 or JSON lines.
    """
    written = (document for document in _documents(data) if document.decode().strip())
    first, second = next(written, None), next(written, None)
    if first is None:
        raise InputError(f"{data.path} holds no text; expected at least one document that is not empty")
    if second is None:
        return memoryview(first)
    # Joined in one array, so that the text is in memory only once.
    text = bytearray(first.strip(b"\n"))
    for document in chain([second], written):
        text += b"\n\n"
        text += document.strip(b"\n")
    text += b"\n"
    return memoryview(text)


def _documents(data: TextData) -> Iterator[bytes]:
    """Yields the documents as UTF-8, always in the same order."""
    made = {"modular-addition": generated.equations, "markov-chain": generated.chain}.get(data.source)
    if made is not None:
        yield made().encode()
        return
    if data.source == "python-docs":
        yield from _python_docs()
        return
    for path in text_files(data):
        if path.suffix.lower() == ".jsonl":
            yield from (record["text"].encode() for record in read_json_lines(path, ("text",)))
        else:
            yield read_utf8(path)


def _python_docs() -> Iterator[bytes]:
    """Yields the topics of the language reference that ships inside CPython."""
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise InputError("this Python comes without pydoc_data; install all of its standard library") from error
    # Some texts are there under two names.
    return (text.encode() for text in dict.fromkeys(topics.topics[name] for name in sorted(topics.topics)))


def split_text(text: memoryview, held_out: float) -> tuple[memoryview, memoryview]:
    """Splits `text` (UTF-8) into a training part and, at its end, the fraction `held_out` of its characters.

    Random windows would overlap with training windows, so that the model would be tested on text that it has read.
    """
    rest = int(sum(map(len, Pieces(text))) * (1 - held_out))
    end = 0
    for piece in Pieces(text):
        part = piece[:rest]
        end += len(part.encode())
        rest -= len(part)
    return text[:end], text[end:]


def pair_files(data: PairData) -> list[Path]:
    """Returns the file of pairs, or the files of sources and of targets; raises InputError if `data` names neither."""
    if data.path is None:
        raise InputError(
            "no pairs were named; give --data.path tab-separated pairs, JSON lines with source and target, "
            "or a text file whose targets --data.target-path holds"
        )
    path = user_path(data.path)
    if data.target_path is not None:
        return [path, user_path(data.target_path)]
    if path.suffix.lower() not in (".tsv", ".jsonl"):
        raise InputError(
            f"{path} is neither .tsv nor .jsonl; expected one of them, or the targets' file as --data.target-path"
        )
    return [path]


class Rows(Sequence[T], Generic[T]):
    """Rows of bytes, in one array, each made what it stands for by `read`.

    Short texts and arrays take many times their length as objects of Python.
    """

    def __init__(self, rows: Iterable[bytes], read: Callable[[memoryview], T]) -> None:
        self._content, ends, self._read = bytearray(), array("q", [0]), read
        for row in rows:
            self._content += row
            ends.append(len(self._content))
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> T:  # type: ignore[override]  # no slices
        return self._read(memoryview(self._content)[self._ends[row] : self._ends[row + 1]])

    @property
    def sizes(self) -> np.ndarray:
        """The bytes of each row, int64[N]."""
        return np.diff(self._ends)


def packed(texts: Iterable[str]) -> Rows[str]:
    """Returns the texts in one array."""
    return Rows(map(str.encode, texts), lambda row: str(row, "utf-8"))


def load_pairs(data: PairData) -> Rows[str]:
    """Returns the pairs of SCAN, or of the files that `data` names, in order: a source, its target, the next source.

    Raises InputError if the files do not exist, cannot be read, hold no pairs, are not UTF-8, or a line is not a pair.
    """
    pairs = _read_pairs(data) if data.source == "files" else scan.pairs(data.source)
    return packed(chain.from_iterable(pairs))


def _read_pairs(data: PairData) -> Iterator[tuple[str, str]]:
    path, *others = pair_files(data)
    rows: Iterable[Sequence[str]]
    if others:
        sources, targets = (sum(1 for _ in read_lines(side)) for side in (path, others[0]))
        told = f"{path} has {sources:,} lines and {others[0]} has {targets:,}"
        require(sources == targets, f"{told}; expected as many targets as sources, line by line")
        rows = zip(read_lines(path), read_lines(others[0]), strict=True)
    elif path.suffix.lower() == ".tsv":
        rows = (line.split("\t") for line in read_lines(path))
    else:
        rows = ((record["source"], record["target"]) for record in read_json_lines(path, ("source", "target")))
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            found = "1 column" if len(row) == 1 else f"{len(row)} columns"
            raise InputError(f"{path}, line {number:,}: {found}; expected 2, source and target, separated by one tab")
        for side, text in zip(("source", "target"), row, strict=True):
            if not text.strip():
                raise InputError(f"{path}, line {number:,}: the {side} is empty; expected text; remove the pair")
        yield row[0].strip(), row[1].strip()


def held_out_pairs(data: PairData, texts: Rows[str], pairs: Iterable[int]) -> np.ndarray:
    """Returns, bool[N], which of the N `pairs`, numbers of those in `texts`, are held out.

    Pairs with the same source stay together.
    """
    rule = scan.HELD_OUT.get(data.source)
    if rule is None:
        return held_out_items((texts[2 * pair] for pair in pairs), data.held_out)
    return np.array([rule(texts[2 * pair], texts[2 * pair + 1]) for pair in pairs])


def training_texts(data: PairData, texts: Rows[str]) -> Rows[str]:
    """Returns the pairs that are not held out."""
    held_out = held_out_pairs(data, texts, range(len(texts) // 2))
    return packed(text for number, text in enumerate(texts) if not held_out[number // 2])


def held_out_items(items: Iterable[str], fraction: float) -> np.ndarray:
    """Returns, bool[N], which of N items belong to the `fraction` of the distinct ones, at least one, held out.

    Those with the lowest hashes are. The content decides and not the position: files may be sorted, and equal items
    must be on the same side.
    """
    # Python's own hash differs between processes. Of ten million items, two have the same 8 bytes with a probability of
    # one in 400,000, and are then on the same side.
    digests = (hashlib.sha256(item.encode()).digest() for item in items)
    hashes = np.fromiter((int.from_bytes(digest[:8], "big") for digest in digests), np.uint64)
    ranked = np.unique(hashes)
    return np.isin(hashes, ranked[: max(1, round(fraction * len(ranked)))])
