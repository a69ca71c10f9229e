"""The texts that a model is given: from a flag, from a file, or from standard input as they come."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from jax_tformer.config import require
from jax_tformer.errors import InputError
from jax_tformer.files import user_path

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


def file_lines(path: Path, *, blank: bool = False) -> list[Line]:
    """The lines of a file, blank ones only on demand; raises InputError if it cannot be read, has none or is not
    UTF-8."""
    try:
        with open(user_path(path), "rb") as stream:
            lines = list(_decoded(stream, str(path), blank))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); expected a file of text; check the path"
        ) from error
    require(bool(lines), f"{path} is empty; expected a text on each line")
    return lines


def standard_input() -> Iterator[Line]:
    """The lines of standard input that are not blank, each as soon as it is there; raises InputError as `file_lines`
    does."""
    lines = _decoded(sys.stdin.buffer if sys.stdin else (), "standard input", False)
    first = next(lines, None)
    if first is None:
        raise InputError("standard input is empty; expected a text on each line, or --prompt, --source or --file")
    yield first
    yield from lines


def references_of(lines: Sequence[Line], path: Path) -> list[str]:
    """The line of `path` that stands beside each of `lines`; raises InputError unless they go together."""
    references = file_lines(path, blank=True)
    last, numbers = lines[-1].number, {line.number for line in lines}
    lonely = next((line for line in references if line.text.strip() and line.number not in numbers), None)
    require(
        len(references) >= last and (lonely is None or lonely.number < last),
        f"the sources end at line {last:,} and {path} at line {len(references):,}; "
        "expected a reference for each source, line by line",
    )
    if lonely is not None:
        raise InputError(
            f"{lonely.place} stands beside a blank line of the sources; "
            "expected a reference for each source, line by line"
        )
    return [references[line.number - 1].text for line in lines]


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`, each as soon as it is full; the last one may be shorter."""
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch


def _decoded(lines: Iterable[bytes], name: str, blank: bool) -> Iterator[Line]:
    for number, line in enumerate(lines, 1):
        place = f"line {number:,} of {name}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1:,} of the line; "
                "expected text; convert it to UTF-8"
            ) from error
        if blank or text.strip():
            yield Line(text.removesuffix("\n").removesuffix("\r"), number, place)
