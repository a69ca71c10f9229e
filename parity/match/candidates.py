"""What is to be matched: our parameters, the module's tensors, and which of them in which layout one may be."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product
from typing import Any, TypeVar

import numpy as np

from parity.gates.layout import Layout
from parity.gates.pytrees import is_floating
from parity.match.parameter_names import ParameterName, understand

EQUAL = 1000.0
"""What equal numbers add to a score: more than anything else can say."""


@dataclass(frozen=True)
class Tensor:
    """One of the module's parameters or buffers, the same one of several layers, or several that ours may fuse."""

    name: str
    """With {layer} where it stands for those of several layers."""
    shape: tuple[int, ...]
    """Of one layer."""
    members: tuple[str, ...]
    layers: tuple[int, ...]
    """How many layers there are, in each place that counts them."""
    meaning: ParameterName
    aliases: tuple[ParameterName, ...]
    """What its other names say, where it is shared."""
    kind: str
    """The class of its module."""
    place: float
    """Where it stands among all of the module's, 0 to 1."""
    buffer: bool = False
    trained: bool = True
    heads: tuple[int, ...] = ()
    """Numbers of heads that its module, or one around it, mentions."""
    fused: tuple["Tensor", ...] = ()
    """The tensors that are one of ours only together."""


@dataclass(frozen=True)
class Leaf:
    """One of our parameters, or one for each number of a layer, as one array."""

    path: str
    shape: tuple[int, ...]
    meaning: ParameterName
    array: Any
    place: float
    members: tuple["Leaf", ...] = ()
    layers: tuple[int, ...] = ()
    """How many members there are, in each place of the path that counts them."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the parameters that it stands for."""
        return tuple(one.path for one in self.members) or (self.path,)

    @cached_property
    def numbers(self) -> np.ndarray | None:
        """What it holds, if it does."""
        if not self.members:
            return _numbers(self.array)
        each = [one.numbers for one in self.members]
        return None if any(one is None for one in each) else np.stack(each).reshape(self.shape)  # type: ignore[arg-type]

    @cached_property
    def largest(self) -> float:
        """Of its numbers, by size."""
        return 0.0 if self.numbers is None or not self.numbers.size else float(np.abs(self.numbers).max())


@dataclass(frozen=True)
class Candidate:
    """A tensor, or a part of it, in one layout; of several tensors each has its own."""

    tensor: Tensor
    layouts: tuple[Layout, ...]
    named: float
    """How well the names go together."""
    score: float
    role: int | None = None
    """Which it is of those that are fused in the tensor."""
    style: tuple[Any, ...] = ()
    """How they are fused there, or how the rows of its heads are turned."""

    @property
    def equal(self) -> bool:
        """Whether it was chosen by equal numbers."""
        return self.score > EQUAL / 2

    @property
    def layout(self) -> Layout:
        """Of the first tensor."""
        return self.layouts[0]

    @property
    def pieces(self) -> list[tuple[Tensor, Layout]]:
        """Each tensor with its layout."""
        return list(zip(self.tensor.fused or (self.tensor,), self.layouts, strict=True))

    @property
    def column(self) -> tuple[str, object]:
        """What may be taken once."""
        return self.tensor.name, self.layout.part if self.role is None else self.role


@dataclass
class Proposal:
    """What was chosen for one of our parameters."""

    leaf: Leaf
    chosen: Candidate
    others: tuple[Candidate, ...] = ()
    """What else it could be: the best of each tensor or part of the same size, and other layouts."""
    reason: str = ""
    sure: bool = False
    free: bool = False
    """Whether the outputs do not depend on it."""


def leaves(flat: Mapping[str, Any]) -> list[Leaf]:
    """Our parameters by path: arrays, or anything that has a shape."""
    shapes = {path: tuple(int(size) for size in leaf.shape) for path, leaf in flat.items()}
    meanings = understand({path: str(len(shape)) for path, shape in shapes.items()})
    ordered = sorted(shapes, key=_natural)
    places = {path: index / max(len(ordered) - 1, 1) for index, path in enumerate(ordered)}
    return [Leaf(path, shape, meanings[path], flat[path], places[path]) for path, shape in shapes.items()]


Named = TypeVar("Named", Tensor, Leaf)
_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


def families(named: Mapping[str, Named]) -> Iterator[tuple[ParameterName, tuple[Named, ...], tuple[int, ...]]]:
    """Those of one shape whose names differ in one number or in two, counted from 0: a name for all, with {layer} in
    it, themselves, and how many there are in each place."""
    found: dict[str, dict[tuple[int, ...], Named]] = {}
    for path, one in named.items():
        digits = list(_NUMBER.finditer(path))
        for chosen in chain(combinations(digits, 1), combinations(digits, 2)):
            template = path
            for place in reversed(range(len(chosen))):
                before = path[: chosen[place].start()]
                word = ("expert" if "expert" in before.lower() else "inner") if place else "layer"
                template = f"{before}{{{word}}}{template[chosen[place].end() :]}"
            found.setdefault(template, {})[tuple(int(match[0]) for match in chosen)] = one
    for template, family in found.items():
        members = tuple(family[numbers] for numbers in sorted(family))
        counts = tuple(len(set(numbers)) for numbers in zip(*family, strict=True))
        spoken = list(zip(*([number[0] for number in one.meaning.numbers] for one in family.values()), strict=False))
        places = [spoken.index(numbers) for numbers in zip(*family, strict=True) if numbers in spoken]
        if sorted(family) != list(product(*map(range, counts))) or len({one.shape for one in members}) > 1:
            continue
        if len(places) == len(counts):
            first = members[0].meaning
            rest = tuple(number for place, number in enumerate(first.numbers) if place not in places)
            parent = template.rpartition(".")[0]
            yield replace(first, path=template, numbers=rest, parent=parent), members, counts


def _natural(path: str) -> list[tuple[int, int, str]]:
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"[._]|(\d+)", path) if word]


def _numbers(leaf: Any) -> np.ndarray | None:
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError):
        return None
    if array.dtype == object or not array.size:
        return None
    return array.astype(np.float64, copy=False) if np.issubdtype(array.dtype, np.number) or is_floating(array) else None
