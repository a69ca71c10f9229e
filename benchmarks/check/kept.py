"""The figures that are kept for a processor: a JSON file, read strictly, and never overwritten."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jax_tformer.errors import InputError, require
from jax_tformer.files import from_dict, read_json, to_dict, write_json
from jax_tformer_comparison.machine import Machine

_PACKAGES = ("python", "jax", "jaxlib")


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing, in seconds."""

    median: float
    low: float
    high: float

    def __post_init__(self) -> None:
        """Raises InputError for what is no spread of times."""
        require(
            0 < self.low <= self.median <= self.high,
            f"low {self.low}, median {self.median} and high {self.high} are no spread; expected them above 0 and "
            "in this order",
        )


@dataclass(frozen=True)
class Figure:
    """What one case took, and what the machine itself could do in the same minutes."""

    seconds: Spread
    """Of a step, a token, or a start."""
    machine: Spread
    """What the machine needs for the same at best: the products of the step at the rate of JAX's fastest one, one
    reading of weights and cache, or a process that imports JAX."""

    @property
    def times(self) -> float:
        """How many times the machine's own time it takes, each at its best: other work only ever adds."""
        return self.seconds.low / self.machine.low

    @property
    def noise(self) -> float:
        """How much longer than the best turn the usual one took, as a fraction."""
        return self.seconds.median / self.seconds.low - 1


@dataclass(frozen=True)
class Measured:
    """A figure, and how it came about."""

    figure: Figure
    date: str
    versions: dict[str, str]
    other_work: float | None
    """The fraction of the processors' time that went to other work; None if unknown."""


@dataclass(frozen=True)
class Kept:
    """All that is kept for one processor."""

    processor: str
    figures: dict[str, Measured]


def file_name(machine: Machine, *, quick: bool) -> str:
    """Names the file of a processor: its name, what tells it from others of that name, and the cores in use."""
    words = f"{'quick ' if quick else ''}{machine.processor} {machine.generation} {machine.cores} cores".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") + ".json"


def read(path: Path) -> dict[str, Measured]:
    """Reads the figures of a file; returns none where there is no file. Raises InputError for a damaged one."""
    if not path.exists():
        return {}
    try:
        return from_dict(Kept, read_json(path), where=str(path)).figures
    except InputError as error:
        # The reader's own advice is about run folders.
        problem = str(error).partition("; restore it")[0]
        raise InputError(f"{problem}; restore it, or delete it and keep new figures with --keep") from error


def add(path: Path, machine: Machine, before: Mapping[str, Measured], new: Mapping[str, Measured]) -> None:
    """Writes the figures that are kept already and the `new` ones; what is kept already stays as it is."""
    write_json(path, to_dict(Kept(f"{machine}, {machine.generation}".rstrip(", "), {**new, **before})))


def versions(machine: Machine) -> dict[str, str]:
    """Picks what decides how fast ours is: no figure is of PyTorch."""
    return {name: machine.versions[name] for name in _PACKAGES}
