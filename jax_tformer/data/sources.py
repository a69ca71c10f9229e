"""Reads text and pairs from files, and decides what is held out.

A wrong file is told exactly. Texts stay UTF-8, because one emoji would make a Python string take four bytes for every
character.
"""

import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from array import array
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import PairData, TextData
from jax_tformer.data import generated, scan
from jax_tformer.data.tokenizers import Pieces
from jax_tformer.files import user_path

T = TypeVar("T")
D = TypeVar("D", bound=TextData | PairData)
_WEIGHTED = re.compile(r"([^,]+)=(\d+\.?\d*|\.\d+)(?:,|$)")
_ROWS = 10_000
"""Rows of which each source of a mixture has a fixed share."""
_TEXTS = (".txt", ".md", ".rst", ".jsonl")
KINDS = (*_TEXTS, *(kind + packer for kind in _TEXTS for packer in (".gz", ".zst")), ".parquet")
"""What is read of a folder."""
_BLOCK = 2**20
TABLES = (".json", ".csv")
"""Their texts would have to be taken out; as they are, a model learns quotes and commas."""


@dataclass(frozen=True)
class Joined(Iterable[T]):
    """Iterates over all parts, one after the other."""

    parts: Sequence[Iterable[T]]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self.parts)


def sources_of(data: D) -> list[tuple[D, int]]:
    """Returns the sources that `data.path` names ("A=0.7,B=0.3"), each with its share of 10,000 rows; one has all.

    Raises InputError unless all have weights above 0, if one has too little, or is named twice.
    """
    path = data.path or ""
    named = _WEIGHTED.findall(path)
    if not named or user_path(path).exists():
        return [(data, _ROWS)]
    total = sum(float(weight) for _, weight in named) or 1
    shares = {name: round(_ROWS * float(weight) / total) for name, weight in named}
    require(
        ",".join(map("=".join, named)) == path and len(shares) == len(named) and min(shares.values()) > 0,
        f"--data.path is {path!r}; expected sources with weights, such as A=0.7,B=0.3: each once, and each weight at "
        f"least 1/{_ROWS:,} of their sum",
    )
    if isinstance(data, PairData):
        told = "give a .tsv or .jsonl file of each source, and no --data.target-path or --data.tokens-per-batch"
        require(data.target_path is None and data.tokens_per_batch is None, f"--data.path is {path!r}; {told}")
    return [(replace(data, path=name), share) for name, share in shares.items()]


def check_files(data: TextData | PairData) -> None:
    """Raises InputError unless all files that `data` names are readable; does not open them."""
    if data.source == "files":
        for part, _ in sources_of(data):
            for path in pair_files(part) if isinstance(part, PairData) else shard_files(part) or text_files(part):
                check_file(path)


def check_file(path: Path) -> None:
    """Raises InputError unless `path` is a readable file; does not open it."""
    try:
        require(path.exists(), f"{path} does not exist; expected a file; check the path")
        require(path.is_file(), f"{path} is not a file; expected a file of text")
        require(os.access(path, os.R_OK), f"{path} cannot be read; expected a readable file; change its permissions")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); expected a readable file") from error


@dataclass(frozen=True)
class Blocks(Iterable[bytes]):
    """A text file, as it is or compressed, in blocks of UTF-8, with "\\n" as line ends.

    Iterating raises InputError if the file cannot be read, is empty, or is not UTF-8.
    """

    path: Path

    def __iter__(self) -> Iterator[bytes]:
        check_file(self.path)
        try:
            yield from self._read()
        except (EOFError, OSError, zlib.error) as error:
            told = " ".join(str(error).split())
            raise InputError(f"{self.path} is damaged or cannot be read ({told}); restore it; then go on") from error

    def _read(self) -> Iterator[bytes]:
        path, decoder, at, held, empty, block = self.path, getincrementaldecoder("utf-8")(), 0, b"", True, b"begun"
        with _opened(path) as file:
            while block:
                block = file.read(_BLOCK)
                nul, before = block.find(b"\0"), at - len(decoder.getstate()[0])
                require(nul < 0, f"{path} is binary: a NUL byte at byte {at + nul:,}; expected UTF-8 text")
                try:
                    decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    byte = f"byte 0x{error.object[error.start]:02x} at byte {before + error.start:,}"
                    raise InputError(f"{path} is not UTF-8: {byte}; convert it to UTF-8") from error
                text = held + block if at else block.removeprefix("\ufeff".encode())
                # Half of a line end waits for the other.
                held = b"\r" if block and text.endswith(b"\r") else b""
                text = text.removesuffix(held).replace(b"\r\n", b"\n")
                at, empty = at + len(block), empty and not text.strip()
                yield text
        require(not empty, f"{path} is empty; expected text")


