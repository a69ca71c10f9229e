"""Texts that a rule makes, about which it is known how well they can be predicted."""

from itertools import accumulate

import numpy as np

PRIME = 97
LETTERS = "abcdefghijklmnop"
ODDS = (8 / 15, 4 / 15, 2 / 15, 1 / 15)
"""The probabilities of a chain's four next letters."""
_CHAIN = 2**20


def equations() -> str:
    """Lists addition modulo a prime, all of it, a line each: "90 + 9 = 2" (Power et al., 2022)."""
    return "\n".join(f"{a} + {b} = {(a + b) % PRIME}" for a in range(PRIME) for b in range(PRIME))


def chain() -> str:
    """Draws a Markov chain of letters: letter 3 x + k modulo 16 follows letter x with the k-th of the odds.

    All letters are as frequent in the long run.
    """
    drawn = np.searchsorted(np.cumsum(ODDS[:-1]), np.random.default_rng(0).random(_CHAIN), side="right")
    return "".join(LETTERS[x] for x in accumulate(drawn.tolist(), lambda x, k: (3 * x + k) % len(LETTERS)))
