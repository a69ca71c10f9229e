"""Decodes a stream of ids as they arrive: the text of all of them, of which nothing is taken back."""

import re
from collections.abc import Iterable

from jax_tformer.data.tokenizers import Tokenizer

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_HELD = 32
"""How many replacement characters at the end are held back. Each stands for the bytes of an incomplete character, or
(byte fallback) for one byte of it. A longer row is not text, and all but its last ones are returned."""
_MAY_CHANGE = re.compile(r"(?: +(?:n *)?(?:' *)?[vr]?|')\Z")
"""What is held back where spaces are taken out. The next characters may make it " n't", "'ve" or "."; and an apostrophe
that lost its spaces gets the first one back where a full stop takes the second."""
_KEPT = 48
"""How many tokens are decoded again as context of the next: more than are held back, and a character's bytes."""


class TextStream:
    """Decodes a stream: `push` takes a token and returns the text that is now certain; `finish` returns the rest.

    Joined, the returned texts are what decoding all tokens at once adds to the text of `before`. Each token costs the
    decoding of fewer than a hundred, however long the stream is.
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        self._decode, self._cleans = tokenizer.decode, tokenizer.cleans_spaces
        self._ids = list(before)[-_KEPT:]
        self._sent = len(self._decode(self._ids))
        """How many characters of the window's text have been returned or belong to `before`."""

    def push(self, token: int) -> str:
        """Returns the text that `token` makes certain: often its own, sometimes none, or that of several tokens."""
        self._ids.append(token)
        text = self._decode(self._ids)
        unsure = min(len(text) - len(text.rstrip(_UNKNOWN)), _HELD)
        if self._cleans and (found := _MAY_CHANGE.search(text)):
            unsure = max(unsure, len(text) - found.start())
        new = text[self._sent : len(text) - unsure]
        self._sent += len(new)
        if len(self._ids) >= 2 * _KEPT:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """Returns the text that was held back."""
        return self._decode(self._ids)[self._sent :]

    def _shorten(self, text: str) -> None:
        """Drops all but the last tokens, if their text alone is the end of `text` and the rest was returned."""
        ids = self._ids[-_KEPT:]
        end = self._decode(ids)
        forgotten = len(text) - len(end)
        # A cut inside a character changes the text; then the next token will be tried.
        if forgotten <= self._sent and text.endswith(end):
            self._ids, self._sent = ids, self._sent - forgotten


def added_text(tokenizer: Tokenizer, before: Iterable[int], tokens: Iterable[int]) -> str:
    """Returns what `tokens` add to the text of the tokens before them."""
    before = list(before)
    return tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]
