"""What can happen to the files of a checkpoint, and what is said of it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.checkpoint_states import make_state


def data_file(step_folder: Path) -> Path:
    return max((step_folder / "params").rglob("d/*"), key=lambda path: path.stat().st_size)


def flip_inside_array(step: Path) -> None:
    path = data_file(step)
    content = bytearray(path.read_bytes())
    row = np.asarray(make_state(int(step.name))["params"]["w"])[7].tobytes()
    position = content.index(row) + 5
    content[position] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def replace_by_folder(step: Path) -> None:
    (step / "extra.json").unlink()
    (step / "extra.json").mkdir()


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte in an array": (flip_inside_array, "has changed since it was written"),
    "truncated data": (lambda step: cut(data_file(step)), "bytes instead of"),
    "emptied data": (lambda step: data_file(step).write_bytes(b""), "has 0 bytes instead of"),
    "missing data": (lambda step: data_file(step).unlink(), "is missing"),
    "half deleted": (lambda step: shutil.rmtree(step / "params"), "is missing"),
    "a folder in place of a file": (replace_by_folder, "extra.json"),
    "truncated metadata": (lambda step: cut(step / "params" / "_METADATA"), "bytes instead of"),
    "truncated extra": (lambda step: cut(step / "extra.json"), "extra.json has"),
    "truncated checksums": (lambda step: cut(step / "checksums.json"), "checksums.json is damaged"),
    "other JSON as checksums": (lambda step: (step / "checksums.json").write_text("[1]"), "checksums.json is damaged"),
    "binary checksums": (lambda step: (step / "checksums.json").write_bytes(b"\xff\x00"), "checksums.json is damaged"),
    "no checksums": (lambda step: (step / "checksums.json").unlink(), "it has no checksums.json"),
    "an empty folder": (empty, "it has no checksums.json"),
}