def _opened(path: Path) -> Any:
    """Opens a file, or what is compressed in it."""
    if path.suffix.lower() == ".zst":
        return _pyarrow(path).input_stream(str(path), compression="zstd")
    return gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path} takes pyarrow to read; install it: pip install 'jax-tformer[shards]'") from error
    return pyarrow


def kind_of(path: Path) -> str:
    """Returns the suffix of a file, ".txt" for example, compressed or not."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz").removesuffix(".zst")).suffix


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file; raises InputError as `Blocks` does."""
    rest = b""
    for block in Blocks(path):
        # str.splitlines would also split at separators inside sentences, and put parallel files out of step.
        *lines, rest = (rest + block).split(b"\n")
        yield from map(bytes.decode, lines)
    if rest:
        yield rest.decode()


def read_json_lines(path: Path, fields: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Yields the objects of a file, one per line; raises InputError if one has no text in one of the `fields`."""
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}, line {number:,}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON ({error}); expected one JSON object a line") from error
        for field in fields:
            wanted = " and ".join(f'"{name}"' for name in fields)
            told = f'{where}: no text under "{field}"; expected an object with a string under {wanted}'
            require(isinstance(record, dict) and isinstance(record.get(field), str), told)
            try:
                record[field].encode()
            except UnicodeEncodeError as error:  # JSON escapes can spell half of a surrogate pair
                raise InputError(f'{where}: a lone surrogate under "{field}"; expected valid Unicode') from error
        yield record


class Document(NamedTuple):
    """A document, and where it stands, for messages."""

    place: str
    blocks: Iterable[bytes]
    """Its text (UTF-8); that of a file is read anew each time."""

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing but white space."""
        return not any(map(str.strip, Pieces(self.blocks)))


def documents(path: Path, field: str = "text") -> Iterator[Document]:
    """Yields the documents of a file: of each JSON line or row of Parquet what stands under `field`, or all text.

    Raises InputError if the file cannot be read.
    """
    check_file(path)
    if kind_of(path) == ".parquet":
        for row, text in enumerate(_read_parquet(path, field), 1):
            yield Document(f"{path}, row {row:,}", [(text or "").encode()])
    elif kind_of(path) == ".jsonl":
        for line, record in enumerate(read_json_lines(path, (field,)), 1):
            yield Document(f"{path}, line {line:,}", [record[field].encode()])
    else:
        yield Document(str(path), Blocks(path))


def _read_parquet(path: Path, column: str) -> Iterator[str | None]:
    arrow = _pyarrow(path)
    try:
        with closing(arrow.parquet.ParquetFile(path)) as file:
            kinds = dict(zip(file.schema_arrow.names, map(str, file.schema_arrow.types), strict=True))
            told = f"{path} has the columns {', '.join(kinds)}; expected {column!r} among them: --data.column NAME"
            require(column in kinds, told)
            told = f"{path}: the column {column!r} holds {kinds[column]}; expected text; name another --data.column"
            require(kinds[column] in ("string", "large_string", "string_view"), told)
            for batch in file.iter_batches(1024, columns=[column]):
                yield from batch[0].to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"{path} is damaged ({' '.join(str(error).split())}); restore it; then go on") from error


def _named(path: str) -> list[Path]:
    """Returns what a pattern or path names, which need not be there."""
    place = user_path(path)
    return sorted(map(Path, glob.glob(str(place), recursive=True))) if _is_pattern(path) else [place]


