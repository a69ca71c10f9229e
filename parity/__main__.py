"""`python -m parity judge CAPSULE SIDE`: judges a side by what was recorded of the other.

Ends with 0 where every gate is green, with 1 where one is red, and with 2, and one line, for what cannot be compared.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

from parity.capsule.judge import judge
from parity.gates.measure import ParityError

_NAMED = "MODULE:NAME or FILE.py:NAME; with () behind it, it is called first"


class UsageError(Exception):
    """What was asked for does not exist."""


def named(text: str) -> Any:
    """What `module:name`, `folder/file.py:name` or `module:make()` stands for; raises UsageError where nothing does."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise UsageError(f"{text!r} names nothing; expected {_NAMED}")
    try:
        home = SimpleNamespace(**run_path(where)) if where.endswith(".py") else import_module(where)
        found = attrgetter(name.removesuffix("()"))(home)
        return found() if name.endswith("()") else found
    except Exception as error:
        raise UsageError(f"{text}: {type(error).__name__}: {error}") from error


def main(given: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m parity", description="JAX and PyTorch, side by side.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="judge")
    asked = commands.add_parser("judge", help="judge a side by a capsule")
    asked.add_argument("capsule", type=Path, metavar="CAPSULE", help="the folder that parity.record wrote")
    asked.add_argument("side", metavar="SIDE", help=f"a function of JAX or a PyTorch module: {_NAMED}")
    asked.add_argument("--weights", metavar="MAP", help="the weight map, named in the same way")
    asked.add_argument("--params", metavar="PARAMS", help="an example of a function's parameters, or its own")
    asked.add_argument("--own-weights", action="store_true", help="the side keeps its own weights: compare them, too")
    asked.add_argument("--gates", nargs="+", metavar="GATE", help="some of those that were recorded")
    options = parser.parse_args(given)
    try:
        weights, params = (None if each is None else named(each) for each in (options.weights, options.params))
        side, others = named(options.side), {"own_weights": options.own_weights, "gates": options.gates}
        judge(options.capsule, side, weights, params=params, name=options.side, **others)
    except (ParityError, UsageError, ValueError, TypeError, ImportError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(note)
        return 1 if any(not figure.passed for figure in getattr(error, "figures", ())) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
