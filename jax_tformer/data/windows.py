"""Text as windows: rows of one length, cut from one long stream of ids."""

from dataclasses import dataclass

import numpy as np

from jax_tformer.errors import InputError


@dataclass(frozen=True)
class Windows:
    """All windows of `length` ids of `stream`, integers [N], each beginning `stride` ids after the one before."""

    stream: np.ndarray
    length: int
    stride: int

    def __len__(self) -> int:
        return max(0, (len(self.stream) - self.length) // self.stride + 1)

    def cut(self, numbers: np.ndarray) -> np.ndarray:
        """int32[B, length], the windows of these `numbers`."""
        return self.stream[(numbers * self.stride)[:, None] + np.arange(self.length)].astype(np.int32)


def require_window(windows: Windows, part: str) -> Windows:
    """`windows`; raises InputError if there is none. `part` names the text that they are of."""
    if not len(windows):
        raise InputError(
            f"the {part} part of the text has {len(windows.stream):,} tokens; expected at least {windows.length:,}, "
            "for one window; give more text, a smaller --data.context-length or another --data.held-out"
        )
    return windows
