"""What is differentiated where a pair has no loss of its own: one fixed random projection of all outputs.

It imports neither framework, so that either side can be run where the other is not installed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from parity.measure import ParityError

Tensors = dict[str, np.ndarray]
"""By name."""
RECIPE = "numpy.random.default_rng([len(name), *name.encode()]).standard_normal(shape), rounded to float32"
NOTHING_FLOATS = "no output is a floating-point array, so that there is nothing to differentiate"


def projection(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The same numbers for the same name and shape, whatever the framework: RECIPE, `[*shape]` in float32."""
    return np.random.default_rng([len(name), *name.encode()]).standard_normal(shape).astype(np.float32)


def known_or_made(name: str, shape: tuple[int, ...], known: Mapping[str, Any]) -> Any:
    """The projection of an output: one that was recorded, if it fits, or a new one."""
    recorded = known.get(name)
    return projection(name, shape) if recorded is None or recorded.shape != shape else recorded


def named_outputs(output: Any, side: str, kind: type) -> dict[str, Any]:
    """What `side` returned, by name; raises ParityError for anything but one `kind` of array or a dict of them."""
    outputs = dict(output) if isinstance(output, Mapping) else {"output": output}
    if wrong := [name for name, value in outputs.items() if not isinstance(value, kind)]:
        found = ", ".join(f"{name}: {type(outputs[name]).__name__}" for name in wrong)
        raise ParityError(f"{side} returned {found}; expected an array, or a dict of arrays by name, on both sides")
    return outputs


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

    def floating(self) -> Tensors:
        """Outputs that are floating-point, and gradients."""
        outputs = {f"output {name}": array for name, array in self.outputs.items() if is_floating(array.dtype)}
        return outputs | {f"gradient {name}": array for name, array in self.gradients.items()}


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
