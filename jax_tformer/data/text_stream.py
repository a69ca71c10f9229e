"""Text from tokens as they come: only what later tokens cannot change, so that nothing has to be taken back."""

from collections.abc import Iterable

from jax_tformer.data.tokenizers import Tokenizer

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_HELD = 32
"""Replacement characters at the end that are held back: one stands for the bytes of a character that is not complete,
or (byte fallback) for one byte of it. A longer row of them is no text, and is handed out but for the last ones."""
_KEPT = 48
"""Tokens that are decoded again for their neighbours' sake. More than are held back, and a character's bytes."""


class TextStream:
    """`push` takes one token and returns the text that is certain with it; `finish` returns the rest.

    All that is returned, put together, is what decoding all tokens at once adds to the text of `before`. However long
    the stream, a token costs the decoding of some last ones, fewer than a hundred.
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._ids = list(before)[-_KEPT:]
        self._sent = len(self._decode(self._ids))
        """Characters of the window's text that have been returned, or belong to `before`."""

    def push(self, token: int) -> str:
        """The text that `token` makes certain; often its own, sometimes none, or that of several tokens."""
        self._ids.append(token)
        text = self._decode(self._ids)
        unsure = min(len(text) - len(text.rstrip(_UNKNOWN)), _HELD)
        new = text[self._sent : len(text) - unsure]
        self._sent += len(new)
        if len(self._ids) >= 2 * _KEPT:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """What was held back."""
        return self._decode(self._ids)[self._sent :]

    def _shorten(self, text: str) -> None:
        """Forgets all but the last tokens, if their text alone is the end of `text` and the rest was returned."""
        ids = self._ids[-_KEPT:]
        end = self._decode(ids)
        forgotten = len(text) - len(end)
        # A cut inside of a character changes the text: then the next token is as good a place.
        if forgotten <= self._sent and text.endswith(end):
            self._ids, self._sent = ids, self._sent - forgotten


def added_text(tokenizer: Tokenizer, before: Iterable[int], tokens: Iterable[int]) -> str:
    """What `tokens` add to the text of the tokens before them."""
    before = list(before)
    return tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]
