"""Continues prompts: `generate` returns all tokens at once, `stream` one at a time."""

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tformer.config.errors import InputError, require, require_field, require_ids
from jax_tformer.decoding.loop import (
    Prompts,
    advance,
    grow_cache,
    restart,
    row_keys,
    search,
    start,
    start_search,
    unstack_layers,
)
from jax_tformer.decoding.prompts import STEP, Ids, PromptBatch, pad_rows, require_positions, round_up
from jax_tformer.decoding.sampling import make_rules
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.functional import AnyTransformer, DecoderTransformer, EncoderOnlyTransformer, Params
from jax_tformer.memory import require_memory

SHORT = 256
"""A long cache begins with so many slots. When they are full it gets four times as many: each length is compiled."""


class Generated(NamedTuple):
    """R sequences of new tokens for each of B prompts."""

    tokens: np.ndarray
    """int32 `[B, R, N]`; after its end, a row is filled with the (first) end token, or -1 without one."""
    lengths: np.ndarray
    """int32 `[B, R]`, the number of tokens of each row, its end token included."""
    scores: np.ndarray | None
    """`[B, R]`, best first: log-probability divided by the length penalty; None without a beam search."""

    def rows(self, prompt: int) -> list[list[int]]:
        """Returns the new tokens of one prompt's sequences, end tokens included."""
        return [row[:length].tolist() for row, length in zip(self.tokens[prompt], self.lengths[prompt], strict=True)]


def generate(
    net: AnyTransformer,
    params: Params,
    prompts: Sequence[Ids],
    decoding: DecodingConfig,
    *,
    limits: Sequence[int] | None = None,
    end_id: int | Sequence[int] | None = None,
    start_id: int | None = None,
    seed: int = 0,
    context: int | None = None,
) -> Generated:
    """Continues the prompts of a decoder-only model, or translates the sources of an encoder-decoder.

    Rows end with `end_id` (or one of several), if given, or after max_new_tokens, or after the prompt's number in
    `limits`. Translations begin with `start_id`. With the same seed a prompt gets the same tokens whatever else is in
    the batch (except for near ties that rounding decides, as in bfloat16). With `context`, a decoder-only model may
    write more tokens than that: whenever the context is full, it forgets all but the newer half. Without it, prompt
    and new tokens must fit into learned positions.

    Raises InputError for what does not fit, an empty batch or prompt, ids outside the vocabulary, a model whose logits
    are NaN, and a beam search that finds fewer than num_return_sequences sequences.
    """
    net, batch = require_decoder(net), _check(net, prompts, decoding, limits, end_id, start_id, context)
    params = unstack_layers(params)
    if decoding.num_beams > 1:
        require(context is None, f"context is {context} and num_beams {decoding.num_beams}; expected one of them")
        return _search(net, params, batch, decoding)
    tokens = np.full((len(prompts), decoding.num_return_sequences, int(batch.limits.max())), batch.end_ids[0], np.int32)
    for rows, part in batch.groups:
        new = np.concatenate(list(_continue(net, params, part, decoding, seed, at_once=True)), axis=1)
        tokens[rows, :, : new.shape[1]] = new.reshape(len(rows), -1, new.shape[1])
    ended = np.isin(tokens, batch.end_ids)
    lengths = np.where(ended.any(-1), ended.argmax(-1) + 1, tokens.shape[-1]).astype(np.int32)
    lengths = np.minimum(lengths, batch.limits[:, None])
    return Generated(tokens[..., : int(lengths.max())], lengths, None)


def stream(
    net: AnyTransformer,
    params: Params,
    prompts: Sequence[Ids],
    decoding: DecodingConfig,
    *,
    limits: Sequence[int] | None = None,
    end_id: int | Sequence[int] | None = None,
    start_id: int | None = None,
    seed: int = 0,
    context: int | None = None,
) -> Iterator[np.ndarray]:
    """Yields the tokens of `generate` as they are chosen, int32 `[B, R]` at a time, until all rows have ended.

    A row that has ended repeats the (first) end token, or -1 without one.
    """
    require(decoding.num_beams == 1, f"num_beams is {decoding.num_beams}; a beam search knows its tokens at the end")
    net, batch = require_decoder(net), _check(net, prompts, decoding, limits, end_id, start_id, context)
    params, groups = unstack_layers(params), batch.groups
    for pieces in zip_longest(*(_continue(net, params, part, decoding, seed, at_once=False) for _, part in groups)):
        tokens = np.full((len(prompts), decoding.num_return_sequences), batch.end_ids[0], np.int32)
        for (rows, _), piece in zip(groups, pieces, strict=True):
            if piece is not None:
                tokens[rows] = piece.reshape(len(rows), -1)
        yield tokens


