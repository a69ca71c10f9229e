"""The texts that a model is given: from a flag, from a file, or from standard input as they come."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from jax_tformer.config import require
from jax_tformer.errors import InputError
from jax_tformer.paths import user_path

T = TypeVar("T")


class Line(NamedTuple):
    """A text, and where it came from."""

    text: str
    number: int
    """Of the line, from 1."""
    place: str | None
    """For messages, "line 3 of FILE"; None: the text is the flag's, the only one."""

    @property
    def prefix(self) -> str:
        """What a message about this text begins with."""
        return f"{self.place}: " if self.place else ""


def file_lines(path: Path, *, empty: bool = False) -> list[Line]:
    """The lines of a file; raises InputError if it cannot be read, has none, is not UTF-8, or (unless `empty` lines
    are welcome) one is empty."""
    try:
        with open(user_path(path), "rb") as stream:
            lines = list(_decoded(stream, str(path), empty))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); expected a file of text; check the path"
        ) from error
    require(bool(lines), f"{path} is empty; expected a text on each line")
    return lines


def standard_input() -> Iterator[Line]:
    """The lines of standard input, each as soon as it is there; raises InputError as `file_lines` does."""
    lines = _decoded(sys.stdin.buffer if sys.stdin else (), "standard input", False)
    first = next(lines, None)
    if first is None:
        raise InputError("standard input is empty; expected a text on each line, or --prompt, --source or --file")
    yield first
    yield from lines


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`, each as soon as it is full; the last one may be shorter."""
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch


def _decoded(lines: Iterable[bytes], name: str, empty: bool) -> Iterator[Line]:
    for number, line in enumerate(lines, 1):
        place = f"line {number:,} of {name}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1:,} of the line; "
                "expected text; convert it to UTF-8"
            ) from error
        text = text.removesuffix("\n").removesuffix("\r")
        require(empty or bool(text.strip()), f"{place} is empty; expected a text on each line; remove the line")
        yield Line(text, number, place)
