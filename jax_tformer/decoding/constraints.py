"""Tokens that an answer must or must not have at a place, with the semantics of Hugging Face's `generate`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_tformer.decoding.settings import DecodingConfig


class Constraints(NamedTuple):
    """The constraints of a DecodingConfig for compiled code; None where there is none."""

    suppressed: Int[Array, " n"] | None
    fewest: Int[Array, ""] | None
    """No end token comes before this many new tokens."""
    first: Int[Array, ""] | None
    last: Int[Array, ""] | None


class Past(NamedTuple):
    """The tokens of each of N rows so far: its prompt (of an encoder-decoder, the start token), and the new ones."""

    tokens: Int[Array, "N H"]
    """The last token of every row in the same column; -1 for padding before the prompt, and behind that column."""
    length: Int[Array, ""]
    """The number of columns up to the last token."""

    @staticmethod
    def of(prompt: Int[Array, "N P"], mask: Bool[Array, "N P"], room: int) -> "Past":
        """Begins with prompts that are padded on the left, and leaves room for new tokens."""
        tokens = jnp.pad(jnp.where(mask, prompt, -1), ((0, 0), (0, room)), constant_values=-1)
        return Past(tokens, jnp.asarray(prompt.shape[1], jnp.int32))

    def then(self, token: Int[Array, " N"]) -> "Past":
        """Appends a token to each row."""
        tokens = jax.lax.dynamic_update_slice_in_dim(self.tokens, token[:, None], self.length, axis=1)
        return Past(tokens, self.length + 1)


class Place(NamedTuple):
    """The place of the next token in each of N rows."""

    made: Int[Array, ""]
    """How many new tokens the rows have."""
    limits: Int[Array, " N"]
    """The most new tokens of each row."""
    end_ids: Int[Array, " E"]
    """The tokens that end a row; -1 never occurs."""
    past: Past | None = None
    """What the rows have said; needed only where repeated n-grams are forbidden."""


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


def forbid_repeats(scores: Float[Array, "N V"], past: Past, size: int) -> Float[Array, "N V"]:
    """Sets the scores of tokens that would end an n-gram of `size` tokens that the row contains already to -inf."""
    (rows, columns), before = past.tokens.shape, size - 1
    if columns < size:
        return scores
    # What the next token will stand behind; in a text that is too short there is -1 in it, and nothing repeats that.
    begin = jnp.maximum(past.length - before, 0)
    last = jax.lax.dynamic_slice_in_dim(past.tokens, begin, before, axis=1)
    following = past.tokens[:, before:]
    repeats = following >= 0
    for place in range(before):
        earlier = past.tokens[:, place : place + columns - before]
        repeats &= (earlier == last[:, place, None]) & (earlier >= 0)
    # An id beyond the vocabulary is dropped.
    banned = jnp.where(repeats, following, scores.shape[1])
    return scores.at[jnp.arange(rows)[:, None], banned].set(-jnp.inf, mode="drop")


def _only(token: Int[Array, ""], scores: Float[Array, "N V"]) -> Float[Array, "1 V"]:
    return jnp.where(jnp.arange(scores.shape[1]) == token, 0.0, -jnp.inf).astype(scores.dtype)[None]
