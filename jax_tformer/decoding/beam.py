"""Beam search, compiled, with the semantics of Hugging Face's `generate`, and with the paper's length penalty."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_tformer.cache import Cache
from jax_tformer.decoding.loop import Prompts, extend, mark_seen, prefill, start_history, take_sequences
from jax_tformer.decoding.sampling import History, Rules, Seen, Step, restrict
from jax_tformer.functional import DecoderTransformer, Params

_NEVER = -1e9
"""The score of a sequence that does not exist."""


class Sequences(NamedTuple):
    """W sequences of new tokens for each of B prompts, best first."""

    tokens: Int[Array, "B W M"]
    """After its last token, a row is filled with the first end token."""
    lengths: Int[Array, "B W"]
    """The number of tokens, the end token included."""
    scores: Float[Array, "B W"]
    exist: Bool[Array, "B W"]
    """Whether there is a sequence; otherwise the score is below all others."""

    def take(self, numbers: Int[Array, "B w"]) -> "Sequences":
        """Returns the sequences with the given numbers, in that order."""
        tokens = jnp.take_along_axis(self.tokens, numbers[:, :, None], axis=1)
        return Sequences(tokens, *(jnp.take_along_axis(x, numbers, axis=1) for x in self[1:]))

    def best(self, count: int) -> "Sequences":
        """Returns the `count` sequences with the highest scores."""
        return self.take(jax.lax.top_k(self.scores, count)[1])


class Beams(NamedTuple):
    """The state of a beam search."""

    running: Sequences
    """Unfinished sequences; their scores are sums of log-probabilities."""
    finished: Sequences
    """Finished sequences; their scores are divided by the length penalty."""
    improvable: Bool[Array, " B"]
    """Whether an unfinished sequence might still overtake a finished one."""
    seen: Seen
    """Of N = B * W beams."""
    prompts: History | None
    """The prompt of each of B * W sequences; None where the rules do not look back."""
    cache: Cache
    limits: Int[Array, " B"]
    length: Int[Array, ""]
    """How many tokens the unfinished sequences have."""
    broken: Bool[Array, ""]
    """Whether an unfinished sequence had NaN among its logits."""
    closed: Bool[Array, " B"]
    """Which prompts' finished sequences are final."""


@partial(jax.jit, static_argnames=("net", "cache_length", "room"))
def start_search(
    net: DecoderTransformer,
    rules: Rules,
    params: Params,
    prompts: Prompts,
    cache_length: int,
    room: int,
) -> Beams:
    """Reads the prompts (see `start` in loop.py) and chooses the first token of W = `num_beams` sequences for each.

    The cache has `cache_length` slots. No sequence gets more than `room` tokens (M).
    """
    batch, width = len(prompts.tokens), rules.num_beams
    logits, cache = prefill(net, params, prompts, cache_length)
    nothing = Sequences(
        jnp.full((batch, width, room), rules.end_ids[0], jnp.int32),
        jnp.zeros((batch, width), jnp.int32),
        jnp.full((batch, width), _NEVER, logits.dtype),
        jnp.zeros((batch, width), bool),
    )
    rows = jnp.repeat(jnp.arange(batch), width)
    beams = Beams(
        # At first all beams are equal, so one of them is enough.
        nothing._replace(scores=nothing.scores.at[:, 0].set(0), exist=nothing.exist.at[:, 0].set(True)),
        nothing,
        jnp.ones(batch, bool),
        mark_seen(net, rules, prompts, rows),
        start_history(rules, prompts, rows, 0),
        take_sequences(cache, rows),
        prompts.limits,
        jnp.asarray(0, jnp.int32),
        jnp.asarray(False),
        jnp.zeros(batch, bool),
    )
    return _extend_beams(rules, beams, jnp.repeat(logits[:, None], width, axis=1))


@partial(jax.jit, static_argnames="net", donate_argnames="beams")
def search(
    net: DecoderTransformer,
    rules: Rules,
    params: Params,
    beams: Beams,
    steps: Int[Array, ""],
) -> Beams:
    """Searches on for up to `steps` tokens, for which the cache must have room, or until it is over. Donates `beams`.

    Every step considers the (1 + E) W best continuations of the W unfinished sequences, so that W of them do not end.
    Those among the first W that end, or are as long as `limits` allows, compete for the W finished sequences. The W
    best of those that do not end continue.
    """
    last = beams.length + steps

    def one_more(beams: Beams) -> Beams:
        tokens = jax.lax.dynamic_index_in_dim(beams.running.tokens, beams.length - 1, axis=2, keepdims=False)
        logits, cache = extend(net, params, tokens.reshape(-1, 1), beams.cache)
        return _extend_beams(rules, beams._replace(cache=cache), logits.reshape(*tokens.shape, -1))

    return jax.lax.while_loop(lambda beams: ~beams.closed.all() & (beams.length < last), one_more, beams)