def _check(
    net: AnyTransformer,
    prompts: Sequence[Ids],
    decoding: DecodingConfig,
    limits: Sequence[int] | None,
    end_id: int | Sequence[int] | None,
    start_id: int | None,
    context: int | None,
) -> PromptBatch:
    """Checks the arguments of `generate`; raises InputError for invalid ones."""
    config, vocabulary = net.config, net.config.vocab_size or 0
    require(len(prompts) > 0, "there are no prompts; expected at least one")
    for number, prompt in enumerate(prompts, 1):
        require(len(prompt) > 0, f"prompt {number} of {len(prompts)} has no tokens; expected at least one")
        require_ids(np.asarray(prompt), vocabulary)
    ends = () if end_id is None else (end_id,) if isinstance(end_id, int | np.integer) else tuple(end_id)
    single = (start_id, decoding.forced_bos_token_id, decoding.forced_eos_token_id)
    never = (*decoding.suppress_tokens, *decoding.begin_suppress_tokens, *chain(*decoding.bad_words_ids))
    require_ids(np.asarray([*ends, *(id for id in single if id is not None), *never], np.int64), vocabulary)
    largest = decoding.max_new_tokens
    allowed = np.full(len(prompts), largest) if limits is None else np.minimum(limits, largest)
    require(len(allowed) == len(prompts), f"there are {len(allowed)} limits; expected one a prompt, {len(prompts)}")
    require(bool(allowed.min() >= 1), f"a limit is {allowed.min()}; expected at least 1 new token")
    longest, stack = max(map(len, prompts)), config.output_stack
    positions = stack.max_positions
    if config.encoder is not None:
        require(context is None, f"context is {context}; expected None for an encoder-decoder, which cannot slide")
        require(start_id is not None, "start_id is None; an encoder-decoder needs a token to begin with")
        require_positions(config.encoder.max_positions, longest, "a source")
        require_positions(positions, int(allowed.max()), "with the start token, a translation")
    elif context is None:
        # The last token is chosen but not read.
        together = int(max(np.add([len(prompt) for prompt in prompts], allowed - 1)))
        require_positions(positions, together, "with its new tokens but the last, which is not read, a text")
    else:
        require(context >= 2, f"context is {context}; expected at least 2 tokens")
        require_positions(positions, context, "the context")
        require(longest <= context, f"a prompt has {longest} tokens; expected at most {context}, the context")
    rows = len(prompts) * max(decoding.num_beams, decoding.num_return_sequences)
    # The least: the tokens and one row of logits, and the first slots of the cache, with keys and values.
    slots = min(int(allowed.max()) + (0 if config.encoder else longest), SHORT, context or SHORT)
    width = 2 * stack.num_layers * (stack.key_value_heads or stack.num_heads) * config.head_width(stack)
    numbers = slots * width * jnp.dtype(config.compute.dtype).itemsize + 4 * (vocabulary + int(allowed.max()))
    mend = "ask for fewer at once (--batch-size, --beam, --num-samples), or for fewer new tokens (--max-new-tokens)"
    require_memory(rows * numbers, f"{rows:,} answers at once", mend, jax.local_devices()[0])
    return PromptBatch(prompts, allowed.astype(np.int32), start_id, ends or (-1,), context)


