"""Reads the text and the sentence pairs that a run trains on, and says exactly where a file is wrong."""

import codecs
import glob
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from jax_tformer.data.utf8 import BLOCK, TextBuffer
from jax_tformer.errors import InputError
from jax_tformer.experiment import PairData, TextData
from jax_tformer.files import user_path

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".jsonl")


def check_files(config: TextData | PairData) -> None:
    """Raises InputError unless the files that `config` names are there, and are files; reads none of them."""
    if isinstance(config, PairData):
        files = [] if config.source == "dates" else _pair_files(config)
    else:
        files = [] if config.source == "python-docs" else _text_files(config.path)
    for path in files:
        _check_file(path)


def load_text(config: TextData) -> memoryview:
    """The text that `config` names, as UTF-8; of several documents, one after the other.

    Between documents stands a blank line, as between paragraphs: the last word of one and the first of the next must
    not become one word, and every corpus with paragraphs has the characters for it. Nothing else is as long as the
    text: files are read, checked and joined block by block.

    Raises InputError if the files do not exist, cannot be read, hold no text, or are not UTF-8 or JSON lines.
    """
    if config.source == "python-docs":
        return _python_docs()
    files = _text_files(config.path)
    text = _join((document for path in files for document in _documents(path)), sum(map(_size, files)))
    if not text:
        raise InputError(f"{config.path} holds no text; expected at least one document that is not empty")
    return text


def load_pairs(config: PairData) -> list[tuple[str, str]]:
    """The (source, target) pairs of the files that `config` names, in the order of the files.

    Raises InputError if the files do not exist, cannot be read, hold no pairs, are not UTF-8, or a line is not a pair.
    """
    path, *others = _pair_files(config)
    if others:
        pairs = _aligned(path, others[0])
    elif path.suffix == ".tsv":
        pairs = _tab_separated(path)
    else:
        pairs = [(record["source"], record["target"]) for record in _json_lines(path, ("source", "target"))]
    for number, pair in enumerate(pairs, 1):
        for side, text in zip(("source", "target"), pair, strict=True):
            if not text.strip():
                raise InputError(f"{path}, line {number:,}: the {side} is empty; expected text; remove the pair")
    return [(source.strip(), target.strip()) for source, target in pairs]


def _python_docs() -> memoryview:
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise InputError("this Python comes without pydoc_data; install all of its standard library") from error
    # Some entries are one text under two names.
    documents = dict.fromkeys(topics.topics[name] for name in sorted(topics.topics))
    return _join([[document] for document in documents], sum(map(len, documents)))


def _join(documents: Iterable[Iterable[str]], size: int) -> memoryview:
    """The documents that are not blank, each given in parts; a single one as it is. `size`: bytes to expect."""
    text = TextBuffer(size)
    count, newlines = 0, 0
    for document in documents:
        parts = iter(document)
        begin = ""
        for part in parts:
            begin += part
            if begin.strip():
                break
        if not begin.strip():
            continue
        count += 1
        if count == 1:
            newlines = len(begin) - len(begin.lstrip("\n"))
            text.append(begin)
        else:
            text.strip_end()
            text.append("\n\n" + begin.lstrip("\n"))
        for part in parts:
            text.append(part)
    if count < 2:
        return text.text()
    text.strip_end()
    text.append("\n")
    return text.text(newlines)


def _pair_files(config: PairData) -> list[Path]:
    """The file of pairs; or that of sources and that of targets."""
    if config.path is None:
        raise InputError(
            "no pairs were named; give --data.path tab-separated pairs, JSON lines with source and target, "
            "or a text file whose targets --data.target-path holds"
        )
    path = user_path(config.path)
    if config.target_path is not None:
        return [path, user_path(config.target_path)]
    if path.suffix not in (".tsv", ".jsonl"):
        raise InputError(
            f"{path} is neither .tsv nor .jsonl; expected one of them, or the targets' file as --data.target-path"
        )
    return [path]


