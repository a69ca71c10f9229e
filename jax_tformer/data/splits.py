"""What is held out for evaluation: a function of the data alone, the same on every machine."""

import hashlib
from collections.abc import Iterable

import numpy as np

from jax_tformer.data.utf8 import BLOCK


def held_out_items(items: Iterable[str], fraction: float) -> set[str]:
    """The `fraction` of the distinct `items`, at least one of them, whose hashes are lowest.

    By content, and not by position: a file may be sorted, and an item that occurs twice must not be on both sides.
    """
    # Python's own hash differs from process to process.
    ranked = sorted(set(items), key=lambda item: hashlib.sha256(item.encode()).digest())
    return set(ranked[: max(1, round(fraction * len(ranked)))])


def split_text(text: memoryview, held_out: float) -> tuple[memoryview, memoryview]:
    """The training part of `text`, UTF-8, and its end of that fraction of the characters.

    The end, and not windows at random: those overlap, and a model would be tested on what it has read.
    """
    data = np.frombuffer(text, np.uint8)
    parts = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    counts = [int(np.count_nonzero(_begins_character(part))) for part in parts]
    training = int(sum(counts) * (1 - held_out))
    place, before = 0, 0
    for part, count in zip(parts, counts, strict=True):
        if training < before + count:
            place += int(np.flatnonzero(_begins_character(part))[training - before])
            break
        place, before = place + len(part), before + count
    return text[:place], text[place:]


def _begins_character(data: np.ndarray) -> np.ndarray:
    """bool[N], where a byte of UTF-8 is the first one of its character."""
    return data & 0xC0 != 0x80