def _extend_beams(rules: Rules, beams: Beams, logits: Float[Array, "B W V"]) -> Beams:
    """Returns the beams with one more token."""
    limits, end_ids = beams.limits, rules.end_ids
    (batch, width, vocabulary), running = logits.shape, beams.running
    broken = jnp.isnan(logits).any((1, 2)) & ~beams.closed
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    history = None if beams.prompts is None else _history(beams.prompts, running.tokens, beams.length)
    step = Step(beams.length, jnp.repeat(limits, width), history)
    log_probabilities = restrict(log_probabilities.reshape(-1, vocabulary), rules, beams.seen, step)
    log_probabilities = log_probabilities.reshape(logits.shape)
    if rules.renormalize_logits:
        log_probabilities = jax.nn.log_softmax(log_probabilities, axis=-1)
    total = (running.scores[:, :, None] + log_probabilities).reshape(batch, -1)
    scores, best = jax.lax.top_k(total, min(max(2, 1 + len(end_ids)) * width, total.shape[1]))
    origins, token = best // vocabulary, (best % vocabulary).astype(jnp.int32)
    length = beams.length + 1
    longer = running.take(origins)
    longer = Sequences(longer.tokens.at[:, :, beams.length].set(token), longer.lengths + 1, scores, longer.exist)
    ends = jnp.isin(token, end_ids) | (length >= limits)[:, None]

    # Finished sequences, old and new.
    enters = ends & (jnp.arange(scores.shape[1]) < width)[None] & longer.exist & ~beams.closed[:, None]
    new = longer._replace(
        scores=jnp.where(enters, scores / _penalty(rules, length, scores.dtype), _NEVER), exist=enters
    )
    both = Sequences(*(jnp.concatenate(pair, axis=1) for pair in zip(beams.finished, new, strict=True)))
    finished = both.best(width)

    # Unfinished ones.
    running = longer._replace(scores=jnp.where(ends, _NEVER, scores), exist=longer.exist & ~ends)
    best = jax.lax.top_k(running.scores, width)[1]
    running = running.take(best)
    rows = (jnp.take_along_axis(origins, best, axis=1) + width * jnp.arange(batch)[:, None]).reshape(-1)
    seen = beams.seen
    if seen is not None:
        seen = seen[rows].at[jnp.arange(len(rows)), jnp.take_along_axis(token, best, axis=1).reshape(-1)].set(True)

    hoped = running.scores[:, 0] / _penalty(rules, _hoped_length(rules, length, limits), scores.dtype)
    # Any sequence is better than a free place.
    improvable = beams.improvable & (~finished.exist.all(1) | (hoped > finished.scores.min(1)))
    full = finished.exist.all(1) if rules.early_stopping is True else False
    return Beams(
        running,
        finished,
        improvable,
        seen,
        beams.prompts,
        take_sequences(beams.cache, rows),
        limits,
        length,
        beams.broken | broken.any(),
        ~improvable | full | (length >= limits),
    )


def _history(prompts: History, tokens: Int[Array, "B W M"], length: Int[Array, ""]) -> History:
    """Returns the prompts with the first `length` tokens of the beams behind them."""
    new = jnp.where(jnp.arange(tokens.shape[2]) < length, tokens, -1).reshape(-1, tokens.shape[2])
    return prompts._replace(tokens=jnp.concatenate([prompts.tokens, new], axis=1), length=prompts.length + length)


def _hoped_length(rules: Rules, length: Int[Array, ""], limits: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns the length at which an unfinished sequence may still win: its own, or its limit if length is rewarded."""
    length = jnp.broadcast_to(length, limits.shape)
    return jnp.where(rules.length_penalty > 0, limits, length) if rules.early_stopping == "never" else length


def _penalty(rules: Rules, length: Int[Array, "*B"], dtype: jnp.dtype) -> Float[Array, "*B"]:
    """Returns the divisor of the log-probability of a sequence of `length` tokens."""
    tokens = length.astype(dtype)
    if rules.length_penalty_form == "paper":
        tokens = (5 + tokens) / 6
    return tokens ** rules.length_penalty.astype(dtype)
