"""Reads texts from a flag, a file or standard input, and makes tokens that fit the model."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import PairData, TextData
from jax_tformer.data.tokenizers import Framing, Tokenizer, pair_framing
from jax_tformer.files import user_path
from jax_tformer.terminal import one_line

T = TypeVar("T")
Line = tuple[str, int, str]
"""A text, its line number (from 1), and its place for messages."""
ReadText = Callable[..., "Text"]
"""Makes a Text of a text, its line number and its place."""
_PER_LINE = "expected a reference for each source, line by line"


class Text(NamedTuple):
    """A prompt or a source, ready to be answered."""

    text: str
    ids: list[int]
    """The model's input, with start or end token."""
    limit: int
    """The most new tokens."""
    number: int = 1
    """Its line number, from 1."""
    place: str | None = None
    """Its place for messages, like "line 3 of FILE"; None if it is the only text."""


class Room(NamedTuple):
    """How much text a model takes."""

    translates: bool
    """Whether it answers a source, and does not continue a prompt."""
    tokens: int | None
    """The most tokens of a source, or of a prompt with its answer; None: any number."""
    name: str
    """What these are called: "the model's context"."""

    @classmethod
    def of_run(cls, data: TextData | PairData) -> "Room":
        """Returns the room of a model that was trained on `data`."""
        if isinstance(data, PairData):
            return cls(True, data.source_length, "the run's data.source_length")
        return cls(False, data.context_length, "the model's context")


class Reader:
    """Makes a Text of a prompt or a source, for a model that takes as much as `room` says.

    An answer gets at most `most` new tokens, and a prompt with its answer at most `longest` tokens. If fewer fit, that
    is the limit or, with `exactly`, an error; with `slide` prompts continue beyond the context. A tokenizer with a
    framing puts its own tokens around texts, else a prompt follows the start token, if there is one, and an end token
    follows a source. Raises InputError if translations lack a start or end token.
    """

    def __init__(
        self,
        room: Room,
        tokenizer: Tokenizer,
        most: int,
        *,
        longest: int | None = None,
        exactly: bool = False,
        slide: bool = False,
    ) -> None:
        self._tokenizer, self._most, self._longest, self._room = tokenizer, most, longest, room
        self._exactly, self._slide = exactly, slide
        self.translates = room.translates
        if room.translates:
            framing = pair_framing(tokenizer)
        else:
            framing = tokenizer.framing or Framing(() if tokenizer.start_id is None else (tokenizer.start_id,), ())
        self._framing = framing

    def __call__(self, text: str, number: int = 1, place: str | None = None, ids: list[int] | None = None) -> Text:
        """Encodes `text`, or takes its `ids`; raises InputError, which names the place, if the model cannot take it."""
        text = text.strip() if self.translates else text
        try:
            if ids is None:
                ids = [*self._framing.before, *self._tokenizer.encode(text).tolist(), *self._framing.after]
            limit = self._source(text, len(ids)) if self.translates else self._prompt(len(ids))
        except InputError as error:
            raise InputError(f"{place}: {error}" if place else str(error)) from None
        return Text(text, ids, limit, number, place)

    def _source(self, text: str, tokens: int) -> int:
        """Returns the most new tokens for a source of this many tokens."""
        room, around = self._room.tokens, self._framing.size
        told = "the end token" if around == 1 else f"{around} special tokens"
        if room is not None:
            told = f"expected at most {room - around}, {self._room.name} less {told}; shorten it"
            require(tokens <= room, f"the source {text[:40]!r} has {tokens - around} tokens; {told}")
        return self._most

    def _prompt(self, tokens: int) -> int:
        """Returns the most new tokens for a prompt of this many tokens."""
        require(tokens > 0, "the prompt has no tokens; expected at least one; give a longer text")
        told = f"the prompt has {tokens} tokens"
        if self._framing.size:
            told += " with the start token" if self._tokenizer.framing is None else " with its special tokens"
        most = self._most
        if self._longest is not None:
            expected = f"expected fewer than {self._longest}, the checkpoint's max_length; give --max-new-tokens"
            require(tokens < self._longest, f"{told}; {expected}")
            most = min(most, self._longest - tokens)
        room, name = self._room.tokens, self._room.name
        if room is None:
            return most
        if self._slide:
            require(tokens <= room, f"{told}; expected at most {room}, {name}; shorten it")
            return most
        if self._exactly:
            told += f" and --max-new-tokens is {most}; expected at most {room} together, {name}"
            mend = "make one of them smaller"
        else:
            told += f"; expected at most {room - 1}, {name} of {room} less one new token"
            mend = "shorten it"
        fits = tokens + (most if self._exactly else 1) <= room
        require(fits, f"{told}; {mend}, or let the model write beyond its context with --slide")
        return min(most, room - tokens)


