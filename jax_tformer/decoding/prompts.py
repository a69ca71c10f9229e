"""Prompts: from a text to token ids that fit the model, and from many ids to padded batches. Imports no jax."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

import numpy as np

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import PairData, TextData
from jax_tformer.data.tokenizers import Framing, Tokenizer, pair_framing

Ids = Sequence[int] | np.ndarray
"""Token ids of one text."""
STEP = 32
"""Lengths are rounded up to a multiple of this, so that prompts of many lengths need only one compilation."""


class Prompt(NamedTuple):
    """A text to continue, or a source to translate, ready for the model."""

    text: str
    ids: list[int]
    """The model's input, with start or end token."""
    limit: int
    """The largest number of new tokens."""
    number: int = 1
    """Its line number, from 1."""
    place: str | None = None
    """Its place for messages, like "line 3 of FILE"; None if it is the only text."""


@dataclass
class PromptReader:
    """Makes Prompts of texts. If fewer new tokens fit than asked for, that is the limit or, with `exactly`, an error.

    A tokenizer with a framing puts its own tokens around texts, else a text follows the start token, if there is one,
    and an end token follows a source. Raises InputError if translations lack a start or end token.
    """

    tokenizer: Tokenizer
    max_new_tokens: int
    _: KW_ONLY
    translates: bool
    """Whether the texts are sources, and are not continued."""
    max_length: int | None
    """The largest number of tokens of a source, or of a text with its answer; None: any number."""
    named: str = "the model's context"
    """What the user knows this as."""
    checkpoint_length: int | None = None
    """What a checkpoint says about the largest number of tokens of a text with its answer."""
    exactly: bool = False
    """Whether the number of new tokens was asked for, so that room for fewer is an error."""
    slide: bool = False
    """Whether texts continue beyond the context."""

    def __post_init__(self) -> None:
        start = () if self.tokenizer.start_id is None else (self.tokenizer.start_id,)
        without_end = self.tokenizer.framing or Framing(start, ())
        self._framing = pair_framing(self.tokenizer) if self.translates else without_end

    @classmethod
    def of_run(cls, data: TextData | PairData, tokenizer: Tokenizer, max_new_tokens: int) -> "PromptReader":
        """Returns the reader for a model that was trained on `data`."""
        length, named = data_length(data)
        translates = isinstance(data, PairData)
        return cls(tokenizer, max_new_tokens, translates=translates, max_length=length, named=named)

    def __call__(self, text: str, number: int = 1, place: str | None = None, ids: list[int] | None = None) -> Prompt:
        """Encodes `text`, or takes its `ids`; raises InputError, which names the place, if the model cannot take it."""
        text = text.strip() if self.translates else text
        try:
            if ids is None:
                ids = [*self._framing.before, *self.tokenizer.encode(text).tolist(), *self._framing.after]
            limit = self._source_limit(text, len(ids)) if self.translates else self._text_limit(len(ids))
        except InputError as error:
            raise InputError(f"{place}: {error}" if place else str(error)) from None
        return Prompt(text, ids, limit, number, place)

    def _source_limit(self, text: str, tokens: int) -> int:
        around, length = self._framing.size, self.max_length
        ends = "the end token" if around == 1 else f"{around} special tokens"
        require(
            length is None or tokens <= length,
            f"the source {text[:40]!r} has {tokens - around} tokens; "
            f"expected at most {(length or 0) - around}, {self.named} less {ends}; shorten it",
        )
        return self.max_new_tokens

    def _text_limit(self, tokens: int) -> int:
        require(tokens > 0, "the prompt has no tokens; expected at least one; give a longer text")
        told, limit, length = f"the prompt has {tokens} tokens", self.max_new_tokens, self.max_length
        if self._framing.size:
            told += " with the start token" if self.tokenizer.framing is None else " with its special tokens"
        if (longest := self.checkpoint_length) is not None:
            mend = f"expected fewer than {longest}, the checkpoint's max_length; give --max-new-tokens"
            require(tokens < longest, f"{told}; {mend}")
            limit = min(limit, longest - tokens)
        if length is None:
            return limit
        if self.slide:
            require(tokens <= length, f"{told}; expected at most {length}, {self.named}; shorten it")
            return limit
        if self.exactly:
            told += f" and --max-new-tokens is {limit}; expected at most {length} together, {self.named}"
            mend = "make one of them smaller"
        else:
            told += f"; expected at most {length - 1}, {self.named} of {length} less one new token"
            mend = "shorten it"
        fits = tokens + (limit if self.exactly else 1) <= length
        require(fits, f"{told}; {mend}, or let the model write beyond its context with --slide")
        return min(limit, length - tokens)


