"""Beam search, compiled, with the semantics of Hugging Face's `generate` and the paper's length penalty besides."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_tformer.decoding.loop import occurring, prefill
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.decoding.strategies import penalize_repetition
from jax_tformer.models.transformer import Transformer
from jax_tformer.nn.arrays import Params
from jax_tformer.nn.cache import Cache

_NEVER = -1e9
"""The score of a beam that does not exist."""


class Sequences(NamedTuple):
    """W sequences of new tokens for each of B prompts, best first."""

    tokens: Int[Array, "B W M"]
    """The end token in the places behind the last."""
    scores: Float[Array, "B W"]

    def take(self, chosen: Int[Array, "B w"]) -> "Sequences":
        """Those called `chosen`, in that order."""
        return Sequences(
            jnp.take_along_axis(self.tokens, chosen[:, :, None], axis=1),
            jnp.take_along_axis(self.scores, chosen, axis=1),
        )


class Beams(NamedTuple):
    """Where a beam search stands."""

    running: Sequences
    """Unfinished; their scores are sums of log-probabilities."""
    finished: Sequences
    """Their scores are divided by the length penalty; `_NEVER` where there is none yet."""
    improvable: Bool[Array, " B"]
    """An unfinished sequence might still overtake a finished one."""
    seen: Bool[Array, "B W V"] | None
    cache: Cache
    made: Int[Array, ""]
    """Tokens of the unfinished sequences."""


@partial(jax.jit, static_argnames=("net", "decoding", "slots"))
def search(
    net: Transformer,
    decoding: DecodingConfig,
    params: Params,
    prompt: Int[Array, "B P"],
    mask: Bool[Array, "B P"],
    source: tuple[Int[Array, "B S"], Bool[Array, "B S"]] | None,
    end_id: Int[Array, ""],
    slots: int,
) -> Sequences:
    """The `num_beams` best continuations of each prompt that the search finds, with their scores.

    In every step the 2 W best continuations of the W unfinished sequences are looked at: those among the first W that
    end, or are as long as allowed, compete for the W finished places; the W best others go on.
    """
    params, batch, width = net.unstacked(params), len(prompt), decoding.num_beams
    logits, cache = prefill(net, params, prompt, mask, source, slots)
    nothing = jnp.full((batch, width, decoding.max_new_tokens), end_id, jnp.int32)
    never = jnp.full((batch, width), _NEVER, logits.dtype)
    seen = occurring(net, decoding, prompt, mask)[:, None] if decoding.repetition_penalty != 1 else None
    beams = Beams(
        # At first all beams are alike, and one of them is enough.
        Sequences(nothing, never.at[:, 0].set(0)),
        Sequences(nothing, never),
        jnp.ones(batch, bool),
        None if seen is None else jnp.repeat(seen, width, axis=1),
        cache.rows(jnp.repeat(jnp.arange(batch), width)),
        jnp.asarray(0, jnp.int32),
    )
    beams = _extended(decoding, beams, jnp.repeat(logits[:, None], width, axis=1), end_id)

    def unfinished(beams: Beams) -> Array:
        waiting = beams.improvable
        if decoding.early_stopping:
            waiting = waiting & ~(beams.finished.scores > _NEVER / 2).all(1)
        return (beams.made < decoding.max_new_tokens) & waiting.any()

    def one_more(beams: Beams) -> Beams:
        last = jax.lax.dynamic_index_in_dim(beams.running.tokens, beams.made - 1, axis=2, keepdims=False)
        logits, cache = net.extend(params, last.reshape(-1, 1), beams.cache)
        return _extended(decoding, beams._replace(cache=cache), logits.reshape(batch, width, -1), end_id)

    return jax.lax.while_loop(unfinished, one_more, beams).finished


def _extended(decoding: DecodingConfig, beams: Beams, logits: Float[Array, "B W V"], end_id: Array) -> Beams:
    """The beams with one token more."""
    (batch, width, vocabulary), running = logits.shape, beams.running
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    if beams.seen is not None:
        log_probabilities = jax.vmap(penalize_repetition, (0, 0, None))(
            log_probabilities, beams.seen, decoding.repetition_penalty
        )
    total = (running.scores[:, :, None] + log_probabilities).reshape(batch, -1)
    scores, places = jax.lax.top_k(total, min(2 * width, total.shape[1]))
    origins, token = places // vocabulary, (places % vocabulary).astype(jnp.int32)
    tokens = running.take(origins).tokens.at[:, :, beams.made].set(token)
    count = beams.made + 1
    ends = (token == end_id) | (count == decoding.max_new_tokens)

    # Finished sequences, old and new.
    closed = ~beams.improvable[:, None]
    if decoding.early_stopping:
        closed = closed | (beams.finished.scores > _NEVER / 2).all(1, keepdims=True)
    enters = ends & (jnp.arange(scores.shape[1]) < width)[None] & ~closed
    new = jnp.where(enters, scores / _penalty(decoding, count, scores.dtype), _NEVER)
    both = Sequences(
        jnp.concatenate([beams.finished.tokens, tokens], axis=1), jnp.concatenate([beams.finished.scores, new], axis=1)
    )
    finished = both.take(jax.lax.top_k(both.scores, width)[1])

    # Unfinished ones.
    open_scores, kept = jax.lax.top_k(jnp.where(ends, _NEVER, scores), width)
    running = Sequences(tokens, scores).take(kept)._replace(scores=open_scores)
    origin = jnp.take_along_axis(origins, kept, axis=1)
    rows = (origin + width * jnp.arange(batch)[:, None]).reshape(-1)
    seen = beams.seen
    if seen is not None:
        seen = seen.reshape(-1, vocabulary)[rows]
        seen = seen.at[jnp.arange(len(seen)), jnp.take_along_axis(token, kept, axis=1).reshape(-1)].set(True)
        seen = seen.reshape(batch, width, vocabulary)

    hoped = open_scores[:, 0] / _penalty(decoding, count, scores.dtype)
    improvable = beams.improvable & (hoped > finished.scores.min(1))
    return Beams(running, finished, improvable, seen, beams.cache.rows(rows), count)


def _penalty(decoding: DecodingConfig, length: Int[Array, ""], dtype: jnp.dtype) -> Float[Array, ""]:
    """What a sequence of `length` tokens divides its log-probability by."""
    tokens = length.astype(dtype)
    if decoding.length_penalty_form == "paper":
        tokens = (5 + tokens) / 6
    return tokens**decoding.length_penalty
