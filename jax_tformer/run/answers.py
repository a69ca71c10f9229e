"""Generates answers to texts, in batches or as a stream."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax_tformer.data.text_stream import TextStream, added_text
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.decoding.fast import layers_apart
from jax_tformer.decoding.generation import generate, stream
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.model.functional import AnyTransformer, Params
from jax_tformer.run.texts import Text, batched


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
    def made(self) -> int:
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
        self._net, self._tokenizer, self._decoding = net, tokenizer, decoding
        # Done once here instead of in every batch.
        self._params = layers_apart(params, rows=batch * max(decoding.num_beams, decoding.num_return_sequences))
        self._batch = batch
        self._translates = net.config.encoder is not None
        start, framing = tokenizer.start_id, tokenizer.framing
        end_ids: tuple[int, ...] = () if tokenizer.end_id is None else (tokenizer.end_id,)
        if framing is not None:
            start, end_ids = framing.start_id, framing.end_ids
        self._ends = end_ids if ends else ()
        self._options: dict[str, Any] = {"end_id": self._ends or None, "seed": seed, "context": context}
        self._options["start_id"] = start if self._translates else None
        self._rows = 1

    def answers(self, texts: Sequence[Text]) -> list[list[Completion]]:
        """Returns the completions of each text, the best or first one first."""
        # Keeps the number of rows, so that a smaller last batch needs no compilation.
        self._rows = max(self._rows, len(texts))
        filled = [*texts, *[texts[-1]] * (self._rows - len(texts))]
        limits = [text.limit for text in filled]
        found = generate(
            self._net, self._params, [text.ids for text in filled], self._decoding, limits=limits, **self._options
        )
        none = [[None] * self._decoding.num_return_sequences] * len(texts)
        scores = none if found.scores is None else found.scores.tolist()
        return [
            [self._completion(text, *answer) for answer in zip(found.rows(row), scores[row], strict=True)]
            for row, text in enumerate(texts)
        ]

    def best(self, texts: Iterable[Text]) -> list[str]:
        """Returns the best or first answer to each text."""
        return [found[0].text for batch in batched(texts, self._batch) for found in self.answers(batch)]

    def stream(self, text: Text) -> Iterator[str]:
        """Streams the single answer to a text: a piece, perhaps empty, for every token, and a last one."""
        pieces = TextStream(self._tokenizer, self._before(text))
        tokens = stream(self._net, self._params, [text.ids], self._decoding, limits=[text.limit], **self._options)
        for token in (int(each.item()) for each in tokens):
            yield "" if token in self._ends else pieces.push(token)
        yield pieces.finish()

    def _before(self, text: Text) -> list[int]:
        """The tokens that an answer continues."""
        return [] if self._translates else text.ids

    def _completion(self, text: Text, tokens: list[int], score: float | None) -> Completion:
        finished = tokens[-1] in self._ends
        tokens = tokens[:-1] if finished else tokens
        return Completion(added_text(self._tokenizer, self._before(text), tokens), tokens, finished, score)
