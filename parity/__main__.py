"""`python -m parity find OURS THEIRS`, `match PARAMS MODULE` and `judge CAPSULE SIDE`: the tools for a shell.

Ends with 0 where all is the same, with 1 where it is not, and with 2, and one line, for what cannot be compared.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import numpy as np

from parity.gates.measure import FLOAT64_BAR, ParityError
from parity.gates.pytrees import nested
from parity.gates.weight_map import LEFT_OUT, Weight

_NAMED = "MODULE:NAME or FILE.py:NAME; with () behind it, it is called first"


class UsageError(Exception):
    """What was asked for does not exist."""


def named(text: str) -> Any:
    """What `module:name`, `folder/file.py:name` or `module:make()` stands for; a class stands for what it makes,
    from the seed 0."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise ValueError(f"{text!r} names nothing; expected {_NAMED}")
    home = SimpleNamespace(**run_path(where)) if where.endswith(".py") else import_module(where)
    try:
        found = attrgetter(name.removesuffix("()"))(home)
    except AttributeError as error:
        raise LookupError(f"{where} has no {error.name}") from error
    if isinstance(found, type) and (torch := sys.modules.get("torch")):
        torch.manual_seed(0)  # the same weights each time, and the same answer
    return found() if name.endswith("()") or isinstance(found, type) else found


def weight_map(path: str) -> dict[str, Any]:
    """A file of JSON: our path -> a name, null, or what a `Weight` is made of: [name, pattern, sizes, part, into]; of
    what ours fuses a list of those."""

    def row(said: Any) -> Any:
        if not isinstance(said, list) or not isinstance(said[0], str):
            return [row(each) for each in said] if isinstance(said, list) else said
        parts = ({axis: tuple(n) if isinstance(n, list) else n for axis, n in part.items()} for part in said[3:])
        return Weight(*said[:3], *parts)

    rows = json.loads(Path(path).read_text("utf-8")).items()
    return {path: [row(each) for each in said] if path == LEFT_OUT else row(said) for path, said in rows}


def tree(path: str) -> dict[str, Any]:
    """Arrays by dotted path, as nested dicts."""
    with np.load(path) as arrays:
        return nested(dict(arrays))


def arguments(path: str) -> Any:
    """Arrays that are named arg0, arg1, ..., or by keyword."""
    arrays = tree(path)
    in_order = [f"arg{n}" for n in range(len(arrays))]
    return [arrays[name] for name in in_order] if arrays.keys() == {*in_order} else arrays


def find(*, as_json: bool, **given: Any) -> int:
    """Prints where two sides part."""
    from parity.differ.first_difference import first_difference

    found = first_difference(**given)
    print(json.dumps(found.as_json(), indent=1) if as_json else found)
    return int(bool(found))


def match(*, out: str | None, **given: Any) -> int:
    """Prints the weight map that is proposed, and writes it; 1 where something of it is left to look at."""
    from parity.match.match_weights import match_weights

    if out and (Path(out).exists() or not Path(out).absolute().parent.is_dir()):
        raise UsageError(f"cannot write {out}; expected a new file, in a folder that exists")
    found = match_weights(**given)
    print(found)
    if out:
        with Path(out).open("x", encoding="utf-8") as file:
            json.dump(found.weights, file, indent=1, default=lambda row: [*asdict(row).values()])
    return int(bool(found.unsure or found.unmatched_ours or (given["ours"] and not found.verified)))


def judged(**given: Any) -> int:
    """The figures of a side; they raise where a gate is red."""
    from parity.capsule.judge import judge

    judge(**given)
    return 0


_READ: dict[str, tuple[str, Callable[[str], Any]]] = {
    "weights": (".json", weight_map),
    "params": (".npz", tree),
    "inputs": (".npz", arguments),
    **dict.fromkeys(("ours", "theirs", "module", "side", "like"), ("()", named)),
}
_INPUTS = "FILE.npz with arg0, arg1, ... or keywords, or a name"
_PARAMS = "our parameters, or an example: FILE.npz with dotted paths, or a name"
_COMMANDS: dict[str, tuple[str, Callable[..., int], dict[str, str]]] = {
    "find": (
        "where two sides part",
        find,
        {
            "ours": "ours(params, *inputs), a function of JAX",
            "theirs": "a PyTorch module",
            "--weights": "FILE.json or a name: the weight map",
            "--inputs": _INPUTS,
            "--params": _PARAMS,
            "--like": "an example of parameters that are no nested dicts",
            "--backward": "compare gradients, too",
            "--ignore": "a line, a function, a layer, a module or a kind to pass; as often as needed",
            "--bar": "what counts as equal",
            "--json": "print JSON",
        },
    ),
    "match": (
        "propose a weight map",
        match,
        {
            "params": _PARAMS,
            "module": "a PyTorch module",
            "--ours": "a function of JAX, to run both",
            "--inputs": _INPUTS,
            "--out": "a new FILE.json for the map, as find reads it",
        },
    ),
    "judge": (
        "judge a side by a capsule",
        judged,
        {
            "capsule": "the folder that parity.record wrote",
            "side": "a function of JAX or a PyTorch module",
            "--weights": "FILE.json or a name: the weight map",
            "--params": _PARAMS,
            "--own-weights": "the side keeps its own weights: compare them, too",
            "--gates": "some of those that were recorded",
        },
    ),
}
_MORE: dict[str, dict[str, Any]] = {
    "--backward": {"action": argparse.BooleanOptionalAction, "default": True},
    "--ignore": {"action": "append", "default": []},
    "--inputs": {"default": ()},
    "--bar": {"type": float, "default": FLOAT64_BAR},
    "--json": {"action": "store_true", "dest": "as_json"},
    "--own-weights": {"action": "store_true"},
    "--gates": {"nargs": "+"},
}


def main(given: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m parity", description="JAX and PyTorch, side by side.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, (about, _, options) in _COMMANDS.items():
        asked = commands.add_parser(command, help=about, epilog=f"A name is {_NAMED}.")
        for option, said in options.items():
            asked.add_argument(option, help=said, **_MORE.get(option, {}))
    taken = vars(parser.parse_args(given))
    try:
        _, run, _ = _COMMANDS[taken.pop("command")]
        name = {} if run is match else {"name": taken["ours"] if run is find else taken["side"]}
        return run(**{key: _read(key, value) for key, value in taken.items()}, **name)
    except (ParityError, UsageError, ValueError, TypeError, ImportError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        red = any(not figure.passed for figure in getattr(error, "figures", ()))
        for note in getattr(error, "__notes__", ()) if red else ():
            print(note)
        return 1 if red else 2


def _read(key: str, value: Any) -> Any:
    """What is given by name, or lies in a file; raises UsageError, in a line, where nothing does."""
    if key not in _READ or not value:
        return value
    suffix, read = _READ[key]
    try:
        return read(value) if value.endswith(suffix) else named(value)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{value}: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
