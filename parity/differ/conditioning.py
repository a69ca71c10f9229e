"""Whether two sides part by no more than float64 rounds, where a program makes rounding errors large.

The logarithm of a difference, say, has few digits left of what it is given, and no two frameworks round alike.
"""

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from parity.differ.element_order import error_of
from parity.differ.values import Values

_LARGEST_ERROR = 1e-6
_MOST = 1 << 24
"""Elements, at most, of all that is computed anew."""
_TIMES = 10.0
"""What differs by so many times as much as rounding moves it has another cause."""
_DRAWS = 2
_FLOAT32 = 2.0**-24
TABLE = 1e-6
"""What differs by no more may be how a table in float32 rounds."""
_FEW_DIGITS = {"aten.polygamma": 1e-9, "aten.linalg_matrix_exp": 1e-10}
"""How far a library's own formula in float64 is from the function: PyTorch's trigamma has nine digits, its exponential
of a small matrix ten."""


def explained_by_rounding(
    sides: tuple[Values, Values],
    errors: Mapping[str, float],
    names: Mapping[str, Collection[str]] | None = None,
    *,
    tables: bool = False,
    put: Collection[int] = (),
) -> set[str]:
    """The errors that are small, and of which one side's own results move at least a tenth as far, if each of its
    operations rounds otherwise.

    `names` are those of `errors` by the name of the output; without them an output is called the same. With `tables`,
    what one side alone holds in float32, as frequencies, rounds otherwise too, and the results have to move as far as
    the errors; the two sides have been compared then. `put` are the values of theirs that are numbers of ours.
    """
    small = {key: error for key, error in errors.items() if error < _LARGEST_ERROR}
    if not small or (tables and len(small) < len(errors)):
        return set()
    held = {values.side: _held_in_float32(values) for values in sides} if tables else {}
    if all(held.values()):
        held = {}  # what both round is no difference, however each arranges it
    moved = dict.fromkeys(errors, 0.0)
    for values in sides:
        numbers = held.get(values.side, set())
        if tables and not numbers:
            continue
        given = put if values.side == "theirs" else ()
        exact = _computed(values, None, numbers, given)
        drawn = (each for draw in range(_DRAWS) for each in _computed(values, draw, numbers, given).items())
        for output, array in drawn if exact else ():
            for key in [output] if names is None else names.get(output, [output]):
                moved[key] = max(moved.get(key, 0.0), error_of(array, exact[output]))
    times = 1 if tables else _TIMES
    return {key for key, error in small.items() if error <= times * moved[key]}


def as_rounded(differing: Iterable[str]) -> tuple[str, ...]:
    """How an answer says of what differs that rounding explains it."""
    return tuple(f"{each} (as float64 rounds)" for each in differing)


def rounds_a_table(sides: tuple[Values, Values], errors: Mapping[str, float]) -> bool:
    """Whether one side alone holds tables in float32 that have no equal, and some error is far larger than these round:
    then that is what is looked for, behind them."""
    large = max(errors.values(), default=0.0) > 1e3 * TABLE
    return large and bool(_held_in_float32(sides[0])) != bool(_held_in_float32(sides[1]))


def _held_in_float32(values: Values) -> set[int]:
    """The tables without an equal, with numbers in no more digits than float32 has, and in more than whole numbers and
    float16 have."""
    given = {i for i in values.live() - values.equal.keys() if not (values.rows[i].data or values.rows[i].inputs)}
    values.want(given)
    arrays = {i: np.asarray(values.arrays[i]) for i in given & values.arrays.keys()}
    return {i for i, array in arrays.items() if array.size > 1 and _is_in_float32(array)}


def _is_in_float32(array: np.ndarray) -> bool:
    if array.dtype.kind != "f":
        return False
    with np.errstate(over="ignore"):
        more = (array != array.astype(np.float16)) & (array != np.rint(array))
        return bool((array == array.astype(np.float32)).all() and more.any())


def _computed(values: Values, seed: int | None, held: Collection[int], put: Collection[int]) -> dict[str, np.ndarray]:
    """The outputs; with a seed, those where every number that is computed is one unit in its last place larger or
    smaller (D. S. Parker, "Monte Carlo arithmetic", 1997). Nothing where a side cannot be run again."""
    live, rows, generator = sorted(values.live()), values.rows, np.random.default_rng(seed)
    made = [i for i in live if rows[i].inputs and i not in put]
    if sum(math.prod(rows[i].shape) for i in live) > _MOST or any(rows[i].again is None for i in made):
        return {}
    given = [i for i in live if not rows[i].inputs or i in put]
    values.want(given)
    arrays: dict[int, np.ndarray] = {i: array for i in given if (array := values.array(i)) is not None}
    for i in held if seed is not None else ():
        arrays[i] = arrays[i] * (1 + generator.choice([-1, 1], arrays[i].shape) * _FLOAT32)
    try:
        for i in made:
            before = [arrays[k] for k in rows[i].inputs]
            with np.errstate(all="ignore"):
                array = np.asarray(rows[i].again(before))  # type: ignore[misc]
                if array.dtype == np.float64 and seed is not None:
                    # What is chosen, and whole numbers, are not rounded.
                    exact = (np.rint(array) == array) | np.isin(array, np.concatenate([[0.0], *map(np.ravel, before)]))
                    size = _FEW_DIGITS.get(rows[i].operation, 2.0**-52)
                    array = np.where(exact, array, array * (1 + generator.choice([-1, 1], array.shape) * size))
            arrays[i] = array
    except Exception:  # Operations of other libraries may not take NumPy's arrays.
        return {}
    return {name: arrays[i] for name, i in values.outputs.items()}
