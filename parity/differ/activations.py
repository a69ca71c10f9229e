"""Whether both sides apply a known function to the same value, and not the same one."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

import numpy as np

from parity.differ.alignment import Start, shared
from parity.differ.fingerprints import fingerprint, finite
from parity.differ.values import Values


def _known_functions(slopes: Iterable[float]) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    erf = np.vectorize(math.erf, otypes=[float])

    def sigmoid(x: np.ndarray) -> np.ndarray:
        result: np.ndarray = 1 / (1 + np.exp(-x))
        return result

    leaky = {f"leaky ReLU ({slope:g})": partial(_leaky, slope) for slope in slopes}
    return leaky | {
        "ReLU": lambda x: np.maximum(x, 0),
        "GELU (erf)": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
        "GELU (tanh)": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "GELU (sigmoid)": lambda x: x * sigmoid(1.702 * x),
        "SiLU": lambda x: x * sigmoid(x),
        "the sigmoid": sigmoid,
        "tanh": np.tanh,
        "softplus": lambda x: np.logaddexp(x, 0),
        "ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
        "the square of ReLU": lambda x: np.maximum(x, 0) ** 2,
    }


def _leaky(slope: float, x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, slope * x)


def activation(ours: Start, theirs: Start) -> str | None:
    """Each side applies a known function to the same value, and not the same function."""
    for i, _ in shared(ours, theirs):
        x = ours.values.array(i)
        if x is None or x.dtype.kind != "f" or not 8 <= x.size <= 1 << 20:
            continue
        x = finite(x)
        numbers = {x for side in (ours, theirs) for k in side.near for x in side.values.rows[k].literals}
        known_functions = _known_functions(sorted(slope for slope in {0.01, *numbers} if 1e-6 < slope < 1))
        with np.errstate(all="ignore"):
            applied = {name: fingerprint(f(x), depends_on_data=True)[0] for name, f in known_functions.items()}
        known = []
        for side in (ours, theirs):
            index = side.values.index(side.near)
            known.append([(k, name) for name, f in applied.items() if f is not None for k in index.equals(f)])
        for (k, mine), (m, their) in product(*known):
            # A step within a larger function may be a known one, too: the sigmoid within SiLU.
            if mine != their and meet_the_same(ours.values, k, theirs.values, m):
                return f"another activation: {mine} in ours, {their} in theirs"
    return None


def meet_the_same(ours: Values, i: int, theirs: Values, j: int) -> bool:
    """Whether both values are multiplied with or added to the same next, or both are what is returned."""
    here, there = _met(ours, i), _met(theirs, j)
    if not here or not there:
        return not here and not there
    same = ours.equals(here)
    return bool(same & there or {theirs.leaf(m) for m in same} & {theirs.leaf(m) for m in there} - {None})


def _met(values: Values, number: int) -> set[int]:
    """What the first operations that read a value read besides; nothing where it is returned."""
    found = set()
    for k in values.used(number):
        if not values.rows[k].backward:
            others = [i for i in values.rows[k].inputs if values.copied(i) != values.copied(number)]
            found |= {i for i in others if values.rows[i].data} if others else {k}
    return found
