"""Logits of whole rows against those of the same tokens with a cache: a prompt at once, then one token at a time."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from parity.gates.measure import FLOAT64_BAR, Measured, as_array, compared, run_gates

Decoder = tuple[Callable[[Any], Any], Callable[[Any, Any, int], tuple[Any, Any]], Callable[[], Any]]
"""(tokens -> logits; tokens, cache and the position of the first -> their logits and the cache; -> an empty cache)."""


def check_decoding(
    tokens: np.ndarray,
    *,
    ours: Decoder | None = None,
    theirs: Decoder | None = None,
    bar: float = FLOAT64_BAR,
    name: str = "pair",
) -> list[Measured]:
    """Compares logits at every position: of whole rows, and with a cache, after a prompt of one token and of half.

    `tokens` are whole numbers `[batch, position]`; logits are `[batch, position, vocabulary]`. Each side is three
    functions: `whole(tokens)`, `step(tokens, cache, position)`, which takes one token or more of each row, and
    `empty()`, which makes a cache. Ours get arrays of NumPy while float64 is switched on for JAX, theirs tensors. One
    side alone will do; with both, all is held against our whole rows. Prints a line for each and returns the figures.

    Raises ParityError, which begins with the first position that differs.
    """
    logits: dict[str, np.ndarray] = {}
    with torch.no_grad(), jax.enable_x64(True), jax.default_matmul_precision("highest"):
        for side, decoder, given in (("ours", ours, tokens), ("theirs", theirs, torch.from_numpy(tokens))):
            if decoder:
                whole, step, empty = decoder
                logits[f"{side}, whole rows"] = as_array(whole(given))
                for prompt in (1, tokens.shape[1] // 2):
                    cache, rows, ends = empty(), [], range(prompt, tokens.shape[1] + 1)
                    for start, end in zip((0, *ends), ends, strict=False):
                        found, cache = step(given[:, start:end], cache, start)
                        rows.append(as_array(found))
                    logits[f"{side}, one by one after {prompt}"] = np.concatenate(rows, axis=1)
    by_position = {
        gate: {f"position {k}": rows for k, rows in enumerate(found.swapaxes(0, 1))} for gate, found in logits.items()
    }
    first, *others = by_position
    return run_gates(name, others, lambda gate: compared(gate, by_position[gate], by_position[first], bar=bar))
