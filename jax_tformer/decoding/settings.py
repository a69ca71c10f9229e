"""The settings of `generate`, by Hugging Face's names."""

from dataclasses import dataclass
from typing import Literal

from jax_tformer.config.errors import AboveZero, Count, Finite, NotNegative, Positive, check_fields, require_field

LengthPenaltyForm = Literal["paper", "power"]
_DRAW = "give a temperature above 0"


@dataclass(frozen=True)
class DecodingConfig:
    """Greedy search, sampling or beam search, each with a repetition penalty.

    Raises FieldError for invalid values, and for values that exclude each other.
    """

    max_new_tokens: Positive = 200
    """The most new tokens of a row; it may end earlier."""
    temperature: NotNegative = 0.0
    """Divides the logits before a token is drawn; 0 takes the most probable token instead of drawing."""
    top_k: Positive | None = None
    """Draw only from the k most probable tokens (and those as probable as the k-th)."""
    top_p: AboveZero | None = None
    """Draw only from the fewest most probable tokens whose probabilities sum to p (Holtzman et al., 2020)."""
    min_p: NotNegative | None = None
    """Draw only tokens at least p times as probable as the most probable one (Nguyen et al., 2024)."""
    repetition_penalty: AboveZero = 1.0
    """Divides positive and multiplies negative scores of tokens that have occurred (Keskar et al., 2019)."""
    no_repeat_ngram_size: Count = 0
    """No n tokens in a row occur twice, the prompt of a decoder-only model included; 0: they may (Paulus et al., 2017,
    forbid trigrams)."""
    encoder_no_repeat_ngram_size: Count = 0
    """No n tokens in a row of the prompt, or of an encoder-decoder's source, are said again; 0: they may be."""
    min_new_tokens: Count = 0
    """The fewest new tokens of a row, not counting its end token."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never chosen."""
    begin_suppress_tokens: tuple[int, ...] = ()
    """Tokens that are not chosen first, or not second where the first is forced."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Words, of one token or several in a row, that never occur; an end token alone is none."""
    forced_bos_token_id: Count | None = None
    """The first new token of every row."""
    forced_eos_token_id: Count | None = None
    """The last new token of a row that has as many as it may have."""
    renormalize_logits: bool = False
    """Make probabilities of a beam search sum to one again after penalties and constraints."""
    num_return_sequences: Positive = 1
    """Samples for each prompt; in a beam search, the n best."""
    num_beams: Positive = 1
    """Number of unfinished sequences in a beam search; 1: no beam search."""
    length_penalty: Finite = 0.6
    """Alpha: divides a finished beam's log-probability by a power of its length; 0: no penalty."""
    length_penalty_form: LengthPenaltyForm = "paper"
    """Penalty of n tokens. paper: ((5 + n) / 6)^alpha, of Wu et al. (2016), as Vaswani et al. use; power: n^alpha."""
    early_stopping: bool | Literal["never"] = False
    """True: end a beam search at num_beams finished sequences. False: when no unfinished one would be better if it
    ended at once. never: when none can become better, whatever follows."""

    def __post_init__(self) -> None:
        check_fields(self)
        most, fewest = self.max_new_tokens, self.min_new_tokens
        require_field(most < 2**31, "max_new_tokens", f"is {most}; expected fewer than 2^31")
        require_field(fewest <= most, "min_new_tokens", f"is {fewest}; expected at most {most}, the most new tokens")
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            value = getattr(self, name)
            require_field(_are_ids(value), name, f"is {value!r}; expected a tuple of ids of at least 0")
        words = self.bad_words_ids
        require_field(
            isinstance(words, tuple) and all(word and _are_ids(word) for word in words),
            "bad_words_ids",
            f"is {words!r:.60}; expected a tuple of words, each a tuple of one or more ids of at least 0",
        )
        early, beams, wanted = self.early_stopping, self.num_beams, self.num_return_sequences
        known = isinstance(early, bool) or early == "never"
        require_field(known, "early_stopping", f"is {early!r}; expected True, False or 'never'")
        if self.top_p is not None:
            require_field(self.top_p <= 1, "top_p", f"is {self.top_p}; expected a number above 0 and at most 1")
        if self.min_p is not None:
            require_field(self.min_p <= 1, "min_p", f"is {self.min_p}; expected a number from 0 to 1")
        if beams > 1:
            draws = f"is {self.temperature:g}; expected 0 with a beam search, which draws nothing"
            require_field(self.temperature == 0, "temperature", draws)
            many = f"is {wanted}; expected at most {beams}, the number of beams"
            require_field(wanted <= beams, "num_return_sequences", many)
        elif self.temperature == 0:
            alike = f"is {wanted}; expected 1 at temperature 0, where nothing is drawn; {_DRAW}, or beams"
            require_field(wanted == 1, "num_return_sequences", alike)
        for name in ("top_k", "top_p", "min_p"):
            value = getattr(self, name)
            unused = f"is {value}; expected none at temperature 0, where nothing is drawn; leave it out, or {_DRAW}"
            require_field(value is None or self.temperature > 0, name, unused)


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(id, int) and id >= 0 for id in value)
