"""What is differentiated where a pair has no loss of its own: one fixed random projection of all outputs.

It imports neither framework, so that either side can be run where the other is not installed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from parity.gates.measure import ParityError, as_array
from parity.gates.pytrees import Tensors, is_floating, is_key

RECIPE = "numpy.random.default_rng([len(name), *name.encode()]).standard_normal(shape), rounded to float32"


def projection(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The same numbers for the same name and shape, whatever the framework: RECIPE, `[*shape]` in float32."""
    return np.random.default_rng([len(name), *name.encode()]).standard_normal(shape).astype(np.float32)


def projected(
    output: Any,
    side: str,
    kind: type,
    left_out: set[str],
    known: Mapping[str, Any],
    like: Callable[[Any, Any], Any],
) -> tuple[Any, dict[str, Any]]:
    """(the projection of all floating outputs, the outputs by name); raises what `named_outputs` raises.

    `known` are projections by the outputs' names, which are taken where they fit; `like(numbers, output)` has their
    numbers as an array of the output's framework and type.
    """
    outputs = named_outputs(output, side, kind, left_out)
    terms = []
    for name, value in floating(outputs).items():
        shape, recorded = tuple(value.shape), known.get(name)
        fits = recorded is not None and recorded.shape == shape
        terms.append((value * like(recorded if fits else projection(name, shape), value)).sum())
    return sum(terms[1:], terms[0]), outputs


def named_outputs(output: Any, side: str, kind: type, left_out: set[str]) -> dict[str, Any]:
    """What `side` returned, by path and in its order: "0" and "1.h" of `(y, {"h": h})`, "output" of an array alone.

    Dicts, sequences and dataclasses are gone into, and None is nothing. The names of what is no `kind` of array, and of
    random keys, go to `left_out`. Raises ParityError for two outputs by one name, for an empty one, and where none is
    a floating-point array.
    """
    named = [(path or "output", leaf) for path, leaf in _leaves(output, "") if leaf is not None]
    outputs: dict[str, Any] = {name: leaf for name, leaf in named if isinstance(leaf, kind) and not is_key(leaf)}
    if len({name for name, _ in named}) < len(named):
        raise ParityError(f"{side} returned two outputs by one name: {[name for name, _ in named]}")
    if not floating(outputs):
        raise ParityError(f"{side} returned no floating-point array; expected one, or a dict or a sequence of them")
    left_out |= {name for name, _ in named} - outputs.keys()
    if empty := [name for name, array in outputs.items() if 0 in array.shape]:
        raise ParityError(f"{side} returned an empty {empty[0]}; there is nothing to compare")
    return outputs


