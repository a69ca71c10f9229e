"""Reads text files, and says exactly where one is wrong. Texts stay UTF-8 and are decoded block by block.

One emoji would make a Python string take four bytes for every character.
"""

import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jax_tformer.config.errors import InputError, require

BLOCK = 2**20
"""Bytes, or characters, that are processed together."""
_PIECE_LENGTH = 8192


def blocks(text: bytes | memoryview) -> Iterator[str]:
    """Decodes `text` (UTF-8), about a million characters at a time."""
    start = 0
    while start < len(text):
        end = start + BLOCK
        while end < len(text) and text[end] & 0xC0 == 0x80:  # inside of a character
            end += 1
        yield str(text[start:end], "utf-8")
        start = end


class Pieces(Iterable[str]):
    """Iterates over a text (UTF-8) in parts of about 8,192 characters, cut only where `end` matches; repeatable."""

    def __init__(self, text: memoryview, end: re.Pattern[str]) -> None:
        self._text, self._search = text, end.search

    def __iter__(self) -> Iterator[str]:
        rest, searched = "", 0
        for block in blocks(self._text):
            rest += block
            start = 0
            while found := self._search(rest, max(start + _PIECE_LENGTH, searched)):
                yield rest[start : found.start()]
                start = found.start()
            rest = rest[start:]
            searched = len(rest)
        if rest:
            yield rest


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
    nul, place = data.find(b"\0"), 0
    require(nul < 0, f"{path} is binary: a NUL byte at byte {nul:,}; expected UTF-8 text")
    try:
        for block in blocks(data):
            place += len(block.encode())
    except UnicodeDecodeError as error:
        place += error.start
        byte = f"byte 0x{data[place]:02x} at byte {place:,}"
        raise InputError(f"{path} is not UTF-8: {byte}; convert it to UTF-8") from error
    require(bool(data) and not data.isspace(), f"{path} is empty; expected text")
    return data.removeprefix("\ufeff".encode()).replace(b"\r\n", b"\n")


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file; raises InputError as `read_utf8` does."""
    # str.splitlines would also split at separators inside sentences, and put parallel files out of step.
    for line in io.BytesIO(read_utf8(path)):
        yield line.decode().removesuffix("\n")


def read_json_lines(path: Path, fields: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Yields the objects of a file, one per line; raises InputError if one has no text in one of the `fields`."""
    for number, line in enumerate(read_lines(path), 1):
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
