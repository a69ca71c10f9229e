"""What is to be matched: our parameters, the module's tensors, and which of them in which layout one may be."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.match.layouts import Layout
from parity.match.parameter_names import ParameterName, understand


@dataclass(frozen=True)
class Tensor:
    """One of the module's parameters or buffers, or the same one of several layers."""

    name: str
    """With {layer} where it stands for those of several layers."""
    shape: tuple[int, ...]
    """Of one layer."""
    members: tuple[str, ...]
    layers: int | None
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


@dataclass(frozen=True)
class Leaf:
    """One of our parameters."""

    path: str
    shape: tuple[int, ...]
    meaning: ParameterName
    numbers: np.ndarray | None
    place: float


@dataclass(frozen=True)
class Candidate:
    """A tensor, or a part of it, in one layout."""

    tensor: Tensor
    layout: Layout
    named: float
    """How well the names go together."""
    score: float

    @property
    def column(self) -> tuple[str, int | tuple[int, int] | None]:
        """What may be taken once."""
        return self.tensor.name, self.layout.part


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
    return [Leaf(path, shape, meanings[path], _numbers(flat[path]), places[path]) for path, shape in shapes.items()]


def _natural(path: str) -> list[tuple[int, int, str]]:
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"[._]|(\d+)", path) if word]


def _numbers(leaf: Any) -> np.ndarray | None:
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError):
        return None
    if array.dtype == object or not array.size:
        return None
    return array.astype(np.float64) if np.issubdtype(array.dtype, np.number) or "float" in array.dtype.name else None
