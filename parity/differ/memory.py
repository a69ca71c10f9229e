"""Gives the memory of arrays that were let go back to the system."""

import ctypes
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    """What does so in glibc; None where there is another C library."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None


def hand_back() -> None:
    """The C library would keep what was let go, in pieces: gigabytes, where arrays of many sizes come and go."""
    if (trim := _trim()) is not None:
        trim(0)
