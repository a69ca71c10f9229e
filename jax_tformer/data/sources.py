"""Reads text, pairs and ids from files. A wrong file is told exactly.

Texts stay UTF-8, because one emoji would make a Python string take four bytes for every character. Shards are files of
ids, as `jax-tformer tokenize`, llm.c, nanoGPT or Megatron write them, of any size: what is asked for is read at its
position, and nothing is kept or mapped. Pages of a mapped file count as memory of the process, and one that is cut off
meanwhile would end the process without a word.
"""

import glob
import gzip
import json
import re
import struct
import zlib
from array import array
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import file_digest, sha256
from io import BufferedReader
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jax_tformer.config.errors import WHY, InputError, explained, require
from jax_tformer.config.experiment import PairData, TextData
from jax_tformer.data import generated
from jax_tformer.data.order import held_out_items
from jax_tformer.data.tokenizers import Pieces, Tokenizer, load_tokenizer
from jax_tformer.files import Json, kept, not_regular, read_json, shortened, user_path

T = TypeVar("T")
D = TypeVar("D", bound=TextData | PairData)
_WEIGHTED = re.compile(r"([^,]+)=(\d+\.?\d*|\.\d+)(?:,|$)")
_ROWS = 10_000
"""Rows of which each source of a mixture has a fixed share."""
_TEXTS = (".txt", ".md", ".rst", ".jsonl")
KINDS = (*_TEXTS, *(kind + packer for kind in _TEXTS for packer in (".gz", ".zst")), ".parquet")
"""What is read of a folder."""
BLANK_LINE = b"\n\n"
_BLOCK = 2**20
TABLES = (".json", ".csv")
"""Their texts would have to be taken out; as they are, a model learns quotes and commas."""
MANIFEST = "manifest.json"
HEADER_BYTES = 1024
"""256 int32: the number of the format, its version, how many ids follow, and zeros."""
FORMATS: dict[int, tuple[int, Any]] = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
"""Number of the format -> its version and the type of its ids: llm.c's for GPT-2, and for Llama 3."""
_INDEX = "<9sQBQQ"
"""How Megatron's index begins: a mark, its version, the kind of its ids, how many rows and texts follow."""
_INDEX_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_HELD_OUT = re.compile(r"(?<![a-z])(val|valid|validation|test)(?![a-z])", re.IGNORECASE)
_MEND = "restore it from where it came from, or write the shards again"


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
        require(
            data.target_path is None and data.tokens_per_batch is None,
            f"--data.path is {path!r}; give a .tsv or .jsonl file of each source, and no --data.target-path or "
            "--data.tokens-per-batch",
        )
    return [(replace(data, path=name), share) for name, share in shares.items()]


def check_files(data: TextData | PairData) -> None:
    """Raises InputError unless all files that `data` names are readable; does not open them."""
    if data.source == "files":
        for part, _ in sources_of(data):
            if isinstance(part, PairData):
                pair_files(part)
            elif not shard_files(part):
                text_files(part)


def _readable(paths: Iterable[Path]) -> list[Path]:
    """Returns the paths; raises InputError unless all are readable files; does not open them, as a pipe would block."""
    found = list(paths)
    for path in found:
        problem = not_regular(path)
        require(not problem, f"{path} {problem}; expected a file that can be read; check the path")
    return found


@dataclass(frozen=True)
class Blocks(Iterable[bytes]):
    """A text file, as it is or compressed, in blocks of whole lines of UTF-8, with "\\n" as line ends.

    Iterating raises InputError if the file cannot be read or is not UTF-8.
    """

    path: Path

    def __iter__(self) -> Iterator[bytes]:
        path = self.path
        at = 0
        damaged = f"{path} is damaged or cannot be read ({WHY}); restore it; then go on"
        try:
            with explained(damaged, (EOFError, OSError, zlib.error)), _opened(path) as file:
                # No character and no line end is divided.
                while block := file.read(_BLOCK) + file.readline():
                    nul = block.find(b"\0")
                    require(nul < 0, f"{path} is binary: a NUL byte at byte {at + nul:,}; expected UTF-8 text")
                    block.decode()  # raises where it is not UTF-8
                    yield (block if at else block.removeprefix(BOM_UTF8)).replace(b"\r\n", b"\n")
                    at += len(block)
        except UnicodeDecodeError as error:
            byte = f"byte 0x{block[error.start]:02x} at byte {at + error.start:,}"
            raise InputError(f"{path} is not UTF-8: {byte}; convert it to UTF-8") from error


