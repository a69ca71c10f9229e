"""A long text as UTF-8: a single emoji makes every one of Python's characters beside it take four bytes."""

import codecs
import re
from collections.abc import Iterable, Iterator

import numpy as np

BLOCK = 2**20
"""Bytes, or characters, that are looked at together."""
PIECE_END = re.compile(r"(?<=\S)[ \n]")
"""Where byte-level BPE can be cut: no match of GPT-2's pattern has whitespace behind a character that is none, and what
stands before a match does not decide it. Python's whitespace is that of the pattern, and four control characters."""
WORD_END = re.compile(r"(?<=\S) ")
"""Where later patterns can be cut too, which join newlines to what is neither letter nor digit before them."""
_PIECE_LENGTH = 8192


class TextBuffer:
    """Text put together part by part, in one array, so that it is never there twice."""

    def __init__(self, size: int) -> None:
        """`size`: bytes that will do, as far as is known."""
        self._bytes = np.empty(max(size, 1), np.uint8)
        self._end = 0

    def append(self, text: str) -> None:
        """Adds `text`; raises UnicodeEncodeError if that is not valid Unicode."""
        part = np.frombuffer(text.encode(), np.uint8)
        if self._end + len(part) > len(self._bytes):
            self._bytes = np.concatenate([self._bytes[: self._end], np.empty(self._end + len(part), np.uint8)])
        self._bytes[self._end : self._end + len(part)] = part
        self._end += len(part)

    def strip_end(self) -> None:
        """Takes the newlines at the end away."""
        while self._end and self._bytes[self._end - 1] == ord("\n"):
            self._end -= 1

    def text(self, start: int = 0) -> memoryview:
        """The bytes from `start` on."""
        return self._bytes[start : self._end].data


def blocks(text: memoryview) -> Iterator[str]:
    """`text` as characters, about a million at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), BLOCK):
        yield decoder.decode(text[start : start + BLOCK])


class Pieces(Iterable[str]):
    """A text in parts of about 8,192 characters, cut where no token crosses; can be read again."""

    def __init__(self, text: memoryview, end: re.Pattern[str] = PIECE_END) -> None:
        self._text, self._search = text, end.search

    def __iter__(self) -> Iterator[str]:
        rest = ""
        searched = 0
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