def open_texts(
    only: str | None,
    file: Path | None,
    read: ReadText,
    *,
    typed: bool = False,
    at_once: bool = True,
) -> Iterable[Text]:
    """Makes texts of `only`, else of the lines of `file`, else of standard input (None, or "-") line by line.

    A file is read `at_once`, or else line by line as its texts are asked for. Leaves out blank lines. Raises InputError
    if there are no others, or if `read` refuses one.
    """
    if only is not None:
        return [read(only)]
    if file is not None and str(file) != "-":
        lines = _read_lines(file, read)
        return list(lines) if at_once else lines
    return read_standard_input(read, typed=typed)


def _read_lines(path: Path, read: ReadText) -> Iterator[Text]:
    lines = [line for line in _file_lines(path) if line[0].strip()]
    require(bool(lines), f"{path} is empty; expected a text on each line")
    return (read(*line) for line in lines)


def read_standard_input(read: ReadText, *, typed: bool = False) -> Iterator[Text]:
    """Yields the lines of standard input that are not blank as they arrive; raises InputError as `open_texts`.

    With `typed`, prints the error for a text that the model cannot take, and continues with the next line.
    """
    if typed:
        print("one text per line; Ctrl-D ends", file=sys.stderr)
    lines = (line for line in _decoded(sys.stdin.buffer if sys.stdin else (), "standard input") if line[0].strip())
    first = next(lines, None)
    if first is None:
        raise InputError("standard input is empty; expected a text on each line, or --prompt, --source or --file")
    for line in chain([first], lines):
        try:
            yield read(*line)
        except InputError as error:
            if not typed:
                raise
            print(one_line(str(error)), file=sys.stderr)


def read_references(path: Path, sources: Sequence[Text]) -> list[str]:
    """Returns the line of `path` for each of the sources; raises InputError unless the files match line by line."""
    lines = _file_lines(path)
    require(bool(lines), f"{path} is empty; expected a text on each line")
    last, numbers = sources[-1].number, {source.number for source in sources}
    lonely = next((line for line in lines if line[0].strip() and line[1] not in numbers), None)
    require(
        len(lines) >= last and (lonely is None or lonely[1] < last),
        f"the sources end at line {last:,} and {path} at line {len(lines):,}; {_PER_LINE}",
    )
    if lonely is not None:
        raise InputError(f"{lonely[2]} belongs to a blank line of the sources; {_PER_LINE}")
    return [lines[source.number - 1][0] for source in sources]


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields the items in lists of `size`, each as soon as it is full; the last one may be shorter."""
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch


def _file_lines(path: Path) -> list[Line]:
    try:
        with open(user_path(path), "rb") as stream:
            return list(_decoded(stream, str(path)))
    except OSError as error:
        told = f"{path} cannot be read ({error.strerror}); expected a file of text; check the path"
        raise InputError(told) from error


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[Line]:
    for number, line in enumerate(lines, 1):
        place = f"line {number:,} of {name}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1:,} of the line; "
                "expected text; convert it to UTF-8"
            ) from error
        yield text.removesuffix("\n").removesuffix("\r"), number, place
