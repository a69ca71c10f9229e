"""Tokens that an answer must or must not have at a place, with the semantics of Hugging Face's `generate`."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_tformer.decoding.settings import DecodingConfig


class Constraints(NamedTuple):
    """The constraints of a DecodingConfig for compiled code; None where there is none."""

    suppressed: Int[Array, " n"] | None
    fewest: Int[Array, ""] | None
    """No end token comes before this many new tokens."""
    first: Int[Array, ""] | None
    last: Int[Array, ""] | None


class Place(NamedTuple):
    """The place of the next token in each of N rows."""

    made: Int[Array, ""]
    """How many new tokens the rows have."""
    limits: Int[Array, " N"]
    """The most new tokens of each row."""
    end_ids: Int[Array, " E"]
    """The tokens that end a row; -1 never occurs."""


def constraints_of(decoding: DecodingConfig) -> Constraints | None:
    """Returns the constraints of a config; None if it has none."""
    found = Constraints(
        jnp.asarray(decoding.suppress_tokens, jnp.int32) if decoding.suppress_tokens else None,
        jnp.asarray(decoding.min_new_tokens, jnp.int32) if decoding.min_new_tokens else None,
        *(
            None if token is None else jnp.asarray(token, jnp.int32)
            for token in (decoding.forced_bos_token_id, decoding.forced_eos_token_id)
        ),
    )
    return None if all(each is None for each in found) else found


def constrain(scores: Float[Array, "N V"], constraints: Constraints, place: Place) -> Float[Array, "N V"]:
    """Sets the scores of tokens that may not come here to -inf; a token that must come gets 0, and all others -inf."""
    suppressed, fewest, first, last = constraints
    if suppressed is not None:
        scores = scores.at[:, suppressed].set(-jnp.inf)
    if fewest is not None:
        # An id beyond the vocabulary is dropped, and a negative one would count from the end.
        ends = jnp.where(place.end_ids < 0, scores.shape[1], place.end_ids)
        scores = jnp.where(place.made < fewest, scores.at[:, ends].set(-jnp.inf, mode="drop"), scores)
    if first is not None:
        scores = jnp.where(place.made == 0, _only(first, scores), scores)
    if last is not None:
        scores = jnp.where((place.made == place.limits - 1)[:, None], _only(last, scores), scores)
    return scores


def _only(token: Int[Array, ""], scores: Float[Array, "N V"]) -> Float[Array, "1 V"]:
    return jnp.where(jnp.arange(scores.shape[1]) == token, 0.0, -jnp.inf).astype(scores.dtype)[None]
