"""Plants a fault in a pair: its file, or the library's that it uses, is read with one piece of text changed."""

import ast
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np

from parity_tests.other_pairs.pair import OtherPair

PAIRS = ("encoder_layers", "convolutions", "gru", "distilbert", "gpt_neox", "mixer")
Side = Literal["ours", "theirs", "library"]
"""What the fault is in: the port, the module, or the source of Hugging Face that the module uses."""


class Change(NamedTuple):
    """A piece of text that stands once in a file, and what stands there instead."""

    right: str
    wrong: str


Arrays = dict[str, np.ndarray]
Converted = Callable[[Arrays], Mapping[str, np.ndarray]]
"""From our parameters by path, those that are other than the map says."""


@dataclass(frozen=True)
class PairFault:
    """A fault, and the places that may be named for it: on the side that has it, and on the other."""

    name: str
    pair: str
    side: Side | Literal["weights"]
    """Weights: parameters that were converted wrongly, or a wrong row of the map."""
    change: Change | None = None
    """Its new lines are where the fault is."""
    ours: tuple[str, ...] = ()
    """Pieces of our lines that may be named (" #2" behind one: the second that has it)."""
    theirs: tuple[str, ...] = ()
    """Modules that may be named, by their whole paths; and, with a space in it, pieces of their lines."""
    converted: Converted | None = None
    parameters: tuple[str, ...] = ()
    """Names that must be among those that are told."""
    setting: tuple[Change, ...] = ()
    """Changes that make no difference by themselves: what the fault needs around it, on both sides."""


def fault(
    pair: str,
    side: Side,
    name: str,
    right: str,
    wrong: str,
    *,
    ours: tuple[str, ...] = (),
    theirs: tuple[str, ...] = (),
) -> PairFault:
    """A line that is wrong; `ours` and `theirs` are places besides that line."""
    return PairFault(name, pair, side, Change(right, wrong), ours, theirs)


def conversion(pair: str, name: str, change: Converted, *parameters: str) -> PairFault:
    """Parameters that were converted wrongly: they have other numbers than the map says."""
    return PairFault(name, pair, "weights", converted=change, parameters=parameters)


def swapped(first: str, second: str) -> Converted:
    """Two parameters, each in the other's place."""
    return lambda arrays: {first: arrays[second], second: arrays[first]}


def turned(path: str, *axes: int) -> Converted:
    """One parameter with its axes in another order."""
    return lambda arrays: {path: arrays[path].transpose(axes)}


class Planted(NamedTuple):
    """A pair with its fault."""

    pair: OtherPair
    file: str
    """The file that was read instead of the pair's own."""
    faulty: tuple[str, frozenset[int]]
    """The file and lines of the fault; no lines where it is in the weights."""


@contextmanager
def planted(fault: PairFault) -> Iterator[Planted]:
    """The pair with the fault in it; its files are there as long as this lasts."""
    own = import_module(f"{__package__}.{fault.pair}")
    with tempfile.TemporaryDirectory() as folder:
        in_pair = [*fault.setting, *([fault.change] if fault.change and fault.side != "library" else [])]
        module, lines = _changed(own, in_pair, Path(folder) / f"{fault.pair}.py")
        read = module
        if fault.change and fault.side == "library":
            read, lines = _changed(own.source, [fault.change], Path(folder) / Path(own.source.__file__).name)
            module.source = read  # type: ignore[attr-defined]
        try:
            yield Planted(module.pair(), str(module.__file__), (str(read.__file__), lines))
        finally:
            for made in {module.__name__, read.__name__}:
                del sys.modules[made]


def _changed(module: ModuleType, changes: list[Change], path: Path) -> tuple[ModuleType, frozenset[int]]:
    """The module read anew from `path`, where its text is written with these changes; and the lines of the last."""
    text = Path(str(module.__file__)).read_text("utf-8")
    first, count = 1, 0
    for right, wrong in changes:
        if text.count(right) != 1:
            raise ValueError(f"{module.__file__} has {right!r} {text.count(right)} times; expected once")
        first, count = text[: text.index(right)].count("\n") + 1, wrong.count("\n") + 1
        text = text.replace(right, wrong)
    path.write_text(text, "utf-8")
    # In the package of the right one, so that relative imports work.
    spec = spec_from_file_location(f"{module.__package__}.planted_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made, frozenset(line for n in range(first, first + count) for line in statement(path, n))


def statement(path: Path, line: int) -> range:
    """The lines of the simple statement at a line: what is shown as one line may stand on several."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
        if simple and node.lineno <= line <= (node.end_lineno or node.lineno):
            return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return range(line, line + 1)


def lines_with(path: Path, piece: str) -> frozenset[int]:
    """The lines of the statements that have this piece; " #2" behind it means only the second."""
    piece, _, number = piece.partition(" #")
    found = [n for n, line in enumerate(path.read_text("utf-8").splitlines(), 1) if piece in line]
    if not found or len(found) < int(number or 1):
        raise ValueError(f"{path} has {piece!r} {len(found)} times; expected at least {number or 1}")
    chosen = [found[int(number) - 1]] if number else found
    return frozenset(line for n in chosen for line in statement(path, n))
