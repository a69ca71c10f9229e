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
from jax_tformer.decoding.prompts import Ids, Prompts, Request, padded, request
from jax_tformer.decoding.rules import Rules, rules_of
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params


class Generated(NamedTuple):
    """R sequences of new tokens for each of B prompts."""

    tokens: np.ndarray
    """int32 `[B, R, N]`; behind the end of a row stands the end token, or -1 where there is none."""
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
    limits: Sequence[int] | None = None,
    end_id: int | None = None,
    start_id: int | None = None,
    seed: int = 0,
    context: int | None = None,
) -> Generated:
    """Continues the prompts of a decoder alone, or translates the sources of an encoder-decoder.

    Rows end with `end_id`, if one is given, and after `limits` new tokens, where a prompt's is less than
    max_new_tokens; translations begin with `start_id`. The same seed gives a prompt the same tokens whatever else is in
    the batch (but for near ties that fall to rounding, of which bfloat16 has some). With `context`, a decoder alone may
    go on beyond that many tokens: whenever they are full, it forgets all but the newer half. Else prompt and new tokens
    must fit into learned positions.

    Raises InputError for what does not fit, an empty batch or prompt, ids outside of the vocabulary, a model whose
    logits are NaN, and a beam search that finds less than num_return_sequences sequences.
    """
    asked = request(net, prompts, decoding, limits=limits, end_id=end_id, start_id=start_id, context=context)
    params, rules, end = net.unstacked(params), rules_of(decoding), _or_none(end_id)
    if decoding.num_beams > 1:
        require(context is None, f"context is {context} and num_beams {decoding.num_beams}; expected one of them")
        return _beams(net, rules, params, asked, end, decoding.num_return_sequences)
    tokens = np.full((len(prompts), decoding.num_return_sequences, int(asked.limits.max())), end, np.int32)
    for rows in asked.together():
        given = asked.part(rows).prepared(net)
        most = int(given.limits.max())
        made = np.concatenate(list(_pieces(net, rules, params, given, decoding, end, seed, most)), axis=1)
        tokens[rows, :, : made.shape[1]] = made.reshape(len(rows), -1, made.shape[1])
    ended = tokens == end
    lengths = np.where(ended.any(-1), ended.argmax(-1) + 1, tokens.shape[-1]).astype(np.int32)
    lengths = np.minimum(lengths, asked.limits[:, None])
    return Generated(tokens[..., : int(lengths.max())], lengths, None)


def stream(
    net: Transformer,
    params: Params,
    prompts: Sequence[Ids],
    decoding: DecodingConfig,
    *,
    limits: Sequence[int] | None = None,
    end_id: int | None = None,
    start_id: int | None = None,
    seed: int = 0,
    context: int | None = None,
) -> Iterator[np.ndarray]:
    """The tokens that `generate` gives, int32 `[B, R]` at a time, as they are chosen, until all rows have ended.

    Where a row has ended before, its end token is given again, or -1 where there is none.
    """
    require(decoding.num_beams == 1, f"num_beams is {decoding.num_beams}; a beam search knows its tokens at the end")
    asked = request(net, prompts, decoding, limits=limits, end_id=end_id, start_id=start_id, context=context)
    params, rules, end = net.unstacked(params), rules_of(decoding), _or_none(end_id)
    groups = asked.together()
    parts = [asked.part(rows).prepared(net) for rows in groups]
    for pieces in zip_longest(*(_pieces(net, rules, params, part, decoding, end, seed, 1) for part in parts)):
        tokens = np.full((len(prompts), decoding.num_return_sequences), end, np.int32)
        for rows, piece in zip(groups, pieces, strict=True):
            if piece is not None:
                tokens[rows] = piece.reshape(len(rows), -1)
        yield tokens


def _beams(net: Transformer, rules: Rules, params: Params, asked: Request, end: int, wanted: int) -> Generated:
    given = asked.prepared(net)
    # As many tokens as there are slots beside the prompt, and the one that is not read.
    room = given.slots - given.tokens.shape[1] + 1
    found, broken = search(net, rules, params, *given.arrays(), end, slots=given.slots, room=room)
    _require_numbers(broken)
    exist = np.asarray(found.exist)[:, :wanted]
    require(
        bool(exist.all()),
        f"num_return_sequences is {wanted}, and the beam search has found {exist.sum(1).min()} sequences for a prompt; "
        "expected less, or more tokens",
    )
    lengths = np.asarray(found.lengths)[:, :wanted]
    return Generated(
        np.asarray(found.tokens)[:, :wanted, : int(lengths.max())], lengths, np.asarray(found.scores)[:, :wanted]
    )


def _pieces(
    net: Transformer,
    rules: Rules,
    params: Params,
    given: Prompts,
    decoding: DecodingConfig,
    end: int,
    seed: int,
    piece: int,
) -> Iterator[np.ndarray]:
    """The tokens, int32 `[B * R, n]`: the first one, then up to `piece` at a time."""
    keys = row_keys(jax.random.key(seed), given.hashes, decoding.num_return_sequences)
    state = start(net, rules, params, *given.arrays(), end, keys, slots=given.slots)
    _require_numbers(state.broken)
    first = np.asarray(state.token)[:, None]
    yield first
    made, used, most = 1, given.tokens.shape[1], int(given.limits.max())
    # `room` is static: one compilation serves all.
    room = 1 if piece == 1 else given.slots
    # What the model may still have to be told again.
    history = _history(given, decoding.num_return_sequences, first) if given.slides else None
    while made < most and not np.asarray(state.done).all():
        if used == given.slots:
            assert history is not None
            state, used = _forget(net, params, state, history, given.slots)
        state, tokens = advance(net, rules, params, state, end, min(piece, most - made, given.slots - used), room)
        _require_numbers(state.broken)
        count = int(state.made) - made
        new = np.asarray(tokens)[:, :count]
        made, used = made + count, used + count
        if history is not None:
            history = [[*row, *more][-given.slots :] for row, more in zip(history, new.tolist(), strict=True)]
        yield new


def _require_numbers(broken: jax.Array) -> None:
    require(
        not broken, "the model's logits are NaN; its parameters are damaged, or its training has failed; use another"
    )


def _history(given: Prompts, samples: int, first: np.ndarray) -> list[list[int]]:
    rows = [row[mask].tolist() for row, mask in zip(given.tokens, given.mask, strict=True) for _ in range(samples)]
    return [[*row, token] for row, token in zip(rows, first[:, 0].tolist(), strict=True)]


def _forget(net: Transformer, params: Params, state: State, history: list[list[int]], slots: int) -> tuple[State, int]:
    """A state whose cache holds the newer half of what it held, and the number of slots in use."""
    # The last token of all has been chosen and not been read.
    length = max(slots // 2, 1)
    tokens, mask = padded([row[-1 - length : -1] for row in history], length, side="left")
    return restart(net, params, state, jnp.asarray(tokens), jnp.asarray(mask), slots), length


def _or_none(end_id: int | None) -> int:
    """An end token that never comes, where there is none."""
    return -1 if end_id is None else end_id
