"""Logits of whole rows against those of the same tokens with a cache: a prompt at once, then one token at a time."""

from collections.abc import Callable
from typing import Any

from parity.gates.measure import FLOAT64_BAR, Measured, as_array, assert_parity


def check_decoding(
    tokens: Any,
    logits: Any,
    step: Callable[[Any, Any, int], tuple[Any, Any]],
    empty: Callable[[], Any],
    *,
    bar: float = FLOAT64_BAR,
) -> list[Measured]:
    """Compares logits of whole rows with those of a cache at every position, after a prompt of one token and of half.

    `tokens` are `[batch, position]`, `logits` what either side says of them at once, `[batch, position, vocabulary]`.
    `step(tokens, cache, position)` returns the logits of the next tokens, one or more of each row, the first of them at
    `position`, and the cache after them; `empty()` makes a cache. Types are those of the side.

    Prints a line for each prompt and returns the figures. Raises ParityError, which begins with the first position that
    differs.
    """
    expected = {f"position {at}": row for at, row in enumerate(as_array(logits).swapaxes(0, 1))}
    figures = []
    for prompt in (1, len(expected) // 2):
        cache, found = empty(), dict[str, Any]()
        ends = range(prompt, len(expected) + 1)
        for start, end in zip((0, *ends), ends, strict=False):
            rows, cache = step(tokens[:, start:end], cache, start)
            found |= {f"position {at}": row for at, row in enumerate(as_array(rows).swapaxes(0, 1), start)}
        figures.append(assert_parity(f"decoding after {prompt}", found, expected, bar=bar))
    return figures
