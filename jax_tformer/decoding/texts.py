"""From a text to the ids of a prompt that fits the model, from new ids to the text of an answer, and its scores.

These are exact match with references, and BLEU and chrF as sacrebleu computes and reports them. Imports no jax.
"""

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np

from jax_tformer.config.errors import InputError, require
from jax_tformer.data.tokenizers import Framing, Tokenizer, pair_framing

Ids = Sequence[int] | np.ndarray
"""Token ids of one text."""
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_UNCERTAIN = 32
"""How many replacement characters at the end are held back. Each stands for the bytes of an incomplete character, or
(byte fallback) for one byte of it. A longer row is not text, and all but its last ones are returned."""
_MAY_CHANGE = re.compile(r"(?: +(?:n *)?(?:' *)?[vr]?|')\Z")
"""What is held back where spaces are taken out. The next characters may make it " n't", "'ve" or "."; and an apostrophe
that lost its spaces gets the first one back where a full stop takes the second."""
_WINDOW = 48
"""How many tokens are decoded again as context of the next: more than are held back, and a character's bytes."""
_HYPHEN, _SPLIT = re.compile(r"(\S)-(\S)"), r"\1 ##AT##-##AT## \2"
_RUN = 4
"""BLEU compares runs of up to this many tokens, and is zero without any such run."""


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

    Raises what `framing_of` does.
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
        self._framing = framing_of(self.tokenizer, self.translates)

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
        around = self._framing.size
        length = self.max_length
        ends = "the end token" if around == 1 else f"{around} special tokens"
        require(
            length is None or tokens <= length,
            f"the source {text[:40]!r} has {tokens - around} tokens; "
            f"expected at most {(length or 0) - around}, {self.named} less {ends}; shorten it",
        )
        return self.max_new_tokens

    def _text_limit(self, tokens: int) -> int:
        require(tokens > 0, "the prompt has no tokens; expected at least one; give a longer text")
        told = f"the prompt has {tokens} tokens"
        limit = self.max_new_tokens
        length = self.max_length
        if self._framing.size:
            told += " with the start token" if self.tokenizer.framing is None else " with its special tokens"
        if (longest := self.checkpoint_length) is not None:
            require(
                tokens < longest,
                f"{told}; expected fewer than {longest}, the checkpoint's max_length; give --max-new-tokens",
            )
            limit = min(limit, longest - tokens)
        if length is None:
            return limit
        if self.slide:
            require(tokens <= length, f"{told}; expected at most {length}, {self.named}; shorten it")
            return limit
        new, asked, mend = 1, ", and one new token follows", "shorten it"
        if self.exactly:
            new, asked, mend = limit, f" and --max-new-tokens is {limit}", "make one of them smaller"
        require(
            tokens + new <= length,
            f"{told}{asked}; expected at most {length} together, {self.named}; {mend}, or let the model write beyond "
            "its context with --slide",
        )
        return min(limit, length - tokens)


def framing_of(tokenizer: Tokenizer, translates: bool) -> Framing:
    """Returns what stands around sources, or around texts that are continued, and what ends an answer.

    A tokenizer with a framing says so; else a text follows the start token, if there is one, and an end token follows a
    source. Raises InputError if translations lack a start or end token.
    """
    return pair_framing(tokenizer) if translates else tokenizer.around


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


class TextStream:
    """Decodes a stream: `push` takes a token and returns the text that is now certain; `finish` returns the rest.

    Joined, the returned texts are what decoding all tokens at once adds to the text of `before`. Each token costs the
    decoding of fewer than a hundred, however long the stream is.
    """

    def __init__(self, tokenizer: Tokenizer, before: Ids = ()) -> None:
        self._decode = tokenizer.decode
        self._cleans = tokenizer.cleans_spaces
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
            self._ids = ids
            self._sent = self._sent - forgotten


def decode_added(tokenizer: Tokenizer, before: Ids, tokens: Ids) -> str:
    """Returns what `tokens` add to the text of the tokens before them."""
    before = list(before)
    return tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]


class TranslationScores(NamedTuple):
    """The scores, with what others need to compare them."""

    exact_match: float
    """From 0 to 1: the fraction of answers that equal their reference, character by character."""
    bleu: float | None
    """From 0 to 100 (Papineni et al., 2002); None if it would be meaningless."""
    no_bleu: str | None
    """Why there is no BLEU; None if there is."""
    chrf: float
    """From 0 to 100 (Popović, 2015)."""
    lines: tuple[str, ...]
    """The lines to print: exact match, then the others as sacrebleu prints them, with their signatures."""
    signatures: tuple[str, ...]
    """How each score was computed, in sacrebleu's notation: tokenisation, smoothing, version ..."""


def translation_scores(
    answers: Sequence[str], references: Sequence[str], *, split_compounds: bool = False
) -> TranslationScores:
    """Scores all `answers` together, each against its one reference.

    With `split_compounds`, the texts are words already, as Moses divides them, and BLEU is that of the paper: of
    multi-bleu.perl, with "rich-text" as three words (tensor2tensor's get_ende_bleu.sh; Luong's scripts had it so).

    Leaves out BLEU if more than half of the references are shorter than the runs of four tokens that it compares:
    without any such run it is 0.00 however good the answers are, and with a few it says nothing about the rest.
    Raises InputError for an empty batch, and if the numbers of answers and references differ.
    """
    require(len(answers) > 0, "there are no translations; expected at least one")
    require(
        len(answers) == len(references),
        f"there are {len(answers)} translations and {len(references)} references; expected as many of both",
    )
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    count = len(answers)
    tokens = Tokenizer13a()
    equal = sum(answer == reference for answer, reference in zip(answers, references, strict=True))
    short = sum(len(tokens(reference).split()) < _RUN for reference in references)
    no_bleu = None
    if 2 * short > count:
        no_bleu = f"{short:,} of {count:,} references have fewer than {_RUN} tokens, and BLEU compares runs of {_RUN}"
    # force: prints no warning about texts that look tokenised.
    bleu_of = BLEU(force=True)
    if split_compounds:
        answers, references = ([_HYPHEN.sub(_SPLIT, text) for text in texts] for texts in (answers, references))
        bleu_of = BLEU(force=True, tokenize="none", smooth_method="none")
    metrics = (CHRF(),) if no_bleu else (bleu_of, CHRF())
    scores = [metric.corpus_score(list(answers), [list(references)]) for metric in metrics]
    signatures = tuple(str(metric.get_signature()) for metric in metrics)
    lines = [f"exact match {equal / count:.4f}: {equal:,} of {count:,}", *([f"no BLEU: {no_bleu}"] if no_bleu else [])]
    lines += [score.format(signature=signature) for score, signature in zip(scores, signatures, strict=True)]
    bleu = None if no_bleu else scores[0].score
    return TranslationScores(equal / count, bleu, no_bleu, scores[-1].score, tuple(lines), signatures)
