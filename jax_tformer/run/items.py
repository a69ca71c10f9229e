"""From a text to what the model is given: its tokens, and how many it may add."""

from typing import NamedTuple, Protocol

from jax_tformer.config import require
from jax_tformer.data.pairs import pair_batcher
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.errors import InputError
from jax_tformer.experiment import PairData, TextData
from jax_tformer.run.generate_options import DEFAULT_NEW_TOKENS, GenerateOptions
from jax_tformer.run.lines import Line


class Item(NamedTuple):
    """A prompt or a source, ready to be generated from."""

    line: Line
    ids: list[int]
    """What the model is given, with start or end token."""
    limit: int
    """New tokens at most."""


class Reader(Protocol):
    """Makes items of texts."""

    start_id: int | None
    """What answers begin with, where that is not the prompt."""
    most: int
    """No item's limit is above this."""

    def __call__(self, line: Line) -> Item:
        """The item of a text; raises InputError for one that the model cannot take."""
        ...


class PromptReader:
    """Of prompts, which a decoder-only model continues within its context, or beyond it (`slide`)."""

    start_id: int | None = None

    def __init__(self, data: TextData, tokenizer: Tokenizer, max_new_tokens: int | None, slide: bool) -> None:
        self._tokenizer, self._new, self._slide = tokenizer, max_new_tokens, slide
        self._start = [] if tokenizer.start_id is None else [tokenizer.start_id]
        self._context = data.context_length
        room = max(self._context - 1 - len(self._start), 1)
        self.most = max_new_tokens or (DEFAULT_NEW_TOKENS if slide else min(DEFAULT_NEW_TOKENS, room))

    def __call__(self, line: Line) -> Item:
        ids = self._start + _encoded(self._tokenizer, line)
        require(bool(ids), f"{line.prefix}the prompt has no tokens; expected one at least; give a longer text")
        tokens = f"{line.prefix}the prompt has {len(ids)} tokens{' with the start token' if self._start else ''}"
        if self._slide:
            require(
                len(ids) <= self._context,
                f"{tokens}; expected at most {self._context}, the model's context; shorten it",
            )
            return Item(line, ids, self.most)
        room = self._context - len(ids)
        if self._new is None:
            require(
                room > 0,
                f"{tokens}; expected at most {self._context - 1}, the model's context of {self._context} less a new "
                "token; shorten it, or let the model go on beyond its context with --slide",
            )
        else:
            require(
                self._new <= room,
                f"{tokens} and --max-new-tokens is {self._new}; expected at most {self._context} together, the model's "
                "context; make one of them smaller, or let the model go on beyond its context with --slide",
            )
        return Item(line, ids, min(self.most, room))


class SourceReader:
    """Of sources, which an encoder-decoder translates."""

    def __init__(self, data: PairData, tokenizer: Tokenizer, max_new_tokens: int | None) -> None:
        batcher = pair_batcher(data, tokenizer)
        self.start_id: int | None = batcher.start_id
        self._tokenizer, self._end, self._length = tokenizer, batcher.end_id, data.source_length
        self.most = max_new_tokens or data.target_length

    def __call__(self, line: Line) -> Item:
        line = line._replace(text=line.text.strip())
        ids = _encoded(self._tokenizer, line)
        require(
            len(ids) < self._length,
            f"{line.prefix}the source {line.text[:40]!r} has {len(ids)} tokens; expected at most {self._length - 1}, "
            "the run's data.source_length less the end token; shorten it",
        )
        return Item(line, [*ids, self._end], self.most)


def reader_of(data: TextData | PairData, tokenizer: Tokenizer, options: GenerateOptions) -> Reader:
    """The reader for a model that was trained on `data`; raises InputError if its tokenizer lacks a special token."""
    if isinstance(data, PairData):
        return SourceReader(data, tokenizer, options.max_new_tokens)
    return PromptReader(data, tokenizer, options.max_new_tokens, options.slide)


def _encoded(tokenizer: Tokenizer, line: Line) -> list[int]:
    try:
        return tokenizer.encode(line.text).tolist()
    except InputError as error:
        raise InputError(f"{line.prefix}{error}") from None
