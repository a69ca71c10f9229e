"""What each instruction of a compiled step is for, from XLA's text of the program and its table of sources."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

_LIBRARY = Path(__file__).resolve().parents[2] / "jax_tformer"
PROJECTIONS, HEAD, COPIES = "projections: products", "loss and head", "copies, slices, zero-filling"
ATTENTION, SOFTMAX, WAITING = "attention: products", "attention: softmax, masks", "waiting, scheduling"
CHOOSING = "choosing the token"
_GROUPS = {
    "Norm": "norms",
    "masks": SOFTMAX,
    "attention": SOFTMAX,
    "kernels": SOFTMAX,
    "activate": "activations",
    "gelu": "activations",
    "FeedForward": "activations",
    "Linear": "biases",
    "Block": "residual sums",
    "InputEmbedding": "embedding",
    "Table": "embedding",
    "Head": HEAD,
    "linear_loss": HEAD,
    "optimizer": "optimizer",
    "optax": "optimizer",
    "step": "optimizer",
    "sinusoidal": "positions",
    "angles": "positions",
    "rotate": "positions",
    "dropout": "dropout",
    "keep_mask": "dropout",
    "site_key": "dropout",
    "Dropout": "dropout",
    "strategies": CHOOSING,
    "loop": CHOOSING,
}
"""Class, function or file that an operation comes from -> its group, unless it is a product or moves numbers only."""
_OF_PRODUCTS = {
    "Linear": PROJECTIONS,
    "Table": HEAD,
    "Head": HEAD,
    "linear_loss": HEAD,
    "attention": ATTENTION,
    "kernels": ATTENTION,
    # The product that a softmax is fused with ends in masks.py.
    "masks": ATTENTION,
}
GROUPS = (
    *(PROJECTIONS, ATTENTION, HEAD, "norms", SOFTMAX, "activations", "biases", "residual sums", "embedding"),
    *("optimizer", "positions", "dropout", CHOOSING, COPIES, "other", WAITING),
)
_PASSED_OVER = ("", "fast")
"""Files whose lines say nothing: those of others, and decoding's layout of kernels, which any product may have."""
_MOVES = {"copy", "transpose", "broadcast", "bitcast", "reshape", "slice", "dynamic-slice", "dynamic-update-slice"}
_MOVES |= {"concatenate", "pad", "constant", "parameter"}
_INSTRUCTION = re.compile(r"\s*(ROOT )?%([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_FLOATS = re.compile(r"(f|bf)\d+\[\d")


class Instruction(NamedTuple):
    """One instruction of a compiled program: what it does, and which line of the source it comes from."""

    opcode: str
    shape: str
    """Of the result: "f32[8,256]"."""
    parts: tuple["Instruction", ...]
    """Of a fusion: what is fused; the last one gives the result."""
    frames: tuple[tuple[str, str, int], ...]
    """(file, function, line), the innermost first."""
    of_weights: bool = False
    """Whether it reads an array of the whole program as it is, which in a loop over tokens only parameters are."""

    def group(self) -> str:
        """The row of the table that it belongs to."""
        places = [(name.split(".")[0], _stem(file)) for file, name, _ in self.frames]
        ours, parts = [place for place in places if place[1] not in _PASSED_OVER], self.parts or (self,)
        names = ours[0] if ours else ()
        multiplies = "dot" in {part.opcode for part in parts}
        if multiplies or self.opcode == "custom-call":
            # What multiplies may be a function for all: then it is who has called it.
            within = [name for place in ours for name in place] if multiplies else names
            if found := next((_OF_PRODUCTS[name] for name in within if name in _OF_PRODUCTS), None):
                return found
            # XLA forgets where products of several matrices at once come from; the head's is of one.
            if multiplies:
                return PROJECTIONS if self.of_weights else ATTENTION
        moved = [part for part in parts if _FLOATS.match(part.shape)] or parts
        last = [part.opcode for part in moved if part.opcode != "bitcast"][-1:]
        if all(part.opcode in _MOVES for part in (*moved, parts[-1])) or "".join(last).startswith("dynamic"):
            return COPIES
        return next((_GROUPS[name] for name in names if name in _GROUPS), "other")

    def source(self) -> str:
        """The innermost line of this library that it comes from, for people."""
        return next((f"{Path(file).name}:{line} {name}" for file, name, line in self.frames if _stem(file)), "")


def instructions(text: str) -> dict[str, Instruction]:
    """All instructions of a compiled program, by name, from its text."""
    tables: dict[str, dict[str, str]] = defaultdict(dict)
    computations: dict[str, list[str]] = {}
    roots: dict[str, str] = {}
    found: dict[str, Instruction] = {}
    branches = {name for listed in re.findall(r"branch_computations=\{(.*?)\}", text) for name in _NAME.findall(listed)}
    table = computation = ""
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = line
        elif table and (row := re.match(r"(\d+) (.*)", line)):
            tables[table][row[1]] = row[2]
        elif line.endswith("{") and (header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)):
            table, computation = "", header[1]
            computations[computation] = []
        elif instruction := _INSTRUCTION.match(line):
            name, shape, opcode = instruction.group(2, 3, 4)
            called = re.search(r"calls=%([\w.\-]+)", line) if opcode == "fusion" else None
            names = computations[called[1]] if called else []
            inside = tuple(found[part] for part in sorted(names, key=lambda part: part in roots.values()))
            read = [found[part] for part in _NAME.findall(line[instruction.end() :].partition(")")[0]) if part in found]
            whole = any(
                part.opcode in ("get-tuple-element", "parameter") or (part.opcode == "bitcast" and part.of_weights)
                for part in read
            )
            frame = re.search(r"stack_frame_id=(\d+)", line)
            if frame or opcode == "dot":
                frames = tuple(_frames(tables, frame[1])) if frame else ()
            else:
                # Those of what it does last, or of what it reads.
                frames = next((part.frames for part in (*reversed(inside), *read) if part.frames), ())
            shape = re.sub(r"\{[^}]*\}", "", shape)
            found[name] = Instruction(opcode, shape, inside, frames, whole and computation not in branches)
            computations[computation].append(name)
            if instruction[1]:
                roots[computation] = name
    return found


def _frames(tables: Mapping[str, Mapping[str, str]], frame: str) -> Iterator[tuple[str, str, int]]:
    # XLA prints the number of the caller's frame plus one; the first frame has no caller.
    _, more = _numbers(tables["StackFrames"]["1"])[:2]
    while int(frame) > 0:
        location, parent = _numbers(tables["StackFrames"][frame])[:2]
        file, function, line = _numbers(tables["FileLocations"][str(location)])[:3]
        yield tables["FileNames"][str(file)].strip('"'), tables["FunctionNames"][str(function)].strip('"'), line
        frame = str(parent - more)


def _numbers(row: str) -> list[int]:
    return [int(number) for number in re.findall(r"\w+=(\d+)", row)]


@cache
def _stem(file: str) -> str:
    """The name of a file of this library, "optax" for all of optax, nothing for other files.

    A program that comes from a cache names the files of the checkout that it was compiled in, wherever that was.
    """
    path = Path(file)
    if "optax" in path.parts:
        return "optax"
    places = [index for index, part in enumerate(path.parts) if part == _LIBRARY.name]
    return path.stem if any(_LIBRARY.joinpath(*path.parts[place + 1 :]).is_file() for place in places) else ""