def _text_files(path: str | None) -> list[Path]:
    if path is None:
        raise InputError(
            "no text was named; give --data.path a text file, a folder of them, a glob or JSON lines with a text field"
        )
    place = user_path(path)
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.suffix in _TEXT_SUFFIXES and file.is_file())
        if not files:
            others = Counter(file.suffix for file in place.rglob("*.*") if file.is_file())
            most = others.most_common(1)[0][0] if others else ".log"
            raise InputError(
                f"{path} is a folder without {', '.join(_TEXT_SUFFIXES)} files; expected at least one; "
                f"other kinds of text are named by a pattern: --data.path '{path}/**/*{most}'"
            )
        return files
    if glob.has_magic(path) and not place.exists():
        files = sorted(file for file in map(Path, glob.glob(str(place), recursive=True)) if file.is_file())
        if not files:
            raise InputError(f"{path} matches no file; expected at least one; check the pattern")
        return files
    return [place]


def _size(path: Path) -> int:
    """Bytes that the text of a file, and what separates it from the next, take at most."""
    try:
        return path.stat().st_size + 2
    except OSError:  # said where it is read
        return 0


def _documents(path: Path) -> Iterator[Iterable[str]]:
    if path.suffix == ".jsonl":
        return ([record["text"]] for record in _json_lines(path, ("text",)))
    return iter([_blocks(path)])


def _check_file(path: Path) -> None:
    try:
        if not path.exists():
            raise InputError(f"{path} does not exist; expected a file; check the path")
        if not path.is_file():
            raise InputError(f"{path} is not a file; expected a file of text")
        if not os.access(path, os.R_OK):
            raise InputError(f"{path} cannot be read; expected a readable file; change its permissions")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); expected a readable file") from error


def _blocks(path: Path) -> Iterator[str]:
    """The text of a file in parts, newlines as line ends; InputError if there is none or it is not UTF-8."""
    _check_file(path)
    try:
        with path.open("rb") as file:
            decoder = codecs.getincrementaldecoder("utf-8")()
            place, kept, blank, first = 0, "", True, True
            while True:
                data = file.read(BLOCK)
                if (offset := data.find(b"\0")) >= 0:
                    raise InputError(f"{path} is binary: a NUL byte at byte {place + offset:,}; expected UTF-8 text")
                begun = len(decoder.getstate()[0])
                try:
                    text = kept + decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at byte "
                        f"{place - begun + error.start:,}; convert it to UTF-8"
                    ) from error
                if text and first:
                    text, first = text.removeprefix("\ufeff"), False
                place += len(data)
                blank = blank and not data.strip()
                # Nothing of an empty file is handed out, and no half of a line end.
                end = 0 if blank else len(text) - (bool(data) and text.endswith("\r"))
                kept = text[end:]
                yield text[:end].replace("\r\n", "\n")
                if not data:
                    break
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); expected a readable file") from error
    if blank:
        raise InputError(f"{path} is empty; expected text")


def _lines(path: Path) -> Iterator[str]:
    # Not str.splitlines: that also breaks lines at separators that occur inside sentences, and files drift apart.
    rest = ""
    for block in _blocks(path):
        *lines, rest = (rest + block).split("\n")
        yield from lines
    if rest:
        yield rest


def _json_lines(path: Path, fields: tuple[str, ...]) -> Iterator[dict[str, str]]:
    for number, line in enumerate(_lines(path), 1):
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
            if not _is_unicode(record[field]):
                raise InputError(f'{path}, line {number:,}: a lone surrogate under "{field}"; expected valid Unicode')
        yield record


def _is_unicode(text: str) -> bool:
    """False for what only a JSON escape can smuggle in: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tab_separated(path: Path) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(_lines(path), 1):
        columns = line.split("\t")
        if len(columns) != 2:
            found = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
            raise InputError(f"{path}, line {number:,}: {found}; expected 2, source and target, separated by one tab")
        pairs.append((columns[0], columns[1]))
    return pairs


def _aligned(path: Path, target_path: Path) -> list[tuple[str, str]]:
    sources, targets = list(_lines(path)), list(_lines(target_path))
    if len(sources) != len(targets):
        raise InputError(
            f"{path} has {len(sources):,} lines and {target_path} has {len(targets):,}; "
            "expected as many targets as sources, line by line"
        )
    return list(zip(sources, targets, strict=True))
