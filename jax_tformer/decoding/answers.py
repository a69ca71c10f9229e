"""From texts to answers: generates them in batches or as a stream, and makes texts of tokens as they come."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding.generate import generate, stream
from jax_tformer.decoding.loop import layers_apart
from jax_tformer.decoding.prompts import Ids, Prompt
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.functional import AnyTransformer, Params

T = TypeVar("T")


class Completion(NamedTuple):
    """One answer to a text."""

    text: str
    tokens: list[int]
    """The generated tokens without the end token."""
    finished: bool
    """Whether the end token came."""
    score: float | None
    """In a beam search, the log-probability divided by the length penalty."""

    @property
    def new_tokens(self) -> int:
        """The number of generated tokens, the end token included."""
        return len(self.tokens) + self.finished


class Answerer:
    """A model that continues prompts or translates sources by a DecodingConfig.

    With `context`, a text with this many tokens drops the older half and continues. `ends` says whether the end token
    ends an answer. At most `batch` texts are answered at once.
    """

    def __init__(
        self,
        net: AnyTransformer,
        params: Params,
        tokenizer: Tokenizer,
        decoding: DecodingConfig,
        *,
        seed: int = 0,
        context: int | None = None,
        ends: bool = True,
        batch: int = 128,
    ) -> None:
        self._net, self._tokenizer, self._decoding, self._batch = net, tokenizer, decoding, batch
        # Done once here instead of in every batch.
        self._params = layers_apart(params, rows=batch * max(decoding.num_beams, decoding.num_return_sequences))
        self._translates = net.config.encoder is not None
        start = tokenizer.start_id
        end_ids: tuple[int, ...] = () if tokenizer.end_id is None else (tokenizer.end_id,)
        if (framing := tokenizer.framing) is not None:
            start, end_ids = framing.start_id, framing.end_ids
        self._end_ids = end_ids if ends else ()
        self._options: dict[str, Any] = {"end_id": self._end_ids or None, "seed": seed, "context": context}
        self._options["start_id"] = start if self._translates else None
        self._rows = 1

    def answers(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        """Returns the completions of each prompt, the best or first one first."""
        # Keeps the number of rows, so that a smaller last batch needs no compilation.
        self._rows = max(self._rows, len(prompts))
        filled = [*prompts, *[prompts[-1]] * (self._rows - len(prompts))]
        ids, limits = [prompt.ids for prompt in filled], [prompt.limit for prompt in filled]
        found = generate(self._net, self._params, ids, self._decoding, limits=limits, **self._options)
        none = [[None] * self._decoding.num_return_sequences] * len(prompts)
        scores = none if found.scores is None else found.scores.tolist()
        return [
            [self._complete(prompt, *answer) for answer in zip(found.rows(row), scores[row], strict=True)]
            for row, prompt in enumerate(prompts)
        ]

    def best(self, prompts: Iterable[Prompt]) -> list[str]:
        """Returns the best or first answer to each prompt."""
        return [found[0].text for batch in batched(prompts, self._batch) for found in self.answers(batch)]

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """Streams the single answer to a prompt: a piece, perhaps empty, for every token, and a last one."""
        pieces = TextStream(self._tokenizer, self._context_of(prompt))
        tokens = stream(self._net, self._params, [prompt.ids], self._decoding, limits=[prompt.limit], **self._options)
        for token in (int(each.item()) for each in tokens):
            yield "" if token in self._end_ids else pieces.push(token)
        yield pieces.finish()

    def _context_of(self, prompt: Prompt) -> list[int]:
        """Returns the tokens that an answer continues."""
        return [] if self._translates else prompt.ids

    def _complete(self, prompt: Prompt, tokens: list[int], score: float | None) -> Completion:
        finished = tokens[-1] in self._end_ids
        tokens = tokens[:-1] if finished else tokens
        return Completion(decode_added(self._tokenizer, self._context_of(prompt), tokens), tokens, finished, score)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields the items in lists of `size`, each as soon as it is full; the last one may be shorter."""
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch


_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_UNCERTAIN = 32
"""How many replacement characters at the end are held back. Each stands for the bytes of an incomplete character, or
(byte fallback) for one byte of it. A longer row is not text, and all but its last ones are returned."""
_MAY_CHANGE = re.compile(r"(?: +(?:n *)?(?:' *)?[vr]?|')\Z")
"""What is held back where spaces are taken out. The next characters may make it " n't", "'ve" or "."; and an apostrophe
that lost its spaces gets the first one back where a full stop takes the second."""
_WINDOW = 48
"""How many tokens are decoded again as context of the next: more than are held back, and a character's bytes."""


class TextStream:
    """Decodes a stream: `push` takes a token and returns the text that is now certain; `finish` returns the rest.

    Joined, the returned texts are what decoding all tokens at once adds to the text of `before`. Each token costs the
    decoding of fewer than a hundred, however long the stream is.
    """

    def __init__(self, tokenizer: Tokenizer, before: Ids = ()) -> None:
        self._decode, self._cleans = tokenizer.decode, tokenizer.cleans_spaces
        self._ids = list(before)[-_WINDOW:]
        self._sent = len(self._decode(self._ids))
        """How many characters of the window's text have been returned or belong to `before`."""

    def push(self, token: int) -> str:
        """Returns the text that `token` makes certain: often its own, sometimes none, or that of several tokens."""
        self._ids.append(token)
        text = self._decode(self._ids)
        unsure = min(len(text) - len(text.rstrip(_UNKNOWN)), _UNCERTAIN)
        if self._cleans and (found := _MAY_CHANGE.search(text)):
            unsure = max(unsure, len(text) - found.start())
        new = text[self._sent : len(text) - unsure]
        self._sent += len(new)
        if len(self._ids) >= 2 * _WINDOW:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """Returns the text that was held back."""
        return self._decode(self._ids)[self._sent :]

    def _shorten(self, text: str) -> None:
        """Drops all but the last tokens, if their text alone is the end of `text` and the rest was returned."""
        ids = self._ids[-_WINDOW:]
        end = self._decode(ids)
        forgotten = len(text) - len(end)
        # A cut inside a character changes the text; then the next token will be tried.
        if forgotten <= self._sent and text.endswith(end):
            self._ids, self._sent = ids, self._sent - forgotten


def decode_added(tokenizer: Tokenizer, before: Ids, tokens: Ids) -> str:
    """Returns what `tokens` add to the text of the tokens before them."""
    before = list(before)
    return tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]