def _leaves(node: Any, path: str, whole: Callable[[Any], bool] = lambda node: False) -> Iterator[tuple[str, Any]]:
    """What dicts, sequences and dataclasses hold, by path; those that are a `whole` are not gone into."""
    children = None if whole(node) else _children(node)
    if children is None:
        yield path, node
        return
    for key, child in children:
        yield from _leaves(child, f"{path}.{key}" if path else str(key), whole)


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a dict, a sequence or a dataclass holds, by key, place or name; None for anything else."""
    if isinstance(node, Mapping):
        return node.items()
    if isinstance(node, tuple | list):
        return enumerate(node)
    if is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in fields(node)]
    return None


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
    """The arguments of a side, in their order or by name: the door that every tool takes them in by."""

    arrays: Tensors
    """By dotted path: those in order are called "0", "1", ..., what a dict at "1" holds "1.mask"."""
    by_name: bool
    given: Mapping[str, Any]
    """The arguments as they were given."""

    @classmethod
    def read(cls, inputs: Sequence[Any] | Mapping[str, Any]) -> "Inputs":
        """From a list of arguments, or from a dict for keyword arguments.

        Arrays are those of any framework, and lists of numbers; tuples, lists, dicts and dataclasses may hold them.
        None, strings, numbers of Python, functions and random keys are handed to both sides as they are. Raises
        TypeError for one bare array, and ParityError for anything else.
        """
        if not isinstance(inputs, Sequence | Mapping) or isinstance(inputs, str):
            raise TypeError(f"inputs is a {type(inputs).__name__}; expected a list of the arguments: [x]")
        given = {str(key): argument for key, argument in _children(inputs) or enumerate(inputs)}
        arrays = Tensors()
        for name, leaf in _leaves(given, "", _is_whole):
            if not _is_handed_over(leaf):
                _put_array(arrays, name, leaf)
        return cls(arrays, isinstance(inputs, Mapping), given)

    def rounded(self, held_by: str, dtype: str) -> "Inputs":
        """What `held_by` can hold of floating inputs, as arrays of `dtype`."""
        return replace(self, arrays=rounded(self.arrays, held_by, dtype))

    def call(self, function: Any, *before: Any, arrays: Mapping[str, Any]) -> Any:
        """Calls with `arrays`, by name, in the places of these; `before` comes first."""
        given = {name: _filled(argument, name, arrays) for name, argument in self.given.items()}
        return function(*before, **given) if self.by_name else function(*before, *given.values())


def _put_array(arrays: Tensors, name: str, given: Any) -> None:
    try:
        array = np.asarray(given) if "complex" in str(getattr(given, "dtype", "")) else as_array(given)
    except (TypeError, ValueError):
        array = np.empty(0, object)
    if not (array.dtype.kind in "iubc" or is_floating(array)) or name in arrays:
        raise ParityError(
            f"input {name} is {type(given).__name__}; expected an array of numbers, None, a string, a number, a "
            "function or a random key; or a tuple, a list, a dict or a dataclass of these"
        )
    arrays[name] = array


def _filled(given: Any, name: str, arrays: Mapping[str, Any]) -> Any:
    """An argument with these arrays in their places."""
    if name in arrays:
        return arrays[name]
    children = None if _is_whole(given) else _children(given)
    if children is None:
        return given
    return _like(given, {key: _filled(child, f"{name}.{key}", arrays) for key, child in children})


def _like(given: Any, parts: dict[Any, Any]) -> Any:
    """A dict, a sequence or a dataclass of the type of `given`, with these parts."""
    kind: Any = type(given)
    if isinstance(given, Mapping):
        return kind(parts)
    if isinstance(given, list) or kind is tuple:
        return kind(parts.values())
    return kind(**parts) if is_dataclass(given) else kind(*parts.values())


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, np.generic)


def _is_table(given: Any) -> bool:
    """Whether these are numbers in lists, which stand for an array."""
    return isinstance(given, list) and all(_is_number(each) or _is_table(each) for each in given)


def _is_handed_over(given: Any) -> bool:
    """Whether both sides are given this as it is."""
    return _is_number(given) or isinstance(given, str | bytes | Enum | None) or callable(given) or is_key(given)


def _is_whole(given: Any) -> bool:
    """Whether nothing within this is an argument by itself."""
    return _is_handed_over(given) or _is_table(given)


@dataclass(frozen=True)
class Values:
    """What one side computed, as NumPy arrays of the type that it was computed in."""

    outputs: Tensors
    gradients: Tensors
    """Of the loss, by the side's own names."""
    loss: Any = 0.0
    """The projection, unless the pair has its own."""

    def converted(self, weights: Tensors, back: Callable[[Tensors], Tensors]) -> "Values":
        """With gradients as `back` converts them; of a side whose `weights` without a gradient have one of zero."""
        zero = np.zeros((), next(iter(self.gradients.values())).dtype)
        blank = {name: np.broadcast_to(zero, array.shape) for name, array in weights.items()}
        return replace(self, gradients=back(blank | self.gradients))

    def named(self) -> Tensors:
        """Outputs and gradients, by names that tell them apart."""
        outputs = {f"output {name}": array for name, array in self.outputs.items()}
        return outputs | {f"gradient {name}": array for name, array in self.gradients.items()}

    def floating(self) -> Tensors:
        """Those that are floating-point."""
        return floating(self.named())


def floating(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are floating-point."""
    return {name: array for name, array in tensors.items() if is_floating(array)}


def double(array: np.ndarray) -> np.ndarray:
    """In float64 what is floating, as it is what is not."""
    return array.astype(np.float64, copy=False) if is_floating(array) else array


def rounded(arrays: Tensors, held_by: str, dtype: str) -> Tensors:
    """Floating arrays rounded to what `held_by` holds, as `dtype`; others as they are."""
    narrow, wide = (np.dtype(bfloat16 if name == "bfloat16" else name) for name in (held_by, dtype))
    return {
        name: array.astype(narrow, copy=False).astype(wide, copy=False) if is_floating(array) else array
        for name, array in arrays.items()
    }


def varied(weights: Tensors, seed: int) -> Tensors:
    """Weights a few percent away from these, in float64, other ones for every seed; as they are for seed 0."""
    if not seed:
        return weights
    rng = np.random.default_rng(seed)
    return {
        name: array.astype(np.float64) * (1 + 0.05 * rng.standard_normal(array.shape)) if is_floating(array) else array
        for name, array in weights.items()
    }
