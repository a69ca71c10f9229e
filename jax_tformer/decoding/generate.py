"""Continues prompts: `generate` returns all tokens at once, `stream` one at a time; an `Answerer` answers texts."""

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain, zip_longest
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError, require, require_field, require_ids
from jax_tformer.config.experiment import DecodingConfig
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding.loop import (
    State,
    advance,
    grow_cache,
    layers_apart,
    restart,
    row_keys,
    start,
)
from jax_tformer.decoding.sampling import History, make_rules
from jax_tformer.decoding.texts import Completion, Ids, Prompt, TextStream, decode_added, framing_of
from jax_tformer.functional import AnyTransformer, DecoderTransformer, EncoderOnlyTransformer, Params
from jax_tformer.model.parameters import row_parts
from jax_tformer.startup import require_memory
from jax_tformer.training.sharding import mesh_of, use_mesh_of

STEP = 32
"""Lengths are rounded up to a multiple of this, so that prompts of many lengths need only one compilation."""
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
    net, params, batch = _prepare(net, params, prompts, decoding, limits, end_id, start_id, context)
    if decoding.num_beams > 1:
        require(context is None, f"context is {context} and num_beams {decoding.num_beams}; expected one of them")
        beams = _last(_decode(net, params, batch, decoding, seed, at_once=True)).beams
        assert beams is not None
        wanted = decoding.num_return_sequences
        new, lengths, scores = (np.asarray(x)[:, :wanted] for x in beams.finished)
        least = int(beams.finished.exist.sum(1).min())
        require_field(
            wanted <= least,
            "num_return_sequences",
            f"is {wanted}, and the beam search has found {least} sequences for a prompt; expected less, or more tokens",
        )
        columns = np.arange(lengths.max())
        new = np.where(columns < lengths[..., None], new[..., columns], batch.end_ids[0])
        return Generated(new, lengths, scores)
    tokens = np.full((len(prompts), decoding.num_return_sequences, int(batch.limits.max())), batch.end_ids[0], np.int32)
    for rows, part in batch.groups:
        new = _new_tokens(_last(_decode(net, params, part, decoding, seed, at_once=True)))
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
    net, params, batch = _prepare(net, params, prompts, decoding, limits, end_id, start_id, context)
    groups = batch.groups
    for states in zip_longest(*(_decode(net, params, part, decoding, seed, at_once=False) for _, part in groups)):
        tokens = np.full((len(prompts), decoding.num_return_sequences), batch.end_ids[0], np.int32)
        for (rows, _), state in zip(groups, states, strict=True):
            if state is not None:
                tokens[rows] = _new_tokens(state)[:, -1].reshape(len(rows), -1)
        yield tokens


