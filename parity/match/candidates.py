"""What is to be matched: our parameters, the module's tensors, and which of them in which layout one may be."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, TypeVar

import numpy as np

from parity.gates.layout import Layout
from parity.gates.pytrees import Tensors, is_floating
from parity.match.parameter_names import understand
from parity.match.parameter_paths import ParameterName

EQUAL = 1000.0
"""What equal numbers add to a score: more than anything else can say."""


@dataclass(frozen=True)
class Parameter:
    """One of our parameters, or the same one of several layers."""

    name: str
    """Its path, with {layer} where it stands for those of several layers."""
    shape: tuple[int, ...]
    """Of one layer."""
    members: tuple[str, ...]
    layers: tuple[int, ...]
    """How many layers there are, in each place that counts them."""
    meaning: ParameterName
    place: float
    """Where it stands among all of its side, 0 to 1."""

    def each_layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The members, each with its place on the axes of the layers."""
        return zip(self.members, np.ndindex(self.layers), strict=True)


@dataclass(frozen=True)
class Tensor(Parameter):
    """One of the module's parameters or buffers, the same one of several layers, or several that ours may fuse."""

    aliases: tuple[ParameterName, ...]
    """What its other names say, where it is shared."""
    buffer: bool
    trained: bool
    heads: tuple[int, ...]
    """Numbers of heads that its module, or one around it, mentions."""
    fused: tuple["Tensor", ...] = ()
    """The tensors that are one of ours only together."""


@dataclass(frozen=True)
class Candidate:
    """A tensor that one of ours may be, or a part of it, in one layout; of several tensors each has its own."""

    ours: Parameter
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
        """Whether its numbers are equal to ours."""
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


@dataclass(frozen=True)
class Proposal:
    """What was chosen for one of our parameters."""

    chosen: Candidate
    others: tuple[Candidate, ...]
    """What else it could be: the best of each tensor or part of the same size, and other layouts."""
    reason: str
    sure: bool
    free: bool = False
    """Whether the outputs do not depend on it."""


def parameters(flat: Mapping[str, Any]) -> list[Parameter]:
    """Our parameters by path: arrays, or anything that has a shape."""
    shapes = {path: tuple(int(size) for size in leaf.shape) for path, leaf in flat.items()}
    meanings = understand({path: str(len(shape)) for path, shape in shapes.items()})
    ordered = sorted(shapes, key=_natural)
    places = {path: index / max(len(ordered) - 1, 1) for index, path in enumerate(ordered)}
    return [Parameter(path, shape, (path,), (), meanings[path], places[path]) for path, shape in shapes.items()]


def numbers_of(flat: Mapping[str, Any]) -> Tensors:
    """What our parameters hold, by path, of those that hold anything yet."""
    arrays = {path: np.asarray(leaf) for path, leaf in flat.items()}
    return {path: array.astype(np.float64, copy=False) for path, array in arrays.items() if is_floating(array)}


Named = TypeVar("Named", bound=Parameter)
_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


def with_families(named: Sequence[Named]) -> list[Named]:
    """These, and as one more those of one shape whose names differ in one number or in two, counted from 0."""
    found: dict[str, dict[tuple[int, ...], Named]] = {}
    for one in named:
        digits = list(_NUMBER.finditer(one.name))
        for chosen in chain(combinations(digits, 1), combinations(digits, 2)):
            template = one.name
            for place in reversed(range(len(chosen))):
                before = one.name[: chosen[place].start()]
                word = ("expert" if "expert" in before.lower() else "inner") if place else "layer"
                template = f"{before}{{{word}}}{template[chosen[place].end() :]}"
            found.setdefault(template, {})[tuple(int(match[0]) for match in chosen)] = one
    families = (_family(template, family) for template, family in found.items())
    return [*named, *(family for family in families if family is not None)]


def _family(template: str, family: Mapping[tuple[int, ...], Named]) -> Named | None:
    """Those of several layers as one, if all are there, and of one shape."""
    counts = tuple(len(set(numbers)) for numbers in zip(*family, strict=True))
    spoken = list(zip(*([number.spoken for number in one.meaning.numbers] for one in family.values()), strict=False))
    places = [spoken.index(numbers) for numbers in zip(*family, strict=True) if numbers in spoken]
    whole = sorted(family) == [*np.ndindex(counts)] and len({one.shape for one in family.values()}) == 1
    if not whole or len(places) < len(counts):
        return None
    members = tuple(family[numbers].name for numbers in sorted(family))
    first = family[min(family)]
    rest = tuple(number for place, number in enumerate(first.meaning.numbers) if place not in places)
    meaning = replace(first.meaning, numbers=rest, parent=template.rpartition(".")[0])
    return replace(first, name=template, members=members, layers=counts, meaning=meaning)


def _natural(path: str) -> list[tuple[int, int, str]]:
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"[._]|(\d+)", path) if word]
