"""What each row has said so far, and the tokens that it forbids: ends of n-grams, and of words of several tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Past(NamedTuple):
    """The tokens of each of N rows so far: its prompt (of an encoder-decoder, the start token), and the new ones."""

    tokens: Int[Array, "N H"]
    """The last token of every row in the same column; -1 for padding before the prompt, and behind that column."""
    length: Int[Array, ""]
    """The number of columns up to the last token."""
    given: Int[Array, "N S"] | None = None
    """The prompt, or the source of an encoder-decoder; -1 for padding. None where its n-grams may be repeated."""

    @staticmethod
    def of(
        prompt: Int[Array, "N P"],
        mask: Bool[Array, "N P"],
        room: int,
        given: tuple[Int[Array, "N S"], Bool[Array, "N S"]] | None = None,
    ) -> "Past":
        """Begins with prompts that are padded on the left, and leaves room for new tokens; `given` has a mask."""
        tokens = jnp.pad(jnp.where(mask, prompt, -1), ((0, 0), (0, room)), constant_values=-1)
        text = None if given is None else jnp.where(given[1], given[0], -1)
        return Past(tokens, jnp.asarray(prompt.shape[1], jnp.int32), text)

    def then(self, token: Int[Array, " N"]) -> "Past":
        """Appends a token to each row."""
        tokens = jax.lax.dynamic_update_slice_in_dim(self.tokens, token[:, None], self.length, axis=1)
        return self._replace(tokens=tokens, length=self.length + 1)

    def last(self, count: int) -> Int[Array, "N n"]:
        """Returns the last `count` tokens of each row; -1 where there are fewer."""
        columns = self.length - count + jnp.arange(count)
        return jnp.where(columns >= 0, self.tokens[:, jnp.maximum(columns, 0)], -1)


def forbid_ngrams(scores: Float[Array, "N V"], past: Past, text: Int[Array, "N X"], size: int) -> Float[Array, "N V"]:
    """Sets the scores of tokens that would end an n-gram of `size` tokens of the row's `text` to -inf.

    `text` has -1 where there is no token.
    """
    columns, before = text.shape[1], size - 1
    if columns < size:
        return scores
    # What the next token will stand behind. In a past that is too short there is -1 in it: nothing but that past itself
    # is equal to it then, and no token follows there.
    last, following = past.last(before), text[:, before:]
    repeats = following >= 0
    for place in range(before):
        repeats &= text[:, place : place + columns - before] == last[:, place, None]
    return _forbid(scores, jnp.where(repeats, following, -1))


def forbid_words(scores: Float[Array, "N V"], past: Past, words: Int[Array, "w L"]) -> Float[Array, "N V"]:
    """Sets the score of a word's last token to -inf where a row ends with all tokens before it.

    Words shorter than L tokens begin with -1.
    """
    begins, ends = words[None, :, :-1], words[None, :, -1]
    begun = ((begins == past.last(begins.shape[2])[:, None]) | (begins < 0)).all(-1)
    return _forbid(scores, jnp.where(begun, ends, -1))


def _forbid(scores: Float[Array, "N V"], tokens: Int[Array, "N n"]) -> Float[Array, "N V"]:
    """Sets the scores of each row's `tokens` to -inf; -1 is no token."""
    rows, vocabulary = scores.shape
    # An id beyond the vocabulary is dropped, and a negative one would count from the end.
    banned = jnp.where(tokens < 0, vocabulary, tokens)
    return scores.at[jnp.arange(rows)[:, None], banned].set(-jnp.inf, mode="drop")
