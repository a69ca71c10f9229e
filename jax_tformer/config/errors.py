"""The one exception that means "the user can mend this", and the checks that raise it."""

import math
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    import numpy as np


_LONGEST = 4000


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
        self.field, self.problem = field, problem


class TrainingFailed(RuntimeError):
    """Training cannot go on: a loss or gradient is not finite. Programs print one line and exit with status 1."""


def require(condition: bool, message: str) -> None:
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


def require_field(condition: bool, name: str, problem: str) -> None:
    """Raises FieldError(name, problem) unless `condition` holds."""
    if not condition:
        raise FieldError(name, problem)


def require_positive(config: object, *names: str) -> None:
    """Raises FieldError unless every named field is an integer of at least 1."""
    for name in names:
        value = getattr(config, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        require_field(whole and value >= 1, name, f"is {value!r}; expected a whole number of at least 1")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_finite(config: object, *names: str, above: float | None = None, minimum: float | None = None) -> None:
    """Raises FieldError unless every named field is a finite number, above `above` and not below `minimum`."""
    bound = f" above {above:g}" if above is not None else f" of at least {minimum:g}" if minimum is not None else ""
    for name in names:
        value = getattr(config, name)
        within = _is_finite(value) and (above is None or value > above) and (minimum is None or value >= minimum)
        require_field(within, name, f"is {value!r}; expected a finite number{bound}")


def require_choice(config: object, name: str, allowed: Any) -> None:
    """Raises FieldError unless the named field is one of the values of the Literal type `allowed`."""
    value, choices = getattr(config, name), get_args(allowed)
    require_field(value in choices, name, f"is {value!r}; expected one of {', '.join(map(repr, choices))}")


def require_fraction(config: object, *names: str) -> None:
    """Raises FieldError unless every named field is a number from 0 up to, but not including, 1."""
    for name in names:
        value = getattr(config, name)
        within = _is_finite(value) and 0 <= value < 1
        require_field(within, name, f"is {value!r}; expected a number from 0 to below 1")
