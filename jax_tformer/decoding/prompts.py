"""What is given to a generation: checked, and brought into rectangular form."""

import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tformer.config import require
from jax_tformer.data.ids import check_ids
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.models.transformer import Transformer

Ids = Sequence[int] | np.ndarray
"""Token ids of one text."""
_BUCKET = 32
"""Lengths are rounded up to a multiple of this, so that one compilation serves prompts of many lengths."""


class Prompts(NamedTuple):
    """The prompts as arrays, and how much room they and their continuations take."""

    tokens: np.ndarray
    """int32 `[B, P]`, padded on the left; for an encoder-decoder the start token, P = 1."""
    mask: np.ndarray
    """bool `[B, P]`, True at tokens."""
    source: tuple[np.ndarray, np.ndarray] | None
    """int32 and bool `[B, S]`, padded on the right: what an encoder-decoder translates."""
    end: np.ndarray
    """int32, the end token; -1 for none."""
    hashes: np.ndarray
    """uint32 `[B]`, of each prompt's tokens, for its own random numbers."""
    slots: int
    """Of the cache, padding included."""
    slides: bool
    """When the slots are full, the newer half is kept and the generation goes on."""

    def arrays(self) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Tokens, mask and source on the device."""
        source = None if self.source is None else (jnp.asarray(self.source[0]), jnp.asarray(self.source[1]))
        return jnp.asarray(self.tokens), jnp.asarray(self.mask), source


def prepare(
    net: Transformer,
    prompts: Sequence[Ids],
    decoding: DecodingConfig,
    *,
    end_id: int | None,
    start_id: int | None,
    context: int | None,
) -> Prompts:
    """The arrays for `generate`; raises InputError for what it cannot work with."""
    config, vocabulary = net.config, net.config.vocab_size or 0
    require_speaker(net)
    require(len(prompts) > 0, "there are no prompts; expected one at least")
    for number, prompt in enumerate(prompts, 1):
        require(len(prompt) > 0, f"prompt {number} of {len(prompts)} has no tokens; expected one at least")
        check_ids(np.asarray(prompt), vocabulary)
    for token in (end_id, start_id):
        check_ids(np.asarray([] if token is None else [token]), vocabulary)
    end = np.asarray(-1 if end_id is None else end_id, np.int32)
    hashes = np.array([zlib.crc32(np.asarray(prompt, "<i4").tobytes()) for prompt in prompts], np.uint32)
    longest, new = max(map(len, prompts)), decoding.max_new_tokens
    if config.encoder is not None:
        require(context is None, f"context is {context}; expected none for an encoder-decoder, which has no long text")
        require(start_id is not None, "start_id is None; an encoder-decoder begins with a token that says so")
        _require_positions(config.encoder.max_positions, longest, 0)
        _require_positions(config.output_stack.max_positions, 1, new)
        tokens = np.full((len(prompts), 1), start_id, np.int32)
        limit = config.encoder.max_positions or _rounded(longest)
        source = padded(prompts, min(_rounded(longest), limit), side="right")
        return Prompts(tokens, np.ones(tokens.shape, bool), source, end, hashes, new, False)
    if context is None:
        _require_positions(config.output_stack.max_positions, longest, new)
        limit = config.output_stack.max_positions or _rounded(longest)
        length = min(_rounded(longest), limit)
        return Prompts(*padded(prompts, length, side="left"), None, end, hashes, length + new - 1, False)
    require(context >= 2, f"context is {context}; expected at least 2 tokens")
    _require_positions(config.output_stack.max_positions, context, 0)
    require(longest <= context, f"a prompt has {longest} tokens; expected at most {context}, the context")
    slots = min(context, longest + new - 1)
    return Prompts(*padded(prompts, longest, side="left"), None, end, hashes, slots, slots < longest + new - 1)


def require_speaker(net: Transformer) -> None:
    """Raises InputError unless the model gives every next token a probability."""
    require(
        net.config.decoder is not None and net.config.head != "none",
        "the model has no decoder with a head on it; expected one that gives the next token a probability",
    )


def padded(rows: Sequence[Ids], length: int, *, side: Literal["left", "right"]) -> tuple[np.ndarray, np.ndarray]:
    """int32 and bool `[B, length]`: the rows with padding on `side`, and where they are not padding."""
    ids, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for number, row in enumerate(rows):
        place = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, True
    return ids, mask


def _rounded(length: int) -> int:
    return -(-length // _BUCKET) * _BUCKET


def _require_positions(limit: int | None, length: int, new: int) -> None:
    """Raises InputError where a sequence needs more learned positions than the model has."""
    # The last token is chosen and not read.
    require(
        limit is None or length + max(new - 1, 0) <= limit,
        f"a prompt has {length} tokens{f' and max_new_tokens is {new}' if new else ''}; expected at most "
        f"{(limit or 0) + bool(new)} in all, for the model's {limit} learned positions",
    )