@dataclass
class Answerer:
    """A model that continues prompts or translates sources by a DecodingConfig.

    With `context`, a text with this many tokens drops the older half and continues. At most `batch` texts are answered
    at once.
    """

    net: AnyTransformer
    params: Params
    tokenizer: Tokenizer
    decoding: DecodingConfig
    _: KW_ONLY
    seed: int = 0
    context: int | None = None
    batch: int

    def __post_init__(self) -> None:
        decoding = self.decoding
        # Done once here instead of in every batch.
        rows = self.batch * max(decoding.num_beams, decoding.num_return_sequences)
        self.params = layers_apart(self.params, rows=rows)
        self._translates = self.net.config.encoder is not None
        framing = framing_of(self.tokenizer, self._translates)
        self._end_ids = framing.end_ids
        self._options: dict[str, Any] = {
            "end_id": self._end_ids or None,
            "start_id": framing.start_id,
            "seed": self.seed,
            "context": self.context,
        }
        self._rows = 1

    def answers(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        """Returns the completions of each prompt, the best or first one first."""
        # Keeps the number of rows, so that a smaller last batch needs no compilation. A mesh divides it.
        self._rows = max(self._rows, round_up(len(prompts), step=row_parts(mesh_of(self.params))))
        filled = [*prompts, *[prompts[-1]] * (self._rows - len(prompts))]
        ids = [prompt.ids for prompt in filled]
        limits = [prompt.limit for prompt in filled]
        found = generate(self.net, self.params, ids, self.decoding, limits=limits, **self._options)
        scores = (np.full(found.lengths.shape, None) if found.scores is None else found.scores).tolist()
        answered = []
        for row, prompt in enumerate(prompts):
            completions = []
            for tokens, score in zip(found.rows(row), scores[row], strict=True):
                finished = tokens[-1] in self._end_ids
                said = tokens[:-1] if finished else tokens
                text = decode_added(self.tokenizer, [] if self._translates else prompt.ids, said)
                completions.append(Completion(text, said, finished, score))
            answered.append(completions)
        return answered

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """Streams the single answer to a prompt: a piece, perhaps empty, for every token, and a last one."""
        pieces = TextStream(self.tokenizer, [] if self._translates else prompt.ids)
        tokens = stream(self.net, self.params, [prompt.ids], self.decoding, limits=[prompt.limit], **self._options)
        for token in (int(each.item()) for each in tokens):
            yield "" if token in self._end_ids else pieces.push(token)
        yield pieces.finish()


class PromptBatch(NamedTuple):
    """The checked prompts of one call of `generate`, and the bounds of their answers."""

    ids: Sequence[Ids]
    """The prompts of a decoder-only model, or the sources of an encoder-decoder."""
    limits: np.ndarray
    """int32 `[B]`, the largest number of new tokens of each."""
    start_id: int | None
    end_ids: tuple[int, ...]
    """-1, which never occurs, if no token ends an answer."""
    context: int | None
    """When a text has this many tokens, it drops the older half and continues: it slides. None: no text slides."""

    @property
    def groups(self) -> "list[tuple[list[int], PromptBatch]]":
        """The prompts that are continued together, with their numbers: one group of those that fit, and one for each
        length of those that slide.

        Padding takes slots, so it changes where a text slides; the rest of the batch must not change that.
        """
        groups: dict[int, list[int]] = {}
        for row, (ids, limit) in enumerate(zip(self.ids, self.limits, strict=True)):
            # The last token does not count: it is chosen but never read.
            slides = self.context is not None and len(ids) + limit - 1 > self.context
            groups.setdefault(round_up(len(ids), step=self._step) if slides else 0, []).append(row)
        found = []
        for length, rows in groups.items():
            part = self._replace(ids=[self.ids[row] for row in rows], limits=self.limits[rows])
            found.append((rows, part if length else part._replace(context=None)))
        return found

    def pad(self, config: TransformerConfig) -> tuple[History, int]:
        """Returns the prompts of one group, with room for answers, and how many slots their cache needs in the end."""
        longest = max(map(len, self.ids))
        most = int(self.limits.max())
        if config.encoder is not None:
            source = pad_rows(self.ids, round_up(longest, config.encoder.max_positions), side="right")
            tokens = np.full((len(self.ids), 1), self.start_id, np.int32)
        else:
            length = round_up(longest, self.context or config.output_stack.max_positions, step=self._step)
            source = tokens = pad_rows(self.ids, length, side="left")
        slots = self.context or tokens.shape[1] + round_up(most - 1)
        return History.of(tokens, round_up(most), source, self.limits), slots

    @property
    def _step(self) -> int:
        """Lengths of texts that slide are rounded up to this, so that padding takes little of a small context."""
        return STEP if self.context is None else max(min(STEP, self.context // 4), 1)


def _prepare(
    net: AnyTransformer,
    params: Params,
    prompts: Sequence[Ids],
    decoding: DecodingConfig,
    limits: Sequence[int] | None,
    end_id: int | Sequence[int] | None,
    start_id: int | None,
    context: int | None,
) -> tuple[DecoderTransformer, Params, PromptBatch]:
    """Checks the arguments of `generate`; returns the model, its parameters with layers apart, and the prompts.

    Raises InputError for invalid ones.
    """
    decoder = require_decoder(net)
    config = net.config
    vocabulary = config.vocab_size or 0
    require(len(prompts) > 0, "there are no prompts; expected at least one")
    for number, prompt in enumerate(prompts, 1):
        require(len(prompt) > 0, f"prompt {number} of {len(prompts)} has no tokens; expected at least one")
        require_ids(np.asarray(prompt), vocabulary)
    ends = () if end_id is None else tuple(np.atleast_1d(end_id).tolist())
    forced = (start_id, decoding.forced_bos_token_id, decoding.forced_eos_token_id)
    never = (*decoding.suppress_tokens, *decoding.begin_suppress_tokens, *chain(*decoding.bad_words_ids))
    require_ids(np.asarray([*ends, *(id for id in forced if id is not None), *never], np.int64), vocabulary)
    largest = decoding.max_new_tokens
    allowed = np.full(len(prompts), largest) if limits is None else np.minimum(limits, largest)
    require(len(allowed) == len(prompts), f"there are {len(allowed)} limits; expected one a prompt, {len(prompts)}")
    require(allowed.min() >= 1, f"a limit is {allowed.min()}; expected at least 1 new token")
    longest = max(map(len, prompts))
    stack = config.output_stack
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
    asked = rows * numbers // row_parts(mesh_of(params))
    require_memory(asked, f"{rows:,} answers at once", mend, jax.local_devices()[0])
    batch = PromptBatch(prompts, allowed.astype(np.int32), start_id, ends or (-1,), context)
    return decoder, layers_apart(params, rows=None), batch


def _decode(
    net: DecoderTransformer, params: Params, batch: PromptBatch, decoding: DecodingConfig, seed: int, *, at_once: bool
) -> Iterator[State]:
    """Yields the state of a group after its first token, and then after each one, or after as many as there is room.

    A state is gone when the next one is asked for.
    """
    rules = make_rules(decoding, batch.end_ids)
    prompts, needed = batch.pad(net.config)
    limit = int(batch.limits.max())
    hashes = np.array([zlib.crc32(np.asarray(ids, "<i4").tobytes()) for ids in batch.ids], np.uint32)
    keys = row_keys(jax.random.key(seed), hashes, max(decoding.num_return_sequences, decoding.num_beams))
    # The token chosen last is not in the cache yet.
    filled = int(prompts.length)
    made = 1
    # A step reads every slot, so there are few while the text is short.
    length = cache_length(filled, needed)
    with use_mesh_of(params):
        state = start(net, rules, params, prompts, keys, cache_length=length, room=round_up(limit))
    while True:
        require(
            not state.broken,
            "the model's logits are NaN; its parameters are damaged, or its training has failed; use another",
        )
        yield state
        if made == limit or np.asarray(state.done).all():
            return
        with use_mesh_of(params):
            if filled == needed:
                # The newer half stays; the very last token has been chosen but not yet read.
                filled = max(needed // 2, 1)
                state = restart(net, params, state, filled, needed)
            elif filled == length:
                length = cache_length(filled, needed)
                state = state._replace(cache=grow_cache(state.cache, length))
            steps = min(limit - made, length - filled) if at_once else 1
            state = advance(net, rules, params, state, steps)
        filled += steps
        made += steps


def _last(states: Iterator[State]) -> State:
    return deque(states, maxlen=1).pop()


def _new_tokens(state: State) -> np.ndarray:
    """Returns the new tokens of each row so far, int32 `[N, n]`."""
    end = int(state.history.length)
    return np.array(state.history.tokens)[:, end - int(state.history.made) : end]


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


def pad_rows(rows: Sequence[Ids], length: int, *, side: Literal["left", "right"]) -> np.ndarray:
    """Pads the rows on `side` with -1, which is no token: int32 `[B, length]`."""
    ids = np.full((len(rows), length), -1, np.int32)
    for number, row in enumerate(rows):
        ids[number, slice(length - len(row), length) if side == "left" else slice(len(row))] = row
    return ids


def require_positions(limit: int | None, length: int, what: str) -> None:
    """Raises InputError if `what`, of `length` tokens, is longer than the positions of the model."""
    require(limit is None or length <= limit, f"{what} has {length} tokens; the model has {limit} positions")


def round_up(length: int, limit: int | None = None, *, step: int = STEP) -> int:
    """Rounds `length` up to a multiple of `step`, but not above `limit`."""
    up = -(-length // step) * step
    return up if limit is None else min(up, limit)
