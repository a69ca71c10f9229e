"""The one exception that means "the user can mend this", and the checks that raise it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    import numpy as np


class Bound(NamedTuple):
    """What the value of a field may be: in words, and as a test."""

    told: str
    allows: Callable[[Any], bool]

    def __repr__(self) -> str:
        # As it stands in signatures.
        return self.told


def is_id(value: object) -> bool:
    """Whether a value may be the id of a token."""
    return type(value) is int and value >= 0


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(map(is_id, value))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


Positive = Annotated[int, Bound("a whole number of at least 1", lambda x: type(x) is int and x >= 1)]
Count = Annotated[int, Bound("a whole number of at least 0", is_id)]
Finite = Annotated[float, Bound("a finite number", _is_finite)]
AboveZero = Annotated[float, Bound("a finite number above 0", lambda x: _is_finite(x) and x > 0)]
NotNegative = Annotated[float, Bound("a finite number of at least 0", lambda x: _is_finite(x) and x >= 0)]
Rate = Annotated[float, Bound("a number from 0 to below 1", lambda x: _is_finite(x) and 0 <= x < 1)]
Share = Annotated[float, Bound("a fraction above 0 and below 1", lambda x: _is_finite(x) and 0 < x < 1)]
Seed = Annotated[int, Bound("a whole number from 0 to 2^32 - 1", lambda x: isinstance(x, int) and 0 <= x < 2**32)]
TokenIds = Annotated[tuple[int, ...], Bound("a tuple of ids of at least 0", _are_ids)]
Words = Annotated[
    tuple[tuple[int, ...], ...],
    Bound(
        "a tuple of words, each a tuple of one or more ids of at least 0",
        lambda x: isinstance(x, tuple) and all(word and _are_ids(word) for word in x),
    ),
]
C = TypeVar("C")
_LONGEST = 4000
WHY = "\0"
"""What an error says, in a message of `explained`."""


class InputError(ValueError):
    """Bad input: its message is one line that says what was wrong, what was expected and what to do.

    The command-line programs print it without a traceback and exit with status 2. Of a long message only the beginning
    and the end stay, because it may quote a stranger's file, in which a name may have a megabyte.
    """

    def __init__(self, message: str) -> None:
        half = _LONGEST // 2
        super().__init__(message if len(message) <= _LONGEST else f"{message[:half]} ... {message[-half:]}")


class FieldError(InputError):
    """A bad value of one config field. The field's name is kept apart, so that a program can name its flag instead."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class TrainingFailed(RuntimeError):
    """Training cannot go on: a loss or gradient is not finite. Programs print one line and exit with status 1."""


def reason_of(error: Exception) -> str:
    """Returns what an error of a library says, on one line, or its name if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def explained(message: str, kinds: type[Exception] | tuple[type[Exception], ...] = OSError) -> Iterator[None]:
    """Inside, errors of these kinds become InputError(message), in which WHY is what they say."""
    try:
        yield
    except kinds as error:
        raise InputError(message.replace(WHY, getattr(error, "strerror", None) or reason_of(error))) from error


def require(condition: object, message: str) -> None:
    """Raises InputError(message) unless `condition` holds."""
    if not condition:
        raise InputError(message)


def require_ids(ids: "np.ndarray", vocab_size: int) -> None:
    """Raises InputError unless all `ids` are at least 0 and below `vocab_size`; JAX would silently return NaN."""
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise InputError(
            f"a token has the id {int(wrong[0])}; expected ids from 0 to {vocab_size - 1}; "
            "use the tokenizer that the model was trained with"
        )


def require_field(condition: object, name: str, problem: str) -> None:
    """Raises FieldError(name, problem) unless `condition` holds."""
    if not condition:
        raise FieldError(name, problem)


def check_fields(config: Any) -> None:
    """Raises FieldError unless the fields of a dataclass have the values that their types allow.

    Those are numbers within bounds (`Positive` and its like), the values of a Literal, and None beside them. Fields of
    other types may have any value.
    """
    for name, bounds in _bounds(config.__class__).items():
        value = getattr(config, name)
        expected = " or ".join(bound.told for bound in bounds if bound.told)
        require_field(any(bound.allows(value) for bound in bounds), name, f"is {value!r}; expected {expected}")


@dataclass_transform(frozen_default=True)
def checked(kind: type[C]) -> type[C]:
    """Makes a frozen dataclass, which has `check_fields` look at its fields before its own `__post_init__` does."""
    own: Callable[[C], None] = getattr(kind, "__post_init__", lambda self: None)

    def check(self: C) -> None:
        check_fields(self)
        own(self)

    setattr(kind, "__post_init__", check)  # noqa: B010 (mypy knows no such method)
    return dataclass(frozen=True)(kind)


@cache
def _bounds(kind: type) -> dict[str, list[Bound]]:
    """Returns what each field may be; leaves those out that may be anything."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        bounds = [bound for bound in map(_bound, kinds) if bound is not None]
        if len(bounds) == len(kinds):
            found[name] = bounds
    return found


def _bound(kind: Any) -> Bound | None:
    if kind is NoneType:
        return Bound("", lambda value: value is None)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return Bound(f"one of {', '.join(map(repr, choices))}", lambda value: value in choices)
    said = get_args(kind)[1] if get_origin(kind) is Annotated else None
    return said if isinstance(said, Bound) else None