def data_length(data: TextData | PairData) -> tuple[int, str]:
    """Returns the `max_length` of a model that was trained on `data`, and its name."""
    if isinstance(data, PairData):
        return data.source_length, "the run's data.source_length"
    return data.context_length, "the model's context"


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
    def slides(self) -> list[bool]:
        """Which prompts grow beyond the context. The last token does not count: it is chosen but never read."""
        ends = [len(ids) + int(limit) - 1 for ids, limit in zip(self.ids, self.limits, strict=True)]
        return [self.context is not None and end > self.context for end in ends]

    @property
    def groups(self) -> "list[tuple[list[int], PromptBatch]]":
        """The prompts that are continued together, with their numbers: one group of those that fit, and one for each
        length of those that slide.

        Padding takes slots, so it changes where a text slides; the rest of the batch must not change that.
        """
        groups: dict[int, list[int]] = {}
        for row, (ids, slides) in enumerate(zip(self.ids, self.slides, strict=True)):
            groups.setdefault(round_up(len(ids), step=self._step) if slides else 0, []).append(row)
        return [
            (rows, self._replace(ids=[self.ids[row] for row in rows], limits=self.limits[rows]))
            for rows in groups.values()
        ]

    def pad(
        self, config: TransformerConfig
    ) -> tuple[tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None, np.ndarray], int]:
        """Returns the prompts of one group as arrays, and the number of slots that their cache needs in the end.

        The arrays are tokens `[B, P]`, padded on the left, and their mask; a source and its mask; limits `[B]`.
        """
        decoder, source = config.output_stack, None
        longest, more = max(map(len, self.ids)), round_up(int(self.limits.max()) - 1)
        if config.encoder is not None:
            source = pad_rows(self.ids, round_up(longest, config.encoder.max_positions), side="right")
            tokens = np.full((len(self.ids), 1), self.start_id, np.int32)
            mask, slots = np.ones(tokens.shape, bool), 1 + more
        elif self.context is not None and any(self.slides):
            slots = self.context
            tokens, mask = pad_rows(self.ids, round_up(longest, slots, step=self._step), side="left")
        else:
            length = round_up(longest, decoder.max_positions)
            tokens, mask = pad_rows(self.ids, length, side="left")
            slots = length + more
        return (tokens, mask, source, self.limits), slots

    @property
    def _step(self) -> int:
        """Lengths of texts that slide are rounded up to this, so that padding takes little of a small context."""
        return STEP if self.context is None else max(min(STEP, self.context // 4), 1)


def pad_rows(rows: Sequence[Ids], length: int, *, side: Literal["left", "right"]) -> tuple[np.ndarray, np.ndarray]:
    """Pads the rows on `side`: returns ids, int32 `[B, length]`, and a mask, bool `[B, length]`, True at tokens."""
    ids, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for number, row in enumerate(rows):
        columns = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[number, columns], mask[number, columns] = row, True
    return ids, mask


def require_positions(limit: int | None, length: int, what: str) -> None:
    """Raises InputError if `what`, of `length` tokens, is longer than the learned positions of the model."""
    require(limit is None or length <= limit, f"{what} has {length} tokens; the model has {limit} learned positions")


def round_up(length: int, limit: int | None = None, *, step: int = STEP) -> int:
    """Rounds `length` up to a multiple of `step`, but not above `limit`."""
    up = -(-length // step) * step
    return up if limit is None else min(up, limit)
