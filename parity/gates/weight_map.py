"""Which numbers of the module our parameters hold, and how one is made of the other, bit for bit, both ways."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import einops
import numpy as np

from parity.gates.layout import Cut, Layout
from parity.gates.measure import ParityError
from parity.gates.pytrees import is_array, is_floating, is_promised, nested, paths, replaced

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
        tensors: Mapping[str, np.ndarray],
        *,
        like: Any = None,
        optional: Collection[str] = (),
    ) -> None:
        """`tensors` are the module's parameters and buffers by name; only shapes are read.

        `like` is a pytree of our parameters, whose floating arrays the mapping must name all (None for those that stay
        as they are); whole numbers and keys may be named. Without it ours are nested dicts. `optional` names tensors
        that nothing of ours need hold: buffers. Raises ParityError, with both lists, for a mapping that does not fit:
        names, patterns, parts, shapes.
        """
        self.like = like
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        left = _left_out(weights.get(LEFT_OUT, []))
        rows = {path: read_row(path, row) for path, row in weights.items() if row is not None and path != LEFT_OUT}
        _require_names(rows | left, shapes, optional)
        self._rows = {path: Row(path, row, shapes) for path, row in rows.items()}
        self._left = [piece for path, row in left.items() for piece in Row(path, row, shapes).pieces]
        self.left_out = {name for piece in self._left if not piece.weight.part for name in piece.names}
        """Tensors of the module that nothing of ours holds, deliberately."""
        self._require_whole_tensors(shapes)
        self.shapes = {path: row.shape for path, row in self._rows.items()}
        """Of our parameters, by path."""
        self.ours_to_theirs = {path: row.names for path, row in self._rows.items()}
        """The names of the module's tensors that each of our parameters holds (parts of), layer by layer."""
        self._require_paths([path for path, row in weights.items() if row is None and path != LEFT_OUT])

    def flat(
        self, tensors: Mapping[str, np.ndarray], convert: Callable[[np.ndarray], Any] = lambda array: array
    ) -> dict[str, Any]:
        """Our parameters by dotted path, made of the module's tensors, in their types.

        `convert` is applied to each before the next is made, so that a large model does not lie in memory twice.
        """
        self._require_tensors(tensors)
        return {path: convert(row.ours(tensors)) for path, row in self._rows.items()}

    def tree(self, flat: Mapping[str, Any]) -> Any:
        """Our parameters as `ours` takes them: nested dicts, or `like` with these leaves."""
        return nested(flat) if self.like is None else replaced(self.like, flat)

    def into(self, tensors: Mapping[str, np.ndarray]) -> Any:
        """Our parameters, made of the module's tensors, in their types.

        Raises ParityError for tensors that are missing or have another shape than those that the mapping was made for.
        """
        return self.tree(self.flat(tensors))

    def back(self, params: Any) -> dict[str, np.ndarray]:
        """The module's tensors by name, made of our parameters (or of their gradients) in any pytree.

        Raises ParityError for paths that are missing and for other shapes.
        """
        return self.tensors(paths(params))

    def tensors(self, ours: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The same of our parameters by dotted path."""
        if missing := sorted(self._rows.keys() - ours.keys()):
            raise ParityError(f"our parameters lack {missing}, which the weight mapping names; they have {list(ours)}")
        tensors: dict[str, np.ndarray] = {}
        for path, row in self._rows.items():
            row.write(np.asarray(ours[path]), tensors)
        return tensors

    def held(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What of the module's tensors, or of their gradients, is compared: numbers that are left out are zero."""
        found = {name: array for name, array in tensors.items() if name not in self.left_out}
        for piece in self._left:
            for name in piece.names if piece.weight.part else ():
                if name in found:
                    found[name] = np.array(found[name], order="C")
                    piece.layout.seen(found[name])[...] = 0
        return found

    def _require_tensors(self, tensors: Mapping[str, np.ndarray]) -> None:
        for piece in (piece for row in self._rows.values() for piece in row.pieces):
            if missing := [name for name in piece.names if name not in tensors]:
                raise ParityError(f"there are no tensors {missing}, which the weight mapping names: {sorted(tensors)}")
            for name in piece.names:
                if tuple(tensors[name].shape) != piece.theirs:
                    found = list(tensors[name].shape)
                    raise ParityError(f"{name} is {found}; the weight mapping was made for {list(piece.theirs)}")

    def _require_whole_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Of tensors that are held in parts, every number belongs to one row."""
        pieces_of: dict[str, list[_Piece]] = {}
        for piece in (*(piece for row in self._rows.values() for piece in row.pieces), *self._left):
            for name in piece.names if piece.weight.part else ():
                pieces_of.setdefault(name, []).append(piece)
        seen = set()
        for name, pieces in pieces_of.items():
            if (held_by := tuple(map(id, pieces))) in seen:
                continue  # another layer of the same
            seen.add(held_by)
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
        for axis, wanted in (each for weight in weights for each in weight.into.items()):
            stops[axis] = max(stops.get(axis, 0), _stop(wanted))
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

    def ours(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Our parameter."""
        made = np.empty(self.shape, np.result_type(*(tensors[name] for name in self.names)))
        for piece, name, place in self._places(made):
            place[...] = piece.layout.seen(np.asarray(tensors[name]))
        return made

    def write(self, ours: np.ndarray, tensors: dict[str, np.ndarray]) -> None:
        """Puts the numbers of our parameter into the module's tensors, of which other rows may have written parts."""
        if ours.shape != self.shape:
            raise ParityError(f"{self.path} is {list(ours.shape)}; the weight mapping makes {list(self.shape)} there")
        for piece, name, place in self._places(ours):
            piece.layout.seen(tensors.setdefault(name, np.zeros(piece.theirs, ours.dtype)))[...] = place


def _stop(cut: Cut) -> int:
    return cut + 1 if isinstance(cut, int) else cut[1]


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
        left, right = self._sides()
        sizes = self._undone(left, right)
        self._require(weight.part, right, {axis: (size, None) for axis, size in sizes.items()})
        self._require(weight.into, right, {axis: (stops[axis], sizes.get(axis, 1)) for axis in weight.into})
        index = {axis for axis, cut in weight.part.items() if isinstance(cut, int)}
        # What is taken of theirs by index has no axis in ours.
        ours = tuple(tuple(atom for atom in g if atom not in index) for g in _atoms(right) if not g or {*g} - index)
        sizes |= {axis: stops[axis] for axis in weight.into}
        self.layout = Layout(sizes, _atoms(left), ours, tuple(weight.part.items()), tuple(weight.into.items()))
        self.shape = (*counts, *self.layout.shape)

    def _sides(self) -> tuple[str, str]:
        """The left and the right side of the pattern, with a name for each axis that "..." stands for."""
        sides = self.weight.axes.split(" -> ")
        if len(sides) != 2:
            raise self._unfit("' -> ' stands between its sides")
        others = len(self.theirs) - (len(axes_of(sides[0])) - 1)
        rest = " ".join(f"rest{number}" for number in range(others))
        return sides[0].replace("...", rest), sides[1].replace("...", rest)

    def _undone(self, left: str, right: str) -> dict[str, int]:
        """The size of every axis of the left side, with which the pattern can be undone."""
        axes = re.findall(WORD, left)
        own = {*self.weight.into} - {*axes}
        shared = WORD.sub(lambda word: "" if word[0] in own else word[0], right)
        blank = np.empty(self.theirs, bool)
        try:
            parts = einops.rearrange(blank, f"{left} -> {' '.join(axes)}", **self.weight.sizes)
            einops.rearrange(blank, f"{left} -> {shared}", **self.weight.sizes)
        except (ValueError, TypeError, RuntimeError, einops.EinopsError) as error:
            raise self._unfit(str(error).strip().splitlines()[-1].strip()) from error
        return dict(zip(axes, parts.shape, strict=True))

    def _unfit(self, reason: str) -> ParityError:
        sizes = f" with {dict(self.weight.sizes)}" if self.weight.sizes else ""
        return ParityError(
            f"the weight mapping does not fit: {self.path} is to be {self.weight.name}, of shape {list(self.theirs)}, "
            f"by {self.weight.axes!r}{sizes}; expected a pattern like 'o i -> i o' that can be undone "
            f"({reason})"
        )

    def _require(self, part: Part, right: str, sizes: Mapping[str, tuple[int, int | None]]) -> None:
        """That each axis of a part is on the right side, and as large; `sizes`: in all, and what lies there."""
        axes = WORD.findall(right)
        if unknown := sorted(part.keys() - set(axes)):
            raise ParityError(f"{self.path} is to be a part by {unknown}; {self.weight.axes!r} gives the axes {axes}")
        for axis, cut in part.items():
            start, (size, held) = cut if isinstance(cut, int) else cut[0], sizes[axis]
            if not 0 <= start < _stop(cut) <= size or held not in (None, _stop(cut) - start):
                raise ParityError(
                    f"{self.path} is to be the part {cut} of {axis!r}, which is of size {held or size} in "
                    f"{self.weight.name}"
                )


def _atoms(side: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(WORD.findall(axis)) for axis in axes_of(side))


def axes_of(side: str) -> list[str]:
    """The axes of one side of a pattern; those in parentheses are one."""
    return re.findall(r"\([^)]*\)|\S+", side)


def read_row(path: str, row: Any) -> list[Weight]:
    """What a row of a map says."""
    if isinstance(row, list) and row and all(isinstance(each, Weight) for each in row):
        return row
    if isinstance(row, Weight):
        return [row]
    if isinstance(row, str):
        return [Weight(row)]
    if isinstance(row, tuple) and len(row) == 2 and all(isinstance(each, str) for each in row):
        return [Weight(*row)]
    raise ParityError(
        f"the weight mapping says {row!r} for {path}; expected a name, (name, pattern), a Weight, or None to keep it"
    )


def _left_out(given: Any) -> dict[str, list[Weight]]:
    """Rows of nothing of ours, by number."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(isinstance(x, str | Weight) for x in given):
        raise ParityError(f"the weight mapping says {given!r} for LEFT_OUT; expected a list of names of the module")
    return {f"{LEFT_OUT} {n}": read_row(LEFT_OUT, row) for n, row in enumerate(given)}


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


def layers_of(name: str, tensors: Collection[str]) -> tuple[str, ...]:
    """The tensors that a name stands for, in the order of their layers."""
    return tuple(_numbered(name, tensors).values())


def _require_names(rows: Mapping[str, Sequence[Weight]], tensors: Collection[str], optional: Collection[str]) -> None:
    claims: dict[str, list[Weight]] = {}
    absent = set()
    for weight in (weight for row in rows.values() for weight in row):
        names = layers_of(weight.name, tensors)
        absent |= set() if names else {weight.name}
        for name in names:
            claims.setdefault(name, []).append(weight)
    missing = sorted(set(tensors) - claims.keys() - set(optional))
    # Two rows may claim a tensor if each takes a part of it.
    doubled = sorted(name for name, held in claims.items() if len(held) > 1 and not all(row.part for row in held))
    if absent or missing or doubled:
        raise ParityError(
            f"the weight mapping does not fit the module: it names {sorted(absent)}, which the module lacks, "
            f"{doubled} more than once, and misses {missing}"
        )
