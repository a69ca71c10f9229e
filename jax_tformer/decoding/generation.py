"""Continues prompts: `generate` returns all tokens at once, `stream` one at a time."""

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tformer.config.errors import InputError, require, require_field, require_ids
from jax_tformer.decoding.beam import search, start_search
from jax_tformer.decoding.fast import unstacked
from jax_tformer.decoding.loop import advance, grown, restart, row_keys, start
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.decoding.strategies import rules_of
from jax_tformer.functional import AnyTransformer, DecoderTransformer, EncoderOnlyTransformer, Params
from jax_tformer.memory import require_memory

Ids = Sequence[int] | np.ndarray
"""Token ids of one text."""
STEP = 32
"""Lengths are rounded up to a multiple of this, so that prompts of many lengths need only one compilation."""
SHORT = 256
"""A long cache begins with so many slots. When they are full it gets four times as many: each length is compiled."""
Arrays = tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None, jax.Array]
"""Tokens `[B, P]`, padded on the left, and their mask; a translation's source and its mask; limits `[B]`."""


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


class Prompts(NamedTuple):
    """The checked prompts of one call, and the bounds of their answers."""

    ids: Sequence[Ids]
    """The prompts of a decoder-only model, or the sources of an encoder-decoder."""
    limits: np.ndarray
    """int32 `[B]`, the most new tokens of each."""
    start_id: int | None
    end_ids: tuple[int, ...]
    """-1, which never occurs, if no token ends an answer."""
    context: int | None
    """When a text has this many tokens, it drops the older half and continues: it slides. None: no text slides."""

    @property
    def slides(self) -> list[bool]:
        """Which prompts grow beyond the context. The last token does not count: it is chosen but never read."""
        ends = [len(ids) + int(limit) - 1 for ids, limit in zip(self.ids, self.limits, strict=True)]
        return [self.context is not None and end > self.context for end in ends]

    @property
    def groups(self) -> "list[tuple[list[int], Prompts]]":
        """The prompts that are continued together, with their numbers: one group of those that fit, and one for each
        length of those that slide.

        Padding takes slots, so it changes where a text slides; the rest of the batch must not change that.
        """
        groups: dict[int, list[int]] = {}
        for row, (ids, slides) in enumerate(zip(self.ids, self.slides, strict=True)):
            groups.setdefault(rounded(len(ids), step=self._step) if slides else 0, []).append(row)

        def part(rows: list[int]) -> Prompts:
            return self._replace(ids=[self.ids[row] for row in rows], limits=self.limits[rows])

        return [(rows, part(rows)) for rows in groups.values()]

    def arrays(self, net: AnyTransformer) -> tuple[Arrays, int]:
        """Returns the prompts of one group as arrays, and the number of slots of their cache, padding included."""
        encoder, decoder, source = net.config.encoder, net.config.output_stack, None
        longest, more = max(map(len, self.ids)), rounded(int(self.limits.max()) - 1)
        if encoder is not None:
            source = padded(self.ids, rounded(longest, encoder.max_positions), side="right")
            tokens = np.full((len(self.ids), 1), self.start_id, np.int32)
            mask, slots = np.ones(tokens.shape, bool), 1 + more
        elif self.context is not None and any(self.slides):
            slots = self.context
            tokens, mask = padded(self.ids, rounded(longest, slots, step=self._step), side="left")
        else:
            length = rounded(longest, decoder.max_positions)
            tokens, mask = padded(self.ids, length, side="left")
            slots = length + more
        return jax.tree.map(jnp.asarray, (tokens, mask, source, self.limits)), slots

    @property
    def _step(self) -> int:
        """Lengths of texts that slide are rounded up to this, so that padding takes little of a small context."""
        return STEP if self.context is None else max(min(STEP, self.context // 4), 1)


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
    net, asked = require_speaker(net), _asked(net, prompts, decoding, limits, end_id, start_id, context)
    params = unstacked(params)
    if decoding.num_beams > 1:
        require(context is None, f"context is {context} and num_beams {decoding.num_beams}; expected one of them")
        return _beams(net, params, asked, decoding)
    tokens = np.full((len(prompts), decoding.num_return_sequences, int(asked.limits.max())), asked.end_ids[0], np.int32)
    for rows, part in asked.groups:
        made = np.concatenate(list(_pieces(net, params, part, decoding, seed, at_once=True)), axis=1)
        tokens[rows, :, : made.shape[1]] = made.reshape(len(rows), -1, made.shape[1])
    ended = np.isin(tokens, asked.end_ids)
    lengths = np.where(ended.any(-1), ended.argmax(-1) + 1, tokens.shape[-1]).astype(np.int32)
    lengths = np.minimum(lengths, asked.limits[:, None])
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
    net, asked = require_speaker(net), _asked(net, prompts, decoding, limits, end_id, start_id, context)
    params = unstacked(params)
    groups = asked.groups
    for pieces in zip_longest(*(_pieces(net, params, part, decoding, seed, at_once=False) for _, part in groups)):
        tokens = np.full((len(prompts), decoding.num_return_sequences), asked.end_ids[0], np.int32)
        for (rows, _), piece in zip(groups, pieces, strict=True):
            if piece is not None:
                tokens[rows] = piece.reshape(len(rows), -1)
        yield tokens


def _asked(
    net: AnyTransformer,
    prompts: Sequence[Ids],
    decoding: DecodingConfig,
    limits: Sequence[int] | None,
    end_id: int | Sequence[int] | None,
    start_id: int | None,
    context: int | None,
) -> Prompts:
    """Checks the arguments of `generate`; raises InputError for invalid ones."""
    config, vocabulary = net.config, net.config.vocab_size or 0
    require(len(prompts) > 0, "there are no prompts; expected at least one")
    for number, prompt in enumerate(prompts, 1):
        require(len(prompt) > 0, f"prompt {number} of {len(prompts)} has no tokens; expected at least one")
        require_ids(np.asarray(prompt), vocabulary)
    ends = () if end_id is None else (end_id,) if isinstance(end_id, int | np.integer) else tuple(end_id)
    start = () if start_id is None else (start_id,)
    forced = (token for token in (decoding.forced_bos_token_id, decoding.forced_eos_token_id) if token is not None)
    never = (*decoding.suppress_tokens, *decoding.begin_suppress_tokens, *chain(*decoding.bad_words_ids))
    require_ids(np.asarray([*ends, *start, *forced, *never], np.int64), vocabulary)
    most = decoding.max_new_tokens
    allowed = np.full(len(prompts), most) if limits is None else np.minimum(limits, most)
    require(len(allowed) == len(prompts), f"there are {len(allowed)} limits; expected one a prompt, {len(prompts)}")
    require(bool(allowed.min() >= 1), f"a limit is {allowed.min()}; expected at least 1 new token")
    longest, positions = max(map(len, prompts)), config.output_stack.max_positions
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
    rows, stack = len(prompts) * max(decoding.num_beams, decoding.num_return_sequences), config.output_stack
    # The least: the tokens and one row of logits, and the first slots of the cache, with keys and values.
    slots = min(int(allowed.max()) + (0 if config.encoder else longest), SHORT, context or SHORT)
    width = 2 * stack.num_layers * (stack.key_value_heads or stack.num_heads) * config.head_width(stack)
    numbers = slots * width * jnp.dtype(config.compute.dtype).itemsize + 4 * (vocabulary + int(allowed.max()))
    mend = "ask for fewer at once (--batch-size, --beam, --num-samples), or for fewer new tokens (--max-new-tokens)"
    require_memory(rows * numbers, f"{rows:,} answers at once", mend, jax.local_devices()[0])
    return Prompts(prompts, allowed.astype(np.int32), start_id, ends or (-1,), context)


def _beams(net: DecoderTransformer, params: Params, asked: Prompts, decoding: DecodingConfig) -> Generated:
    rules, wanted = rules_of(decoding, asked.end_ids), decoding.num_return_sequences
    ends = jnp.asarray(asked.end_ids, jnp.int32)
    arrays, slots = asked.arrays(net)
    used, limits = arrays[0].shape[1], arrays[-1]
    held = held_slots(used, slots)
    # One token for each slot beside the prompt, and the last one, which is not read.
    beams = start_search(net, rules, params, *arrays, ends, slots=held, room=slots - used + 1)
    while not np.asarray(beams.closed).all():
        if used == held:
            held = held_slots(used, slots)
            beams = beams._replace(cache=grown(beams.cache, held))
        beams, used = search(net, rules, params, beams, limits, ends, held - used), held
    _require_numbers(beams.broken)
    found = beams.finished
    exist = np.asarray(found.exist)[:, :wanted]
    fewest = f"is {wanted}, and the beam search has found {exist.sum(1).min()} sequences for a prompt"
    require_field(bool(exist.all()), "num_return_sequences", f"{fewest}; expected less, or more tokens")
    made, lengths, scores = (np.asarray(best)[:, :wanted] for best in found[:3])
    return Generated(made[:, :, : int(lengths.max())], lengths, scores)


def _pieces(
    net: DecoderTransformer, params: Params, asked: Prompts, decoding: DecodingConfig, seed: int, *, at_once: bool
) -> Iterator[np.ndarray]:
    """Yields the tokens of a group, int32 `[B * R, n]`: the first, then one at a time or as many as there is room."""
    rules, samples = rules_of(decoding, asked.end_ids), decoding.num_return_sequences
    ends = jnp.asarray(asked.end_ids, jnp.int32)
    arrays, slots = asked.arrays(net)
    used, made, most = arrays[0].shape[1], 1, int(asked.limits.max())
    # A step reads every slot, so there are few while the text is short.
    held = held_slots(used, slots)
    hashes = np.array([zlib.crc32(np.asarray(ids, "<i4").tobytes()) for ids in asked.ids], np.uint32)
    keys = row_keys(jax.random.key(seed), hashes, samples)
    room = rounded(most) if rules.look_back else 0
    state = start(net, rules, params, *arrays, ends, keys, slots=held, room=room)
    _require_numbers(state.broken)
    yield (new := np.asarray(state.token)[:, None])
    # The tokens that a sliding text reads again, into a new cache.
    texts = [[*ids] for ids in asked.ids for _ in range(samples)] if any(asked.slides) else []
    while made < most and not np.asarray(state.done).all():
        texts = [[*text, *more][-slots:] for text, more in zip(texts, new.tolist(), strict=False)]
        if used == slots:
            # The newer half stays; the very last token has been chosen but not yet read.
            used = max(slots // 2, 1)
            tokens, mask = padded([text[-1 - used : -1] for text in texts], used, side="left")
            state = restart(net, params, state, jnp.asarray(tokens), jnp.asarray(mask), slots)
        elif used == held:
            held = held_slots(used, slots)
            state = state._replace(cache=grown(state.cache, held))
        steps = min(most - made, held - used) if at_once else 1
        # The number of steps is traced and their room is static, so one compilation is enough.
        state, tokens = advance(net, rules, params, state, ends, steps, held if at_once else 1)
        _require_numbers(state.broken)
        count = int(state.made) - made
        made, used = made + count, used + count
        yield (new := np.asarray(tokens)[:, :count])


def _require_numbers(broken: jax.Array) -> None:
    require(
        not broken, "the model's logits are NaN; its parameters are damaged, or its training has failed; use another"
    )


def require_speaker(net: AnyTransformer) -> DecoderTransformer:
    """Returns the model itself; raises InputError unless it predicts the next token."""
    if isinstance(net, EncoderOnlyTransformer) or not net.config.predicts_tokens:
        raise InputError(
            "the model has no decoder with a head on it; expected one that gives the next token a probability"
        )
    return net


def padded(rows: Sequence[Ids], length: int, *, side: Literal["left", "right"]) -> tuple[np.ndarray, np.ndarray]:
    """Pads the rows on `side`: returns ids, int32 `[B, length]`, and a mask, bool `[B, length]`, True at tokens."""
    ids, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for number, row in enumerate(rows):
        place = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, True
    return ids, mask


def require_positions(limit: int | None, length: int, what: str) -> None:
    """Raises InputError if `what`, of `length` tokens, is longer than the learned positions of the model."""
    require(limit is None or length <= limit, f"{what} has {length} tokens; the model has {limit} learned positions")


def held_slots(used: int, slots: int) -> int:
    """Returns the slots of a cache of which `used` are filled and `slots` may be: a few more, or all of them."""
    held = SHORT
    while held < used + STEP:
        held *= 4
    return held if 2 * held <= slots else slots


def rounded(length: int, limit: int | None = None, *, step: int = STEP) -> int:
    """Rounds `length` up to a multiple of `step`, but not above `limit`."""
    up = -(-length // step) * step
    return up if limit is None else min(up, limit)