def _search(net: DecoderTransformer, params: Params, batch: PromptBatch, decoding: DecodingConfig) -> Generated:
    rules, wanted = make_rules(decoding, batch.end_ids), decoding.num_return_sequences
    prompts, needed = _pad(net, batch)
    filled = prompts.tokens.shape[1]
    length = cache_length(filled, needed)
    # One token for each slot beside the prompt, and the last one, which is not read.
    beams = start_search(net, rules, params, prompts, cache_length=length, room=needed - filled + 1)
    while not np.asarray(beams.closed).all():
        if filled == length:
            length = cache_length(filled, needed)
            beams = beams._replace(cache=grow_cache(beams.cache, length))
        beams, filled = search(net, rules, params, beams, length - filled), length
    _require_numbers(beams.broken)
    tokens, lengths, scores, exist = (np.asarray(best)[:, :wanted] for best in beams.finished)
    fewest = f"is {wanted}, and the beam search has found {exist.sum(1).min()} sequences for a prompt"
    require_field(bool(exist.all()), "num_return_sequences", f"{fewest}; expected less, or more tokens")
    return Generated(tokens[:, :, : int(lengths.max())], lengths, scores)


def _continue(
    net: DecoderTransformer, params: Params, batch: PromptBatch, decoding: DecodingConfig, seed: int, *, at_once: bool
) -> Iterator[np.ndarray]:
    """Yields the tokens of a group, int32 `[B * R, n]`: the first, then one at a time or as many as there is room."""
    rules, samples = make_rules(decoding, batch.end_ids), decoding.num_return_sequences
    prompts, needed = _pad(net, batch)
    filled, count, limit = prompts.tokens.shape[1], 1, int(batch.limits.max())
    # A step reads every slot, so there are few while the text is short.
    length = cache_length(filled, needed)
    hashes = np.array([zlib.crc32(np.asarray(ids, "<i4").tobytes()) for ids in batch.ids], np.uint32)
    keys = row_keys(jax.random.key(seed), hashes, samples)
    room = round_up(limit) if rules.look_back else 0
    state = start(net, rules, params, prompts, keys, cache_length=length, room=room)
    _require_numbers(state.broken)
    yield (new := np.asarray(state.token)[:, None])
    # The tokens that a sliding text reads again, into a new cache.
    texts = [[*ids] for ids in batch.ids for _ in range(samples)] if any(batch.slides) else []
    while count < limit and not np.asarray(state.done).all():
        texts = [[*text, *more][-needed:] for text, more in zip(texts, new.tolist(), strict=False)]
        if filled == needed:
            # The newer half stays; the very last token has been chosen but not yet read.
            filled = max(needed // 2, 1)
            tokens, mask = pad_rows([text[-1 - filled : -1] for text in texts], filled, side="left")
            part = Prompts(jnp.asarray(tokens), jnp.asarray(mask), None, state.limits)
            state = restart(net, params, state, part, needed)
        elif filled == length:
            length = cache_length(filled, needed)
            state = state._replace(cache=grow_cache(state.cache, length))
        steps = min(limit - count, length - filled) if at_once else 1
        # The number of steps is traced and their room is static, so one compilation is enough.
        state, tokens = advance(net, rules, params, state, steps, length if at_once else 1)
        _require_numbers(state.broken)
        new = np.asarray(tokens)[:, : int(state.new_tokens) - count]
        count, filled = count + new.shape[1], filled + new.shape[1]
        yield new


def _pad(net: DecoderTransformer, batch: PromptBatch) -> tuple[Prompts, int]:
    padded, needed = batch.pad(net.config)
    return Prompts(*jax.tree.map(jnp.asarray, padded)), needed


def _require_numbers(broken: jax.Array) -> None:
    require(
        not broken, "the model's logits are NaN; its parameters are damaged, or its training has failed; use another"
    )


def require_decoder(net: AnyTransformer) -> DecoderTransformer:
    """Returns the model itself; raises InputError unless it predicts the next token."""
    if isinstance(net, EncoderOnlyTransformer) or not net.config.predicts_tokens:
        raise InputError(
            "the model has no decoder with a head on it; expected one that gives the next token a probability"
        )
    return net


def cache_length(filled: int, needed: int) -> int:
    """Returns the length of a cache of which `filled` slots are taken and `needed` in the end: some more, or all."""
    length = SHORT
    while length < filled + STEP:
        length *= 4
    return length if 2 * length <= needed else needed
