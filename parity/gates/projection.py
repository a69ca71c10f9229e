"""What is differentiated where a pair has no loss of its own: one fixed random projection of all outputs.

It imports neither framework, so that either side can be run where the other is not installed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from parity.gates.measure import ParityError

Tensors = dict[str, np.ndarray]
"""By name."""
RECIPE = "numpy.random.default_rng([len(name), *name.encode()]).standard_normal(shape), rounded to float32"


def projection(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The same numbers for the same name and shape, whatever the framework: RECIPE, `[*shape]` in float32."""
    return np.random.default_rng([len(name), *name.encode()]).standard_normal(shape).astype(np.float32)


def known_or_made(name: str, shape: tuple[int, ...], known: Mapping[str, Any]) -> Any:
    """The projection of an output: one that was recorded, if it fits, or a new one."""
    recorded = known.get(name)
    return projection(name, shape) if recorded is None or recorded.shape != shape else recorded


def named_outputs(output: Any, side: str, kind: type, left_out: set[str] | None = None) -> dict[str, Any]:
    """What `side` returned, by path and in its order: "0" and "1.h" of `(y, {"h": h})`, "output" of an array alone.

    Dicts, sequences and dataclasses are gone into, and None is nothing. All else must be a `kind` of array; where
    `left_out` is given, what is no floating-point one is not returned, and its name goes there. Raises ParityError for
    two outputs by one name, for an empty one, and where none is a floating-point array.
    """
    named = [(path or "output", leaf) for path, leaf in _leaves(output, "")]
    outputs = dict(named)
    if len(outputs) < len(named):
        raise ParityError(f"{side} returned two outputs by one name: {[name for name, _ in named]}")
    wrong = {name: type(leaf).__name__ for name, leaf in named if not isinstance(leaf, kind)}
    if wrong and left_out is None:
        found = ", ".join(f"{name}: {which}" for name, which in wrong.items())
        raise ParityError(f"{side} returned {found}; expected arrays alone, in dicts and sequences as you like")
    floating = {name: x for name, x in outputs.items() if name not in wrong and "float" in str(x.dtype)}
    if not floating:
        raise ParityError(f"{side} returned no floating-point array; expected one, or a dict or a sequence of them")
    if left_out is not None:
        left_out |= outputs.keys() - floating.keys()
        outputs = floating
    if empty := [name for name, array in outputs.items() if 0 in array.shape]:
        raise ParityError(f"{side} returned an empty {empty[0]}; there is nothing to compare")
    return outputs


def _leaves(output: Any, path: str) -> Iterator[tuple[str, Any]]:
    children: Any = None
    if isinstance(output, Mapping):
        children = output.items()
    elif isinstance(output, tuple | list):
        children = enumerate(output)
    elif is_dataclass(output):
        children = [(field.name, getattr(output, field.name)) for field in fields(output)]
    if children is not None:
        for key, child in children:
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    elif output is not None:
        yield path, output


def common_outputs(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], left_out: set[str]
) -> dict[str, tuple[str, str]]:
    """Name of what is compared -> (ours, theirs): what has one name on both sides, or the one output of one side.

    The names of the others are put into `left_out`. Raises ParityError, which shows the shapes, where nothing is left.
    """
    names = {key: (key, key) for key in theirs if key in ours}
    alike = [(a, b) for a in ours for b in theirs if tuple(ours[a].shape) == tuple(theirs[b].shape)]
    if not names and alike and min(len(ours), len(theirs)) == 1:
        names = {alike[0][len(ours) > 1]: alike[0]}
    if not names:
        shapes = [{key: list(value.shape) for key, value in side.items()} for side in (ours, theirs)]
        raise ParityError(f"no output has one name or one shape on both sides: ours {shapes[0]}, theirs {shapes[1]}")
    left_out |= (ours.keys() | theirs.keys()) - {name for pair in names.values() for name in pair}
    return names


@dataclass(frozen=True)
class Inputs:
    """The arguments of a side, in their order or by name."""

    arrays: Tensors
    """By name; those in order are called "0", "1", ..."""
    by_name: bool

    @classmethod
    def read(cls, inputs: Sequence[Any] | Mapping[str, Any]) -> "Inputs":
        """From a list of arrays, or from a dict for keyword arguments; raises TypeError for one bare array."""
        if isinstance(inputs, Mapping):
            return cls({name: np.asarray(array) for name, array in inputs.items()}, True)
        if hasattr(inputs, "shape"):
            raise TypeError("inputs is one array; expected a list of the arguments of the side: [x]")
        return cls({str(index): np.asarray(array) for index, array in enumerate(inputs)}, False)

    def rounded(self, held_by: str, dtype: str) -> "Inputs":
        """What `held_by` can hold of floating inputs, as arrays of `dtype`."""
        return Inputs(rounded(self.arrays, held_by, dtype), self.by_name)

    def call(self, function: Any, *before: Any, arrays: Mapping[str, Any]) -> Any:
        """Calls with `arrays` in the places of these; `before` comes first."""
        return function(*before, **arrays) if self.by_name else function(*before, *arrays.values())


@dataclass(frozen=True)
class Values:
    """What one side computed, as NumPy arrays of the type that it was computed in."""

    outputs: Tensors
    gradients: Tensors
    """Of the projection, by the side's own names."""

    def converted(self, weights: Tensors, back: Callable[[Tensors], Tensors]) -> "Values":
        """With gradients as `back` converts them; of a side whose `weights` without a gradient have one of zero."""
        zero = np.zeros((), next(iter(self.gradients.values())).dtype)
        blank = {name: np.broadcast_to(zero, array.shape) for name, array in weights.items()}
        return Values(self.outputs, back(blank | self.gradients))

    def named(self) -> Tensors:
        """Outputs and gradients, by names that tell them apart."""
        outputs = {f"output {name}": array for name, array in self.outputs.items()}
        return outputs | {f"gradient {name}": array for name, array in self.gradients.items()}

    def floating(self) -> Tensors:
        """Those that are floating-point."""
        return {name: array for name, array in self.named().items() if is_floating(array.dtype)}


def is_floating(dtype: np.dtype) -> bool:
    """Whether a type is floating-point; NumPy does not count bfloat16."""
    return np.issubdtype(dtype, np.floating) or dtype == bfloat16


def double(array: np.ndarray) -> np.ndarray:
    """In float64 what is floating, as it is what is not."""
    return array.astype(np.float64, copy=False) if array.dtype.kind in "fV" else array


def rounded(arrays: Mapping[str, np.ndarray], held_by: str, dtype: str) -> Tensors:
    """Floating arrays rounded to what `held_by` holds, as `dtype`; others as they are."""
    narrow, wide = (np.dtype(bfloat16 if name == "bfloat16" else name) for name in (held_by, dtype))
    return {
        name: array.astype(narrow, copy=False).astype(wide, copy=False) if is_floating(array.dtype) else array
        for name, array in arrays.items()
    }


def varied(weights: Tensors, seed: int) -> Tensors:
    """Weights a few percent away from these, in float64, other ones for every seed; as they are for seed 0."""
    if not seed:
        return weights
    rng = np.random.default_rng(seed)
    return {
        name: array.astype(np.float64) * (1 + 0.05 * rng.standard_normal(array.shape))
        if is_floating(array.dtype)
        else array
        for name, array in weights.items()
    }
