"""Which items are held out for evaluation: a function of the items alone, the same on every machine."""

import hashlib
from collections.abc import Iterable


def held_out_items(items: Iterable[str], fraction: float) -> set[str]:
    """The `fraction` of the distinct `items`, at least one of them, whose hashes are lowest.

    By content, and not by position: a file may be sorted, and an item that occurs twice must not be on both sides.
    """
    # Python's own hash differs from process to process.
    ranked = sorted(set(items), key=lambda item: hashlib.sha256(item.encode()).digest())
    return set(ranked[: max(1, round(fraction * len(ranked)))])
