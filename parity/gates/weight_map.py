"""Which numbers of the module our parameters hold, and how one is made of the other, bit for bit, both ways."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import einops
import numpy as np

from parity.gates.measure import ParityError
from parity.gates.pytrees import is_array, is_floating, is_promised, nested, paths, replaced

__all__ = ["LEFT_OUT", "Weight", "WeightMap", "Weights", "nested", "paths"]

LEFT_OUT = "(left out)"
"""In the place of one of our paths: a list of what nothing of ours holds, and nothing compares. `{LEFT_OUT:
["pooler.dense.weight", "pooler.dense.bias"]}`; a `Weight` with a part for some rows of a tensor alone."""


@dataclass(frozen=True)
class Weight:
    """Which numbers of the module one of our parameters holds.

    GPT-2's fused `c_attn`, whose layers we stack: `{"query.kernel": Weight("h.{layer}.attn.c_attn.weight",
    "i (part h c) -> part i h c", {"part": 3, "h": 12}, {"part": 0}), ...}`, and parts 1 and 2 for key and value.
    """

    name: str
    """The module's parameter or buffer; "{layer}" in it counts the layers that are stacked on our first axis."""
    axes: str = "... -> ..."
    """Einops pattern from the module's axes to ours; of one layer, where layers are stacked."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of axes that the pattern splits."""
    part: Mapping[str, int | tuple[int, int]] = field(default_factory=dict)
    """Axis of the pattern's right side -> index (the axis is dropped) or (start, stop). The rest of a fused matrix
    belongs to other rows; together they must cover it exactly once."""


WeightMap = Mapping[str, str | tuple[str, str] | Weight | list[str] | list[str | Weight] | None]
"""Dotted path in our parameters -> the module's tensor: its name, (its name, einops pattern from its axes to ours) or
a `Weight`: `{"up.kernel": ("up.weight", "o i -> i o"), "up.bias": "up.bias"}`. None keeps what `like` has there.
Only LEFT_OUT has a list."""


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
        rows = {path: _as_weight(path, row) for path, row in weights.items() if row is not None and path != LEFT_OUT}
        layers = {path: layers_of(row.name, shapes) for path, row in (rows | left).items()}
        _require_names(rows | left, layers, shapes, optional)
        self._rows = {path: _Row(path, row, layers[path], shapes) for path, row in rows.items()}
        self._left = [_Row(path, row, layers[path], shapes) for path, row in left.items()]
        self.left_out = {name for row in self._left if not row.weight.part for name in row.names}
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
        ours = paths(params)
        if missing := sorted(self._rows.keys() - ours.keys()):
            raise ParityError(f"our parameters lack {missing}, which the weight mapping names; they have {list(ours)}")
        tensors: dict[str, np.ndarray] = {}
        for path, row in self._rows.items():
            row.write(np.asarray(ours[path]), tensors)
        return tensors

    def held(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What of the module's tensors, or of their gradients, is compared: numbers that are left out are zero."""
        found = {name: array for name, array in tensors.items() if name not in self.left_out}
        for row in self._left:
            for name in row.names if row.weight.part else ():
                if name in found:
                    found[name] = np.array(found[name])
                    found[name].reshape(-1)[row.places.ravel()] = 0
        return found

    def _require_tensors(self, tensors: Mapping[str, np.ndarray]) -> None:
        for row in self._rows.values():
            if missing := [name for name in row.names if name not in tensors]:
                raise ParityError(f"there are no tensors {missing}, which the weight mapping names: {sorted(tensors)}")
            for name in row.names:
                if tuple(tensors[name].shape) != row.theirs:
                    found = list(tensors[name].shape)
                    raise ParityError(f"{name} is {found}; the weight mapping was made for {list(row.theirs)}")

    def _require_whole_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Of tensors that are held in parts, every number belongs to one row."""
        rows_of: dict[str, list[_Row]] = {}
        for row in (*self._rows.values(), *self._left):
            for name in row.names if row.weight.part else ():
                rows_of.setdefault(name, []).append(row)
        seen = set()
        for name, rows in rows_of.items():
            if (held_by := tuple(row.path for row in rows)) in seen:
                continue  # another layer of the same
            seen.add(held_by)
            times = np.zeros(int(np.prod(shapes[name])), np.uint8)
            for row in rows:
                times[row.places.ravel()] += 1
            if (times != 1).any():
                raise ParityError(
                    f"the parts of {name}, of shape {list(shapes[name])}, do not make it up: {list(held_by)} leave out "
                    f"{(times == 0).sum()} of its {times.size} numbers, and hold {(times > 1).sum()} more than once"
                )

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
                row = self._rows[path]
                raise ParityError(
                    f"{path} is {found} in our parameters, and the weight mapping makes {list(shape)} of "
                    f"{row.weight.name}, of shape {list(row.theirs)}, by {row.weight.axes!r}"
                )


class _Row:
    """One of our parameters, and the module's tensors of which it is made: one, or one of each layer."""

    def __init__(
        self, path: str, weight: Weight, layers: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.path, self.weight, self.names = path, weight, layers
        self.stacked = "{layer}" in weight.name
        self.theirs = shapes[layers[0]]
        if other := [name for name in layers if shapes[name] != self.theirs]:
            raise ParityError(
                f"{path} is to stack {weight.name}, whose layers differ in shape: {layers[0]} is {list(self.theirs)}, "
                f"{other[0]} is {list(shapes[other[0]])}"
            )
        self._left, self._right = self._sides()
        self._sizes, whole = self._undone()
        self._chosen = self._selection(whole)
        one = np.empty(whole, bool)[self._chosen].shape
        self.shape = (len(layers), *one) if self.stacked else one

    def ours(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Our parameter."""
        each = [self._one(np.asarray(tensors[name])) for name in self.names]
        return np.stack(each) if self.stacked else each[0]

    def write(self, ours: np.ndarray, tensors: dict[str, np.ndarray]) -> None:
        """Puts the numbers of our parameter into the module's tensors, of which other rows may have written parts."""
        if ours.shape != self.shape:
            raise ParityError(f"{self.path} is {list(ours.shape)}; the weight mapping makes {list(self.shape)} there")
        each = zip(self.names, ours if self.stacked else [ours], strict=True)
        if not self.weight.part:
            for name, array in each:
                tensors[name] = einops.rearrange(np.asarray(array), f"{self._right} -> {self._left}", **self._sizes)
            return
        places = self.places.ravel()
        for name, array in each:
            tensors.setdefault(name, np.zeros(self.theirs, array.dtype)).reshape(-1)[places] = array.ravel()

    @property
    def places(self) -> np.ndarray:
        """Where in the module's tensor, laid out flat, each number of (one layer of) ours comes from."""
        size = int(np.prod(self.theirs))
        return self._one(np.arange(size, dtype=np.int32 if size < 2**31 else np.int64).reshape(self.theirs))

    def _one(self, tensor: np.ndarray) -> np.ndarray:
        moved: np.ndarray = einops.rearrange(tensor, f"{self._left} -> {self._right}", **self.weight.sizes)
        chosen: np.ndarray = moved[self._chosen]
        return chosen

    def _sides(self) -> tuple[str, str]:
        """The left and the right side of the pattern, with a name for each axis that "..." stands for."""
        sides = self.weight.axes.split(" -> ")
        if len(sides) != 2:
            raise self._unfit("' -> ' stands between its sides")
        others = len(self.theirs) - (len(axes_of(sides[0])) - 1)
        rest = " ".join(f"rest{number}" for number in range(others))
        return sides[0].replace("...", rest), sides[1].replace("...", rest)

    def _undone(self) -> tuple[dict[str, int], tuple[int, ...]]:
        """The size of every axis that the pattern names, with which it can be undone; the shape of its right side."""
        axes = re.findall(r"[A-Za-z]\w*", self._left)
        blank = np.empty(self.theirs, bool)
        try:
            apart = einops.rearrange(blank, f"{self._left} -> {' '.join(axes)}", **self.weight.sizes)
            whole = einops.rearrange(blank, f"{self._left} -> {self._right}", **self.weight.sizes)
        except (ValueError, TypeError, RuntimeError, einops.EinopsError) as error:
            raise self._unfit(str(error).strip().splitlines()[-1].strip()) from error
        return dict(zip(axes, apart.shape, strict=True)), whole.shape

    def _unfit(self, reason: str) -> ParityError:
        sizes = f" with {dict(self.weight.sizes)}" if self.weight.sizes else ""
        return ParityError(
            f"the weight mapping does not fit: {self.path} is to be {self.weight.name}, of shape {list(self.theirs)}, "
            f"by {self.weight.axes!r}{sizes}; expected a pattern like 'o i -> i o' that can be undone "
            f"({reason})"
        )

    def _selection(self, whole: tuple[int, ...]) -> tuple[Any, ...]:
        """The index that takes the part out of the pattern's right side."""
        axes = axes_of(self._right)
        if unknown := sorted(self.weight.part.keys() - set(axes)):
            raise ParityError(f"{self.path} is to be a part by {unknown}; {self.weight.axes!r} gives the axes {axes}")
        chosen: list[Any] = [slice(None)] * len(axes)
        for axis, wanted in self.weight.part.items():
            place = axes.index(axis)
            start, stop = wanted if isinstance(wanted, tuple) else (wanted, wanted + 1)
            if not 0 <= start < stop <= whole[place]:
                raise ParityError(
                    f"{self.path} is to be the part {wanted} of {axis!r}, which is of size {whole[place]} in "
                    f"{self.weight.name}"
                )
            chosen[place] = slice(start, stop) if isinstance(wanted, tuple) else wanted
        return tuple(chosen)


def axes_of(side: str) -> list[str]:
    """The axes of one side of a pattern; those in parentheses are one."""
    return re.findall(r"\([^)]*\)|\S+", side)


def _as_weight(path: str, row: Any) -> Weight:
    if isinstance(row, Weight):
        return row
    if isinstance(row, str):
        return Weight(row)
    if isinstance(row, tuple) and len(row) == 2 and all(isinstance(each, str) for each in row):
        return Weight(*row)
    raise ParityError(
        f"the weight mapping says {row!r} for {path}; expected a name, (name, pattern), a Weight, or None to keep it"
    )


def _left_out(given: Any) -> dict[str, Weight]:
    """Rows of nothing of ours, by number."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(isinstance(x, str | Weight) for x in given):
        raise ParityError(f"the weight mapping says {given!r} for LEFT_OUT; expected a list of names of the module")
    return {f"{LEFT_OUT} {n}": _as_weight(LEFT_OUT, row) for n, row in enumerate(given)}


def layers_of(name: str, tensors: Collection[str]) -> tuple[str, ...]:
    """The tensors that a name stands for, in the order of their layers."""
    if "{layer}" not in name:
        return (name,) if name in tensors else ()
    first, *others = map(re.escape, name.split("{layer}"))
    pattern = re.compile(first + r"(?P<layer>\d+)" + r"(?P=layer)".join(others))
    matches = filter(None, map(pattern.fullmatch, tensors))
    return tuple(match.string for match in sorted(matches, key=lambda match: int(match["layer"])))


def _require_names(
    rows: Mapping[str, Weight],
    layers: Mapping[str, tuple[str, ...]],
    tensors: Collection[str],
    optional: Collection[str],
) -> None:
    claims: dict[str, list[Weight]] = {}
    for path, names in layers.items():
        for name in names:
            claims.setdefault(name, []).append(rows[path])
    absent = sorted({rows[path].name for path, names in layers.items() if not names})
    missing = sorted(set(tensors) - claims.keys() - set(optional))
    # Two rows may claim a tensor if each takes a part of it.
    doubled = sorted(name for name, held in claims.items() if len(held) > 1 and not all(row.part for row in held))
    if absent or missing or doubled:
        raise ParityError(
            f"the weight mapping does not fit the module: it names {absent}, which the module lacks, "
            f"{doubled} more than once, and misses {missing}"
        )
