"""Plants a fault in a pair: its file, or the library's that it uses, is read with one piece of text changed."""

import ast
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parity_tests.other_pairs.pair import OtherPair

PAIRS = ("convolutions", "gru", "gpt_neox")


@dataclass(frozen=True)
class PairFault:
    """A fault, and the places that may be named for it: on the side that has it, and on the other.

    Where several places or kinds may be named, " | " stands between them.
    """

    name: str
    side: str
    """ours (the port), theirs (the module), library (the source of Hugging Face that the module uses), or weights:
    parameters that were converted wrongly."""
    right: str = ""
    """A piece of text that stands once in the file."""
    wrong: str = ""
    """What stands there instead; its lines are where the fault is."""
    ours: str = ""
    """Pieces of our lines that may be named besides (" #2" behind one: the second that has it)."""
    theirs: str = ""
    """Modules that may be named, by their whole paths; and, with a space in it, pieces of their lines."""
    kinds: str = ""
    """What may be said of its kind: a piece of it. Else nothing may be said."""
    stage: str = "forward"
    """On the way forward, or backward: then all outputs stay as they are."""
    converted: Mapping[str, Callable[[dict[str, np.ndarray]], np.ndarray]] = field(default_factory=dict)
    """Our parameters that are other than the map says, each made of all that it says."""
    setting: tuple[str, str] | None = None
    """A change that makes no difference by itself: what the fault needs around it, on both sides."""
    pair: str = ""


class Planted(NamedTuple):
    """A pair with its fault."""

    pair: OtherPair
    file: str
    """The file that was read instead of the pair's own."""
    faulty: tuple[str, frozenset[int]]
    """The file and lines of the fault; no lines where it is in the weights."""


@contextmanager
def planted(fault):
    """The pair with the fault in it; its files are there as long as this lasts."""
    own = import_module(f"{__package__}.{fault.pair}")
    changes = [fault.setting] * bool(fault.setting) + [(fault.right, fault.wrong)] * bool(fault.right)
    with tempfile.TemporaryDirectory() as folder:
        in_library = fault.side == "library"
        module, lines = _changed(own, [] if in_library else changes, Path(folder) / f"{fault.pair}.py")
        read = module
        if in_library:
            read, lines = _changed(own.source, changes, Path(folder) / Path(own.source.__file__).name)
            module.source = read
        try:
            yield Planted(module.pair(), module.__file__, (read.__file__, lines))
        finally:
            for made in {module.__name__, read.__name__}:
                del sys.modules[made]


def _changed(module, changes, path):
    """The module read anew from `path`, where its text is written with these changes; and the lines of the last."""
    text = Path(module.__file__).read_text("utf-8")
    lines = range(0)
    for right, wrong in changes:
        if text.count(right) != 1:
            raise ValueError(f"{module.__file__} has {right!r} {text.count(right)} times; expected once")
        first = text[: text.index(right)].count("\n") + 1
        lines = range(first, first + wrong.count("\n") + 1)
        text = text.replace(right, wrong)
    path.write_text(text, "utf-8")
    # In the package of the right one, so that relative imports work.
    spec = spec_from_file_location(f"{module.__package__}.planted_{path.stem}", path)
    made = module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made, _statements(path, lines)


def _statements(path, lines):
    """The lines of the simple statements at these: what is shown as one line may stand on several."""
    found = set(lines)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            whole = range(node.lineno, node.end_lineno + 1)
            found.update(whole if found.intersection(whole) else ())
    return frozenset(found)


def lines_with(path, piece):
    """The lines of the statements that have this piece; " #2" behind it means only the second."""
    piece, _, number = piece.partition(" #")
    found = [n for n, line in enumerate(path.read_text("utf-8").splitlines(), 1) if piece in line]
    if len(found) < int(number or 1):
        raise ValueError(f"{path} has {piece!r} {len(found)} times; expected at least {number or 1}")
    return _statements(path, [found[int(number) - 1]] if number else found)
