"""From prompts to continuations: `generate`, and `stream`, which hands out tokens as they come."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tformer.config import require
from jax_tformer.decoding.beam import search
from jax_tformer.decoding.loop import State, advance, restart, row_keys, start
from jax_tformer.decoding.prompts import Ids, Prompts, padded, prepare
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params


class Generated(NamedTuple):
    """R sequences of new tokens for each of B prompts."""

    tokens: np.ndarray
    """int32 `[B, R, N]`; behind the end of a row stands the end token."""
    lengths: np.ndarray
    """int32 `[B, R]`, the tokens of each row, its end token included."""
    scores: np.ndarray | None
    """`[B, R]`, best first: log-probability over length penalty, of a beam search; else None."""

    def rows(self, prompt: int) -> list[list[int]]:
        """The new tokens of one prompt's sequences, end tokens included."""
        return [row[:length].tolist() for row, length in zip(self.tokens[prompt], self.lengths[prompt], strict=True)]


def generate(
    net: Transformer,
    params: Params,
    prompts: Sequence[Ids],
    decoding: DecodingConfig,
    *,
    end_id: int | None = None,
    start_id: int | None = None,
    seed: int = 0,
    context: int | None = None,
) -> Generated:
    """Continues the prompts of a decoder alone, or translates the sources of an encoder-decoder.

    Rows end with `end_id`, if one is given; translations begin with `start_id`. The same seed gives a prompt the same
    tokens whatever else is in the batch. With `context`, a decoder alone may go on beyond that many tokens: whenever
    they are full, it forgets all but the newer half. Else prompt and new tokens must fit into learned positions.
    Raises InputError for what does not fit, an empty batch or prompt, and ids outside of the vocabulary.
    """
    options = {"end_id": end_id, "start_id": start_id, "context": context}
    given, end, best = prepare(net, prompts, decoding, **options), _or_none(end_id), decoding.num_return_sequences
    if decoding.num_beams > 1:
        require(context is None, f"context is {context} and num_beams {decoding.num_beams}; expected one of them")
        found = search(net, decoding, params, *given.arrays(), given.end, slots=given.slots)
        return _generated(np.asarray(found.tokens)[:, :best], end, np.asarray(found.scores)[:, :best])
    tokens = np.full((len(prompts), best, decoding.max_new_tokens), end, np.int32)
    for rows in _together(prompts, given.slides):
        part = prepare(net, [prompts[row] for row in rows], decoding, **options)
        made = np.concatenate(list(_pieces(net, params, part, decoding, seed, decoding.max_new_tokens)), axis=1)
        tokens[rows, :, : made.shape[1]] = made.reshape(len(rows), best, -1)
    return _generated(tokens, end, None)


def stream(
    net: Transformer,
    params: Params,
    prompts: Sequence[Ids],
    decoding: DecodingConfig,
    *,
    end_id: int | None = None,
    start_id: int | None = None,
    seed: int = 0,
    context: int | None = None,
) -> Iterator[np.ndarray]:
    """The tokens that `generate` gives, int32 `[B, R]` at a time, as they are chosen, until all rows have ended."""
    require(decoding.num_beams == 1, f"num_beams is {decoding.num_beams}; a beam search knows its tokens at the end")
    options = {"end_id": end_id, "start_id": start_id, "context": context}
    groups = _together(prompts, prepare(net, prompts, decoding, **options).slides)
    parts = [prepare(net, [prompts[row] for row in rows], decoding, **options) for rows in groups]
    for pieces in zip_longest(*(_pieces(net, params, part, decoding, seed, 1) for part in parts)):
        tokens = np.full((len(prompts), decoding.num_return_sequences), _or_none(end_id), np.int32)
        for rows, piece in zip(groups, pieces, strict=True):
            if piece is not None:
                tokens[rows] = piece.reshape(len(rows), -1)
        yield tokens


def _together(prompts: Sequence[Ids], slides: bool) -> list[list[int]]:
    """Which prompts are generated from together: all; but padding fills slots, and so decides where a text slides."""
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(len(prompt) if slides else 0, []).append(row)
    return list(groups.values())


def _pieces(
    net: Transformer, params: Params, given: Prompts, decoding: DecodingConfig, seed: int, piece: int
) -> Iterator[np.ndarray]:
    """The tokens, int32 `[B * R, n]`: the first one, then up to `piece` at a time."""
    keys = row_keys(jax.random.key(seed), given.hashes, decoding.num_return_sequences)
    state = start(net, decoding, params, *given.arrays(), keys, given.end, slots=given.slots)
    first = np.asarray(state.token)[:, None]
    yield first
    made, used = 1, given.tokens.shape[1]
    # What the model may still have to be told again.
    history = _history(given, decoding.num_return_sequences, first) if given.slides else None
    while made < decoding.max_new_tokens and not np.asarray(state.done).all():
        if used == given.slots:
            assert history is not None
            state, used = _forget(net, params, state, history, given.slots)
        limit = min(piece, decoding.max_new_tokens - made, given.slots - used)
        # `room` is static: one compilation serves all.
        state, tokens = advance(net, decoding, params, state, given.end, limit, room=min(piece, given.slots))
        count = int(state.made) - made
        new = np.asarray(tokens)[:, :count]
        made, used = made + count, used + count
        if history is not None:
            history = [[*row, *more][-given.slots :] for row, more in zip(history, new.tolist(), strict=True)]
        yield new


def _history(given: Prompts, samples: int, first: np.ndarray) -> list[list[int]]:
    rows = [row[mask].tolist() for row, mask in zip(given.tokens, given.mask, strict=True) for _ in range(samples)]
    return [[*row, token] for row, token in zip(rows, first[:, 0].tolist(), strict=True)]


def _forget(net: Transformer, params: Params, state: State, history: list[list[int]], slots: int) -> tuple[State, int]:
    """A state whose cache holds the newer half of what it held, and the number of slots in use."""
    # The last token of all has been chosen and not been read.
    length = max(slots // 2, 1)
    tokens, mask = padded([row[-1 - length : -1] for row in history], length, side="left")
    return restart(net, params, state, jnp.asarray(tokens), jnp.asarray(mask), slots), length


def _generated(tokens: np.ndarray, end: int, scores: np.ndarray | None) -> Generated:
    ended = tokens == end
    lengths = np.where(ended.any(-1), ended.argmax(-1) + 1, tokens.shape[-1]).astype(np.int32)
    return Generated(tokens[..., : int(lengths.max())], lengths, scores)


def _or_none(end_id: int | None) -> int:
    """An end token that never comes, where there is none."""
    return -1 if end_id is None else end_id