def _is_pattern(path: str) -> bool:
    return glob.has_magic(path) and not user_path(path).exists()


def shard_files(data: TextData) -> list[Path]:
    """Finds the files of ids (.bin) that `data.path` names; none if it names text."""
    if data.source != "files" or data.path is None:
        return []
    place = user_path(data.path)
    return sorted(file for file in (place.iterdir() if place.is_dir() else _named(data.path)) if file.suffix == ".bin")


def text_files(data: TextData) -> list[Path]:
    """Finds the files that `data.path` names, in a folder those of the `KINDS` of text.

    Raises InputError if there are none, or for one .json or .csv file.
    """
    path = data.path or ""
    require(
        bool(path),
        "no text was named; give --data.path a text file, a folder of them, a glob or JSON lines with a text field",
    )
    place = user_path(path)
    if place.is_dir():
        inside = [file for file in sorted(place.rglob("*")) if file.is_file()]
        found = [file for file in inside if file.name.lower().endswith(KINDS)]
        others = Counter(file.suffix for file in inside if file.suffix)
        most = others.most_common(1)[0][0] if others else ".log"
        require(
            bool(found),
            f"{path} is a folder without {', '.join(_TEXTS)} or .parquet files; expected at least one; "
            f"other kinds of text are named by a pattern: '{path}/**/*{most}'",
        )
        return found
    found = [file for file in _named(path) if file.is_file() or not _is_pattern(path)]
    require(bool(found), f"{path} matches no file; expected at least one; check the pattern")
    require(
        _is_pattern(path) or not place.is_file() or place.suffix.lower() not in TABLES,
        f"{path} would be read with all its quotes and commas; expected text, or .jsonl with a text field in every "
        "line; convert it, or name a copy .txt to train on it as it is",
    )
    return found


class Text(NamedTuple):
    """A text (UTF-8), and where each of its documents ends; "\\n\\n" stands between two of them."""

    content: memoryview
    ends: list[int]


def load_text(data: TextData) -> Text:
    """Reads the text that `data` names; leaves documents out in which there is nothing.

    The blank line keeps the last word of a document apart from the first of the next, in characters that every corpus
    with paragraphs has.

    Raises InputError if the files do not exist, cannot be read, hold no text, or are not UTF-8 or JSON lines.
    """
    written = (b"".join(document.blocks) for document in _documents(data) if not document.is_empty)
    first, second = next(written, None), next(written, None)
    if first is None:
        raise InputError(f"{data.path} holds no text; expected at least one document that is not empty")
    if second is None:
        return Text(memoryview(first), [len(first)])
    # Joined in one array, so that the text is in memory only once.
    text, ends = bytearray(), list[int]()
    for document in chain([first, second], written):
        text += b"\n\n" * bool(ends) + document.strip(b"\n")
        ends.append(len(text))
    text += b"\n"
    return Text(memoryview(text), ends)


def _documents(data: TextData) -> Iterator[Document]:
    """Yields the documents, always in the same order."""
    made = {"modular-addition": generated.equations, "markov-chain": generated.chain}.get(data.source)
    if made is not None:
        return iter([Document(data.source, [made().encode()])])
    return _python_docs() if data.source == "python-docs" else chain.from_iterable(map(documents, text_files(data)))


def _python_docs() -> Iterator[Document]:
    """Yields the topics of the language reference that ships inside CPython."""
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise InputError("this Python comes without pydoc_data; install all of its standard library") from error
    # Some texts are there under two names.
    texts = dict.fromkeys(topics.topics[name] for name in sorted(topics.topics))
    return (Document("python-docs", [text.encode()]) for text in texts)


def split_text(text: memoryview, held_out: float) -> tuple[memoryview, memoryview]:
    """Splits `text` (UTF-8) into a training part and, at its end, the fraction `held_out` of its characters.

    Random windows would overlap with training windows, so that the model would be tested on text that it has read.
    """
    rest = int(sum(map(len, Pieces([text]))) * (1 - held_out))
    end = 0
    for piece in Pieces([text]):
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
    if kind_of(path) not in (".tsv", ".jsonl"):
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
    elif kind_of(path) == ".tsv":
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
