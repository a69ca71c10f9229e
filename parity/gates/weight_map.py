"""Which numbers of the module our parameters hold, and how one is made of the other, bit for bit, both ways."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import einops
import numpy as np

from parity.gates.layout import Cut, Layout
from parity.gates.measure import ParityError
from parity.gates.pytrees import Tensors, is_array, is_floating, is_promised, nested, paths, replaced

__all__ = ["LEFT_OUT", "Weight", "WeightMap", "Weights", "nested", "paths"]

LEFT_OUT = "(left out)"
"""In the place of one of our paths: a list of what nothing of ours holds, and nothing compares. `{LEFT_OUT:
["pooler.dense.weight", "pooler.dense.bias"]}`; a `Weight` with a part for some rows of a tensor alone."""

WORD = re.compile(r"[A-Za-z]\w*")
Part = Mapping[str, Cut]


@dataclass(frozen=True)
class Weight:
    """Which numbers of the module one of our parameters holds.

    GPT-2's fused `c_attn`, whose layers we stack: `{"query.kernel": Weight("h.{layer}.attn.c_attn.weight",
    "i (part h c) -> part i h c", {"part": 3, "h": 12}, {"part": 0}), ...}`, and parts 1 and 2 for key and value.
    """

    name: str
    """The module's parameter or buffer; "{layer}" in it counts the layers that are stacked on our first axis, and
    another word, as in "layers.{layer}.experts.{expert}.up", those on the next."""
    axes: str = "... -> ..."
    """Einops pattern from the module's axes to ours; of one layer, where layers are stacked."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of axes that the pattern splits."""
    part: Part = field(default_factory=dict)
    """Axis of the pattern's right side -> index (the axis is dropped) or (start, stop). The rest of a fused matrix
    belongs to other rows; together they must cover it exactly once."""
    into: Part = field(default_factory=dict)
    """Where ours is fused of several: axis of ours -> index (the left side lacks it) or (start, stop) that this holds.
    `{"qkv": [Weight("q", "(h c) i -> i (h n c)", {"h": 4}, into={"n": 0}), ...]}`."""


WeightMap = Mapping[str, str | tuple[str, str] | Weight | list[str] | list[Weight] | list[str | Weight] | None]
"""Dotted path in our parameters -> the module's tensor: its name, (its name, einops pattern from its axes to ours) or
a `Weight`: `{"up.kernel": ("up.weight", "o i -> i o"), "up.bias": "up.bias"}`; of what ours fuses, a list of Weights,
each with what it goes `into`. None keeps what `like` has there. Another list has LEFT_OUT alone."""


class Weights:
    """A weight mapping that was checked against the module's tensors: converts them into our parameters, and back."""

    def __init__(
        self,
        weights: WeightMap,
        tensors: Tensors,
        *,
        like: Any = None,
        optional: Collection[str] = (),
    ) -> None:
        """`tensors` are the module's parameters and buffers by name; only shapes are read.

        `like` is a pytree of our parameters, whose floating arrays the mapping must name all (None for those that stay
        as they are); whole numbers and keys may be named. Without it ours are nested dicts. `optional` names tensors
        that nothing of ours need hold: buffers. Raises ParityError, with both lists, for a mapping that does not fit:
        names, patterns, parts, shapes; and TypeError for one that is no dict.
        """
        if not isinstance(weights, Mapping):
            kind = type(weights).__name__
            raise TypeError(
                f"weights is a {kind}; expected a dict: our path -> the module's name, as match_weights(...).weights is"
            )
        self.like = like
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        left = _read_left_out(weights.get(LEFT_OUT, []))
        rows = {path: _read_row(path, row) for path, row in weights.items() if row is not None and path != LEFT_OUT}
        _require_names([*chain(*rows.values()), *left], shapes, optional)
        self._rows = {path: Row(path, row, shapes) for path, row in rows.items()}
        self._left = [_Piece(LEFT_OUT, weight, shapes, {}) for weight in left]
        self.left_out = {name for piece in self._left if not piece.weight.part for name in piece.names}
        """Tensors of the module that nothing of ours holds, deliberately."""
        self._require_whole_tensors(shapes)
        self.shapes = {path: row.shape for path, row in self._rows.items()}
        """Of our parameters, by path."""
        self.ours_to_theirs = {
            path: [*zip(*(piece.names for piece in row.pieces), strict=True)] for path, row in self._rows.items()
        }
        """The names of the module's tensors that each layer of our parameters holds (parts of)."""
        self._require_paths([path for path, row in weights.items() if row is None and path != LEFT_OUT])

    def flat(self, tensors: Tensors, convert: Callable[[np.ndarray], Any] = np.array) -> dict[str, Any]:
        """Our parameters by dotted path, made of the module's tensors, in their types.

        `convert` is applied to each before the next is made. By default it copies: what one tensor holds alone may be
        a view of it, so that a large model need not lie in memory twice.
        """
        return {path: convert(row.ours(tensors)) for path, row in self._rows.items()}

    def tree(self, flat: Mapping[str, Any]) -> Any:
        """Our parameters as `ours` takes them: nested dicts, or `like` with these leaves."""
        return nested(flat) if self.like is None else replaced(self.like, flat)

    def into(self, tensors: Tensors) -> Any:
        """Our parameters, made of the module's tensors, which have the shapes of the mapping, in their types."""
        return self.tree(self.flat(tensors))

    def back(self, params: Any) -> Tensors:
        """The module's tensors by name, made of our parameters (or of their gradients) in any pytree.

        Raises ParityError for paths that are missing and for other shapes.
        """
        return self.tensors(paths(params))

    def tensors(self, ours: Mapping[str, Any]) -> Tensors:
        """The same of our parameters by dotted path."""
        if missing := sorted(self._rows.keys() - ours.keys()):
            raise ParityError(f"our parameters lack {missing}, which the weight mapping names; they have {list(ours)}")
        tensors: Tensors = {}
        for path, row in self._rows.items():
            row.write(np.asarray(ours[path]), tensors)
        return tensors

    def held(self, tensors: Tensors) -> Tensors:
        """What of the module's tensors, or of their gradients, is compared: numbers that are left out are zero."""
        found = {name: array for name, array in tensors.items() if name not in self.left_out}
        for piece in self._left:
            for name in piece.names if piece.weight.part else ():
                if name in found:
                    found[name] = np.array(found[name], order="C")
                    piece.layout.seen(found[name])[...] = 0
        return found

    def _require_whole_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Of tensors that are held in parts, every number belongs to one row."""
        parts: dict[str, list[_Piece]] = {}
        for piece in (*(piece for row in self._rows.values() for piece in row.pieces), *self._left):
            for name in piece.names if piece.weight.part else ():
                parts.setdefault(name, []).append(piece)
        seen = []
        for name, pieces in parts.items():
            if pieces in seen:
                continue  # another layer of the same
            seen.append(pieces)
            times = np.zeros(shapes[name], np.uint8)
            for piece in pieces:
                piece.layout.seen(times)[...] += 1
            _require_once(name, times, [piece.path for piece in pieces])

    def _require_paths(self, kept: list[str]) -> None:
        """That there is a place for each of our parameters, of its shape."""
        if self.like is None:
            for path in self._rows:
                parents = {path[:end] for end, letter in enumerate(path) if letter == "."}
                if both := sorted(parents & self._rows.keys()):
                    raise ParityError(f"the weight mapping makes {both[0]} an array, and has {path} within it")
            if kept:
                raise ParityError(f"the weight mapping keeps {kept} as they are, and there is no `like` that has them")
            return
        leaves = paths(self.like)
        named = {*self._rows, *kept}
        # What is no number yet has nothing to stay as.
        needed = {path for path, leaf in leaves.items() if is_floating(leaf) or is_promised(leaf)}
        absent, missing = sorted(named - leaves.keys()), sorted(needed - named)
        if absent or missing:
            raise ParityError(
                f"the weight mapping does not fit our parameters: it names {absent}, which they lack, and misses "
                f"{missing}; map what is missing to a tensor of the module, or to None if it stays as it is"
            )
        for path, shape in self.shapes.items():
            if not is_array(leaves[path]) or tuple(leaves[path].shape) != shape:
                found = list(leaves[path].shape) if is_array(leaves[path]) else type(leaves[path]).__name__
                first = self._rows[path].pieces[0]
                raise ParityError(
                    f"{path} is {found} in our parameters, and the weight mapping makes {list(shape)} of "
                    f"{first.weight.name}, of shape {list(first.theirs)}, by {first.weight.axes!r}"
                )


def _require_once(name: str, times: np.ndarray, held_by: list[str]) -> None:
    if (times != 1).any():
        raise ParityError(
            f"the parts of {name}, of shape {list(times.shape)}, do not make it up: {held_by} leave out "
            f"{(times == 0).sum()} of its {times.size} numbers, and hold {(times > 1).sum()} more than once"
        )


class Row:
    """One of our parameters, and the module's tensors of which it is made: one, or one of each layer, or several."""

    def __init__(self, path: str, weights: Sequence[Weight], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        stops: dict[str, int] = {}
        for axis, cut in (each for weight in weights for each in weight.into.items()):
            stops[axis] = max(stops.get(axis, 0), _ends(cut)[1])
        self.pieces = [_Piece(path, weight, shapes, stops) for weight in weights]
        self.names = tuple(name for piece in self.pieces for name in piece.names)
        self.shape = self.pieces[0].shape
        if other := [piece for piece in self.pieces if piece.shape != self.shape]:
            raise ParityError(
                f"{path} is to be made of {self.pieces[0].weight.name} and {other[0].weight.name}, which would be "
                f"{list(self.shape)} and {list(other[0].shape)}; expected one shape"
            )
        if len(weights) > 1 or stops:
            times = np.zeros(self.shape, np.uint8)
            for _, _, place in self._places(times):
                place[...] += 1
            _require_once(path, times, [piece.weight.name for piece in self.pieces])

    def _places(self, ours: np.ndarray) -> Iterator[tuple["_Piece", str, np.ndarray]]:
        """Each tensor, and the view of our parameter that holds its numbers."""
        for piece in self.pieces:
            layers = ours.reshape(-1, *piece.layout.shape)
            for layer, name in enumerate(piece.names):
                yield piece, name, piece.layout.place(layers[layer, ...])

    def ours(self, tensors: Tensors) -> np.ndarray:
        """Our parameter: a view where one tensor holds it alone, as far as its axes allow."""
        if len(self.names) == 1:
            return self.pieces[0].layout.seen(np.asarray(tensors[self.names[0]])).reshape(self.shape)
        made = np.empty(self.shape, np.result_type(*(tensors[name] for name in self.names)))
        for piece, name, place in self._places(made):
            place[...] = piece.layout.seen(np.asarray(tensors[name]))
        return made

    def write(self, ours: np.ndarray, tensors: Tensors) -> None:
        """Puts the numbers of our parameter into the module's tensors, of which other rows may have written parts."""
        if ours.shape != self.shape:
            raise ParityError(f"{self.path} is {list(ours.shape)}; the weight mapping makes {list(self.shape)} there")
        for piece, name, place in self._places(ours):
            piece.layout.seen(tensors.setdefault(name, np.zeros(piece.theirs, ours.dtype)))[...] = place


class _Piece:
    """One of the module's tensors, or one of each layer, and where its numbers lie in one of our parameters."""

    def __init__(
        self, path: str, weight: Weight, shapes: Mapping[str, tuple[int, ...]], stops: Mapping[str, int]
    ) -> None:
        layers = _numbered(weight.name, shapes)
        self.path, self.weight, self.names = path, weight, tuple(layers.values())
        counts = tuple(len(set(numbers)) for numbers in zip(*layers, strict=True))
        if math.prod(counts) != len(layers):
            raise ParityError(
                f"{path} is to stack {weight.name}, which are {len(layers)} tensors; expected {list(counts)} of them"
            )
        self.theirs = shapes[self.names[0]]
        if other := [name for name in self.names if shapes[name] != self.theirs]:
            raise ParityError(
                f"{path} is to stack {weight.name}, whose layers differ in shape: {self.names[0]} is "
                f"{list(self.theirs)}, {other[0]} is {list(shapes[other[0]])}"
            )
        left, right, sizes = self._read_pattern()
        for cuts in (weight.part, weight.into):
            self._require(cuts, WORD.findall(right), sizes)
        index = {axis for axis, cut in weight.part.items() if isinstance(cut, int)}
        # What is taken of theirs by index has no axis in ours.
        ours = tuple(tuple(atom for atom in g if atom not in index) for g in _atoms(right) if not g or {*g} - index)
        sizes |= {axis: stops[axis] for axis in weight.into}
        self.layout = Layout(sizes, _atoms(left), ours, tuple(weight.part.items()), tuple(weight.into.items()))
        self.shape = (*counts, *self.layout.shape)

    def _read_pattern(self) -> tuple[str, str, dict[str, int]]:
        """Both sides of the pattern, with a name for each axis that "..." stands for, and the sizes of the left."""
        weight, blank = self.weight, np.empty(self.theirs, bool)
        try:
            if weight.axes.count(" -> ") != 1:
                raise ValueError("' -> ' stands between its sides")
            left, right = weight.axes.split(" -> ")
            rest = " ".join(f"rest{number}" for number in range(blank.ndim - len(_atoms(left)) + 1))
            left, right = left.replace("...", rest), right.replace("...", rest)
            axes = WORD.findall(left)
            parts = einops.rearrange(blank, f"{left} -> {' '.join(axes)}", **weight.sizes)
            # Where ours is fused, it has axes that theirs lacks.
            shared = WORD.sub(lambda word: "" if word[0] in {*weight.into} - {*axes} else word[0], right)
            einops.rearrange(blank, f"{left} -> {shared}", **weight.sizes)
        except (ValueError, TypeError, RuntimeError, einops.EinopsError) as error:
            sizes = f" with {dict(weight.sizes)}" if weight.sizes else ""
            raise ParityError(
                f"the weight mapping does not fit: {self.path} is to be {weight.name}, of shape {list(self.theirs)}, "
                f"by {weight.axes!r}{sizes}; expected a pattern like 'o i -> i o' that can be undone "
                f"({str(error).strip().splitlines()[-1].strip()})"
            ) from error
        return left, right, dict(zip(axes, parts.shape, strict=True))

    def _require(self, cuts: Part, axes: list[str], sizes: Mapping[str, int]) -> None:
        """That what is cut are axes of the right side, as large as these; all of theirs goes into ours."""
        if unknown := sorted(cuts.keys() - {*axes}):
            raise ParityError(f"{self.path} is to be a part by {unknown}; {self.weight.axes!r} gives the axes {axes}")
        for axis, cut in cuts.items():
            (start, stop), size = _ends(cut), sizes.get(axis, 1)
            if start < 0 or not (stop - start == size if cuts is self.weight.into else start < stop <= size):
                raise ParityError(
                    f"{self.path} is to be the part {cut} of {axis!r}, which is of size {size} in {self.weight.name}"
                )


def _ends(cut: Cut) -> tuple[int, int]:
    return (cut, cut + 1) if isinstance(cut, int) else cut


def _atoms(side: str) -> tuple[tuple[str, ...], ...]:
    """The axes of one side of a pattern, each with what is merged in it."""
    return tuple(tuple(WORD.findall(axis)) for axis in re.findall(r"\([^)]*\)|\S+", side))


def _read_row(path: str, row: Any) -> list[Weight]:
    """What a row of a map says."""
    found = []
    for said in row if isinstance(row, list) and row else [row]:
        given = (said,) if isinstance(said, str) else said
        if isinstance(given, tuple) and len(given) < 3 and all(isinstance(each, str) for each in given):
            given = Weight(*given)
        if not isinstance(given, Weight):
            raise ParityError(
                f"the weight mapping says {row!r} for {path}; expected a name, (name, pattern), a Weight, or None to "
                "keep it"
            )
        found.append(given)
    return found


def _read_left_out(given: Any) -> list[Weight]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(isinstance(x, str | Weight) for x in given):
        raise ParityError(f"the weight mapping says {given!r} for LEFT_OUT; expected a list of names of the module")
    return [Weight(each) if isinstance(each, str) else each for each in given]


def _numbered(name: str, tensors: Collection[str]) -> dict[tuple[int, ...], str]:
    """The tensors that a name stands for, by the numbers in the places of its words in braces."""
    if "{" not in name:
        return {(): name} if name in tensors else {}
    pattern, seen = "", {""}
    for text, word in re.findall(r"([^{]*)(?:{(\w+)})?", name):
        pattern += re.escape(text) + (f"(?P={word})" * bool(word) if word in seen else rf"(?P<{word}>\d+)")
        seen.add(word)
    matches = filter(None, map(re.compile(pattern).fullmatch, tensors))
    return dict(sorted((tuple(map(int, match.groups())), match.string) for match in matches))


def _require_names(weights: Sequence[Weight], tensors: Collection[str], optional: Collection[str]) -> None:
    held = {weight.name: [*_numbered(weight.name, tensors).values()] for weight in weights}
    whole = [name for weight in weights if not weight.part for name in held[weight.name]]
    parts = {name for weight in weights if weight.part for name in held[weight.name]}
    absent = sorted(name for name, names in held.items() if not names)
    missing = sorted({*tensors} - {*whole} - parts - {*optional})
    # Two rows may claim a tensor if each takes a part of it.
    doubled = sorted(name for name, times in (Counter(whole) + Counter(parts)).items() if times > 1)
    if absent or missing or doubled:
        raise ParityError(
            f"the weight mapping does not fit the module: it names {absent}, which the module lacks, "
            f"{doubled} more than once, and misses {missing}"
        )