def _opened(path: Path) -> Any:
    """Opens a file, or what is compressed in it."""
    if path.suffix.lower() == ".zst":
        return BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
    return gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb")


def _pyarrow(path: Path) -> Any:
    with explained(f"{path} takes pyarrow to read; install it: pip install 'jax-tformer[shards]'", ImportError):
        import pyarrow.parquet
    return pyarrow


def kind_of(path: Path) -> str:
    """Returns the suffix of a file, ".txt" for example, compressed or not."""
    return Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file; raises InputError as `Blocks` does, and if it is empty."""
    require(not is_empty(Blocks(path)), f"{path} is empty; expected text")
    for block in Blocks(path):
        # str.splitlines would also split at separators inside sentences, and put parallel files out of step.
        yield from block.decode().removesuffix("\n").split("\n")


def read_json_lines(path: Path, fields: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Yields the objects of a file, one per line; raises InputError if one has no text in one of the `fields`."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            record = json.loads(line)
            for field in fields:
                record[field].encode()
        except (ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
            wanted = " and ".join(f'"{name}"' for name in fields)
            told = f"not JSON ({error}); expected one JSON object a line"
            if isinstance(error, UnicodeEncodeError):  # JSON escapes can spell half of a surrogate pair
                told = f'a lone surrogate under "{field}"; expected valid Unicode'
            elif not isinstance(error, ValueError | RecursionError):
                told = f'no text under "{field}"; expected an object with a string under {wanted}'
            raise InputError(f"{path}, line {number:,}: {told}") from error
        yield record


Document = tuple[str, Iterable[bytes]]
"""Where a document stands, for messages, and its text (UTF-8); that of a file is read anew each time."""


def is_empty(blocks: Iterable[bytes]) -> bool:
    """Whether a document has nothing but white space."""
    return not any(str(block, "utf-8").strip() for block in blocks)


def documents(path: Path, field: str = "text") -> Iterator[Document]:
    """Yields the documents of a file: of each JSON line or row of Parquet what stands under `field`, or all text.

    Raises InputError if the file cannot be read.
    """
    if kind_of(path) == ".parquet":
        for row, text in enumerate(_read_parquet(path, field), 1):
            yield f"{path}, row {row:,}", [(text or "").encode()]
    elif kind_of(path) == ".jsonl":
        records = () if is_empty(Blocks(path)) else read_json_lines(path, (field,))
        for line, record in enumerate(records, 1):
            yield f"{path}, line {line:,}", [record[field].encode()]
    else:
        yield str(path), Blocks(path)


def _read_parquet(path: Path, column: str) -> Iterator[str | None]:
    arrow = _pyarrow(path)
    with (
        explained(f"{path} is damaged ({WHY}); restore it; then go on", (arrow.ArrowException, OSError)),
        closing(arrow.parquet.ParquetFile(path)) as file,
    ):
        kinds = dict(zip(file.schema_arrow.names, map(str, file.schema_arrow.types), strict=True))
        require(
            column in kinds,
            f"{path} has the columns {', '.join(kinds)}; expected {column!r} among them: --data.column NAME",
        )
        require(
            kinds[column] in ("string", "large_string", "string_view"),
            f"{path}: the column {column!r} holds {kinds[column]}; expected text; name another --data.column",
        )
        for batch in file.iter_batches(1024, columns=[column]):
            yield from batch[0].to_pylist()


def _named(path: str) -> list[Path]:
    """Returns the files that a pattern names, or else the path itself; raises InputError if a pattern names none."""
    place = user_path(path)
    if place.exists() or not glob.has_magic(path):
        return [place]
    found = sorted(file for file in map(Path, glob.glob(str(place), recursive=True)) if file.is_file())
    require(found, f"{path} matches no file; expected at least one; check the pattern")
    return found


def shard_files(data: TextData) -> list[Path]:
    """Finds the files of ids (.bin) that `data.path` names; none if it names text."""
    if data.source != "files" or data.path is None:
        return []
    place = user_path(data.path)
    found = sorted(place.glob("*.bin")) if place.is_dir() else _named(data.path)
    return _readable(file for file in found if file.suffix == ".bin")


def text_files(data: TextData) -> list[Path]:
    """Finds the files that `data.path` names, in a folder those of the `KINDS` of text.

    Raises InputError if there are none, or for one .json or .csv file.
    """
    path = data.path or ""
    require(
        path,
        "no text was named; give --data.path a text file, a folder of them, a glob or JSON lines with a text field",
    )
    place = user_path(path)
    if place.is_dir():
        inside = [file for file in sorted(place.rglob("*")) if file.is_file()]
        found = [file for file in inside if file.name.lower().endswith(KINDS)]
        others = Counter(file.suffix for file in inside if file.suffix)
        most = others.most_common(1)[0][0] if others else ".log"
        require(
            found,
            f"{path} is a folder without {', '.join(_TEXTS)} or .parquet files; expected at least one; "
            f"other kinds of text are named by a pattern: '{path}/**/*{most}'",
        )
        return _readable(found)
    require(
        not place.is_file() or place.suffix.lower() not in TABLES,
        f"{path} would be read with all its quotes and commas; expected text, or .jsonl with a text field in every "
        "line; convert it, or name a copy .txt to train on it as it is",
    )
    return _readable(_named(path))


class Text(NamedTuple):
    """A text (UTF-8), and where each of its documents ends; BLANK_LINE stands between two of them."""

    content: memoryview
    ends: list[int]


def load_text(data: TextData) -> Text:
    """Reads the text that `data` names; leaves documents out in which there is nothing.

    The blank line keeps the last word of a document apart from the first of the next, in characters that every corpus
    with paragraphs has.

    Raises InputError if the files do not exist, cannot be read, hold no text, or are not UTF-8 or JSON lines.
    """
    if data.source == "files":
        found = chain.from_iterable(map(documents, text_files(data)))
    else:
        found = chain((data.source, [text.encode()]) for text in generated.TEXTS[data.source]())
    # Always in the same order.
    written = (b"".join(blocks) for _, blocks in found if not is_empty(blocks))
    first = next(written, None)
    second = next(written, None)
    if first is None:
        raise InputError(f"{data.path} holds no text; expected at least one document that is not empty")
    if second is None:
        # A document alone is left as it is.
        return Text(memoryview(first), [len(first)])
    # Joined in one array, so that the text is in memory only once.
    text = bytearray()
    ends = list[int]()
    for content in chain([first, second], written):
        text += BLANK_LINE * bool(ends) + content.strip(b"\n")
        ends.append(len(text))
    text += b"\n"
    return Text(memoryview(text), ends)


def training_end(text: memoryview, held_out: float) -> int:
    """Returns the byte at which the training part of `text` (UTF-8) ends: behind it are `held_out` of the characters.

    Random windows would overlap with training windows, so that the model would be tested on text that it has read.
    """
    rest = int(sum(map(len, Pieces([text]))) * (1 - held_out))
    end = 0
    for piece in Pieces([text]):
        end += len(piece[:rest].encode())
        rest -= len(piece[:rest])
    return end


def pair_files(data: PairData) -> list[Path]:
    """Returns the file of pairs, or the files of sources and of targets; raises InputError if `data` names neither."""
    if data.path is None:
        raise InputError(
            "no pairs were named; give --data.path tab-separated pairs, JSON lines with source and target, "
            "or a text file whose targets --data.target-path holds"
        )
    path = user_path(data.path)
    if data.target_path is not None:
        return _readable([path, user_path(data.target_path)])
    require(
        kind_of(path) in (".tsv", ".jsonl"),
        f"{path} is neither .tsv nor .jsonl; expected one of them, or the targets' file as --data.target-path",
    )
    return _readable([path])


class Rows(Sequence[T]):
    """Rows of bytes, in one array, each made what it stands for by `read`.

    Short texts and arrays take many times their length as objects of Python.
    """

    def __init__(self, rows: Iterable[bytes], read: Callable[[memoryview], T]) -> None:
        self._content = bytearray()
        ends = array("q", [0])
        self._read = read
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
    pairs = _read_pairs(data) if data.source == "files" else generated.scan_pairs(data.source)
    return packed(chain.from_iterable(pairs))


def _read_pairs(data: PairData) -> Iterator[tuple[str, str]]:
    path, *others = pair_files(data)
    rows: Iterable[Sequence[str | None]]
    if others:
        rows = zip_longest(read_lines(path), read_lines(others[0]))
    elif kind_of(path) == ".tsv":
        rows = (line.split("\t") for line in read_lines(path))
    else:
        rows = ((record["source"], record["target"]) for record in read_json_lines(path, ("source", "target")))
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            found = "1 column" if len(row) == 1 else f"{len(row)} columns"
            raise InputError(f"{path}, line {number:,}: {found}; expected 2, source and target, separated by one tab")
        source, target = row
        if source is None or target is None:
            short, longer = (path, others[0]) if source is None else (others[0], path)
            raise InputError(
                f"{short} has {number - 1:,} lines and {longer} has more; expected as many targets as sources, line by "
                "line"
            )
        for side, text, file in (("source", source, path), ("target", target, [path, *others][-1])):
            require(text.strip(), f"{file}, line {number:,}: the {side} is empty; expected text; remove the pair")
        yield source.strip(), target.strip()


def held_out_pairs(data: PairData, texts: Rows[str], pairs: Iterable[int]) -> np.ndarray:
    """Returns, bool[N], which of the N `pairs`, numbers of those in `texts`, are held out.

    Pairs with the same source stay together.
    """
    rule = generated.SCAN_HELD_OUT.get(data.source)
    if rule is None:
        return held_out_items((texts[2 * pair] for pair in pairs), data.held_out)
    return np.array([rule(texts[2 * pair], texts[2 * pair + 1]) for pair in pairs])


class TokenFile(NamedTuple):
    """A file of `size` ids of type `kind` after `offset` bytes."""

    path: Path
    kind: np.dtype
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
        begin += self.start
        end += self.start
        found = [np.empty(0, np.uint8)]
        for path, kind, offset, size in self.files:
            first = max(begin, 0)
            count = min(end, size) - first
            if count > 0:
                mend = f"{_MEND}; then the same command continues the run"
                with explained(f"{path} cannot be read any more ({WHY}); {mend}"):
                    found.append(np.fromfile(path, kind, count, offset=offset + first * kind.itemsize))
                require(len(found[-1]) == count, f"{path} has become shorter since the start; {mend}")
            begin -= size
            end -= size
            if end <= 0:
                break
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


def open_shards(data: TextData, tokenizer: Tokenizer) -> Corpus:
    """Opens the shards that `data` names; those with val, valid, validation or test in their names are held out.

    Without any, the fraction `data.held_out` at the end is. Each file is read once for its checksum, which the cache
    keeps as long as the file does not change. Raises InputError if a file is damaged or missing, or if the shards were
    written with another tokenizer.
    """
    paths = shard_files(data)
    folder = paths[0].parent
    manifest = read_manifest(folder)
    files = [find_ids(path) for path in paths]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(digest, paths))
    if manifest is not None:
        strange = [str(path) for path in paths if path.name not in manifest["files"]]
        require(not strange, f"{MANIFEST} does not name {shortened(strange)}; expected its own shards alone; move it")
        for name, expected in manifest["files"].items():
            path = folder / name
            require(path.exists(), f"{path} is missing; expected it, because {MANIFEST} names it; {_MEND}")
            require(digest(path) == expected, f"{path} is damaged: its checksum is not that in {MANIFEST}; {_MEND}")
        require(
            load_tokenizer(folder).spelling == tokenizer.spelling,
            f"the shards in {folder} were written with another tokenizer; expected that of the model: leave "
            "--data.tokenizer out to train with the one in the folder, or write shards with this one",
        )
    held_out = [file for file in files if _HELD_OUT.search(file.path.stem)]
    train = [file for file in files if file not in held_out]
    require(
        train,
        "all shards are held out by their names; expected some without val, valid, validation or test in the name",
    )
    size = sum(file.size for file in train)
    cut = size if held_out else int(size * (1 - data.held_out))
    ordered = [*train, *held_out]
    first = StoredIds(ordered, 0, cut)
    rest = StoredIds(ordered, cut, sum(file.size for file in ordered))
    known = manifest["val"]["text_bytes"] if manifest is not None and held_out else None
    return Corpus(first, rest, digests, known, [f"{len(first):,} ids to train on, {len(rest):,} held out"])


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
    size = path.stat().st_size
    number, version, count = _unpack("<3i", path)
    index = path.with_suffix(".idx")
    if index.exists():
        # Megatron's.
        mark, version, kind, rows, texts = _unpack(_INDEX, *_readable([index]))
        require(
            (mark, version) == (b"MMIDIDX\0\0", 1) and kind in _INDEX_TYPES,
            f"{index} is no index of Megatron, version 1, of whole numbers, as expected beside a .bin; {_MEND}",
        )
        written = index.stat().st_size
        least = struct.calcsize(_INDEX) + 12 * rows + 8 * texts
        require(written >= least, f"{index} is damaged: it has {written:,} bytes; expected {least:,}; {_MEND}")
        lengths = np.fromfile(index, "<i4", rows, offset=struct.calcsize(_INDEX))
        found = TokenFile(path, np.dtype(_INDEX_TYPES[kind]), 0, int(lengths.sum(dtype=np.int64)))
    elif size >= HEADER_BYTES and number in FORMATS:
        expected, kind = FORMATS[number]
        require(version == expected, f"{path} is of version {version}; expected {expected}; {_MEND}")
        found = TokenFile(path, np.dtype(kind), HEADER_BYTES, count)
    else:
        found = TokenFile(path, np.dtype(np.uint16), 0, -(-size // 2))
    wanted = found.offset + found.size * found.kind.itemsize
    require(size == wanted, f"{path} is damaged: it has {size:,} bytes; expected {wanted:,}; {_MEND}")
    return found


def _unpack(form: str, path: Path) -> tuple[Any, ...]:
    """Returns what stands at the beginning of a file, as struct unpacks it; zeros if the file is shorter."""
    size = struct.calcsize(form)
    with open(path, "rb") as file:
        return struct.unpack(form, file.read(size).ljust(size, b"\0"))


def seal(values: Json) -> str:
    """Returns the checksum of all in a manifest but its "checksum"."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Json | None:
    """Reads the manifest of a folder of shards; None if others wrote them. Raises InputError if it is damaged."""
    path = folder / MANIFEST
    if not path.exists():
        require(
            not (folder / "tokenizer.json").exists(),
            f"{path} is missing; expected it beside shards and tokenizer.json; tokenize again, which goes on",
        )
        return None
    values = read_json(path)
    require(
        isinstance(values, dict) and values.get("checksum") == seal(values),
        f"{path} is damaged: its checksum is another; {_MEND}",
    )
    return values
