"""`python examples/gallery NAME [--fixed]`: where the two sides of an example part; 0 where they do not, 1 where they do."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

from parity import first_difference

HERE = Path(__file__).parent
BUG = re.compile(r"^( *)# The bug. Mended: (.*)\n.*$", re.MULTILINE)


def example(name: str, *, fixed: bool = False) -> SimpleNamespace:
    """What an example defines; with `fixed`, what is said behind BUG stands in the place of its line."""
    file = HERE / f"{name}.py"
    text = file.read_text("utf-8")
    made = {"__name__": name}
    exec(compile(BUG.sub(r"\1\2", text) if fixed else text, file, "exec"), made)
    return SimpleNamespace(**made)


def answer(name, *, fixed=False):
    """Where the two sides of an example part."""
    pair = example(name, fixed=fixed)
    return first_difference(pair.ours, pair.theirs, pair.WEIGHTS, pair.INPUTS, name=name)


if __name__ == "__main__":
    found = answer(sys.argv[1], fixed="--fixed" in sys.argv)
    print(found)
    sys.exit(bool(found))
