"""Chooses one token per row from logits `[N, V]`, in pure functions with the semantics of Hugging Face's `generate`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.decoding.past import Past, forbid_ngrams, forbid_words
from jax_tformer.decoding.settings import DecodingConfig, LengthPenaltyForm


class Place(NamedTuple):
    """The place of the next token in each of N rows."""

    made: Int[Array, ""]
    """How many new tokens the rows have."""
    limits: Int[Array, " N"]
    """The most new tokens of each row."""
    end_ids: Int[Array, " E"]
    """The tokens that end a row; -1 never occurs."""
    past: Past | None = None
    """What the rows have said; needed only where rules look back at it (`Rules.look_back`)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """A DecodingConfig for compiled code. Its numbers are traced, so another temperature needs no compilation.

    Unused settings are None and cost nothing.
    """

    temperature: Float[Array, ""] | None
    """None: take the best token instead of drawing."""
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None
    repetition_penalty: Float[Array, ""] | None
    length_penalty: Float[Array, ""]
    suppressed: Int[Array, " n"] | None
    """Tokens that never come."""
    suppressed_at_begin: Int[Array, " m"] | None
    """Tokens that are not the first one, or not the one after a first one that is forced."""
    words: Int[Array, "w L"] | None
    """Words of several tokens that never come; -1 before those with fewer than L."""
    fewest: Int[Array, ""] | None
    """No end token comes before this many new tokens."""
    first: Int[Array, ""] | None
    """The first new token."""
    last: Int[Array, ""] | None
    """The last new token of a row that reaches its limit."""
    no_repeat_ngram_size: int = field(metadata={"static": True})
    """0: n-grams may repeat."""
    encoder_no_repeat_ngram_size: int = field(metadata={"static": True})
    """0: n-grams of the prompt, or of an encoder-decoder's source, may come."""
    renormalize_logits: bool = field(metadata={"static": True})
    top_k: int | None = field(metadata={"static": True})
    num_beams: int = field(metadata={"static": True})
    length_penalty_form: LengthPenaltyForm = field(metadata={"static": True})
    early_stopping: bool | Literal["never"] = field(metadata={"static": True})

    @property
    def look_back(self) -> bool:
        """Whether what rows have said decides which tokens may come, so that a Past is needed."""
        return bool(self.no_repeat_ngram_size or self.encoder_no_repeat_ngram_size) or self.words is not None


def rules_of(decoding: DecodingConfig, end_ids: Sequence[int] = ()) -> Rules:
    """Converts a config to rules for rows that end with any of `end_ids`, which are no bad words on their own."""

    def number(value: float | None, idle: float) -> Array | None:
        return None if value is None or value == idle else jnp.asarray(value, jnp.result_type(float))

    def whole(value: int | tuple[int, ...] | None) -> Array | None:
        return None if value is None else jnp.asarray(value, jnp.int32)

    words = [word for word in decoding.bad_words_ids if len(word) > 1 or word[0] not in end_ids]
    never = {*decoding.suppress_tokens, *(word[0] for word in words if len(word) == 1)}
    long, longest = [word for word in words if len(word) > 1], max(map(len, words), default=0)
    return Rules(
        temperature=number(decoding.temperature, 0.0),
        top_p=number(decoding.top_p, 1.0),
        min_p=number(decoding.min_p, 0.0),
        repetition_penalty=number(decoding.repetition_penalty, 1.0),
        length_penalty=jnp.asarray(decoding.length_penalty, jnp.result_type(float)),
        suppressed=whole(tuple(sorted(never)) or None),
        suppressed_at_begin=whole(decoding.begin_suppress_tokens or None),
        words=jnp.asarray([[-1] * (longest - len(word)) + [*word] for word in long], jnp.int32) if long else None,
        fewest=whole(decoding.min_new_tokens or None),
        first=whole(decoding.forced_bos_token_id),
        last=whole(decoding.forced_eos_token_id),
        no_repeat_ngram_size=decoding.no_repeat_ngram_size,
        encoder_no_repeat_ngram_size=decoding.encoder_no_repeat_ngram_size,
        renormalize_logits=decoding.renormalize_logits,
        top_k=decoding.top_k,
        num_beams=decoding.num_beams,
        length_penalty_form=decoding.length_penalty_form,
        early_stopping=decoding.early_stopping,
    )


def choose(
    logits: Float[Array, "N V"],
    keys: Key[Array, " N"],
    rules: Rules,
    seen: Bool[Array, "N V"] | None,
    place: Place | None = None,
) -> Int[Array, " N"]:
    """Draws one token per row with the row's own key, or takes the best one without a temperature.

    `seen` and `place` are as in `process`.
    """
    logits = process(logits, rules, seen, place)
    return best(logits) if rules.temperature is None else draw(logits, keys)


def process(
    logits: Float[Array, "N V"], rules: Rules, seen: Bool[Array, "N V"] | None, place: Place | None = None
) -> Float[Array, "N V"]:
    """Applies what `restrict` does, then temperature, top-k, top-p and min-p.

    Logits are correct up to a constant per row. `seen` are the tokens that the row contains; None without a repetition
    penalty. `place` may be None if there are no constraints and the rules do not look back.
    """
    logits = restrict(logits, rules, seen, place)
    if rules.temperature is not None:
        # Makes the largest logit 0, so that it stays finite. XLA would treat temperatures below `tiny` as 0.
        temperature = jnp.maximum(rules.temperature.astype(logits.dtype), np.finfo(logits.dtype).tiny)
        logits = (logits - logits.max(-1, keepdims=True)) / temperature
    if rules.top_k is not None:
        logits = keep_top_k(logits, rules.top_k)
    if rules.top_p is not None:
        logits = keep_top_p(logits, rules.top_p.astype(logits.dtype))
    if rules.min_p is not None:
        logits = keep_min_p(logits, rules.min_p.astype(logits.dtype))
    return logits


def restrict(
    scores: Float[Array, "N V"], rules: Rules, seen: Bool[Array, "N V"] | None, place: Place | None
) -> Float[Array, "N V"]:
    """Applies what changes logits, or log-probabilities, without drawing.

    The repetition penalty comes first, then the ban of n-grams and words, then constraints.
    """
    if rules.repetition_penalty is not None and seen is not None:
        scores = penalize_repetition(scores, seen, rules.repetition_penalty.astype(scores.dtype))
    if place is None:
        return scores
    past = place.past
    if rules.no_repeat_ngram_size and past is not None:
        scores = forbid_ngrams(scores, past, past.tokens, rules.no_repeat_ngram_size)
    if rules.encoder_no_repeat_ngram_size and past is not None and past.given is not None:
        scores = forbid_ngrams(scores, past, past.given, rules.encoder_no_repeat_ngram_size)
    if rules.words is not None and past is not None:
        scores = forbid_words(scores, past, rules.words)
    return constrain(scores, rules, place)


def constrain(scores: Float[Array, "N V"], rules: Rules, place: Place) -> Float[Array, "N V"]:
    """Sets the scores of tokens that may not come here to -inf; a token that must come gets 0, and all others -inf."""
    if rules.suppressed is not None:
        scores = scores.at[:, rules.suppressed].set(-jnp.inf)
    if rules.suppressed_at_begin is not None:
        begins = place.made == (0 if rules.first is None else 1)
        scores = jnp.where(begins, scores.at[:, rules.suppressed_at_begin].set(-jnp.inf), scores)
    if rules.fewest is not None:
        # An id beyond the vocabulary is dropped, and a negative one would count from the end.
        ends = jnp.where(place.end_ids < 0, scores.shape[1], place.end_ids)
        scores = jnp.where(place.made < rules.fewest, scores.at[:, ends].set(-jnp.inf, mode="drop"), scores)
    if rules.first is not None:
        scores = jnp.where(place.made == 0, _only(rules.first, scores), scores)
    if rules.last is not None:
        scores = jnp.where((place.made == place.limits - 1)[:, None], _only(rules.last, scores), scores)
    return scores


def _only(token: Int[Array, ""], scores: Float[Array, "N V"]) -> Float[Array, "1 V"]:
    return jnp.where(jnp.arange(scores.shape[1]) == token, 0.0, -jnp.inf).astype(scores.dtype)[None]


def best(logits: Float[Array, "N V"]) -> Int[Array, " N"]:
    """Returns the token with the largest logit; if there are several, the first."""
    # XLA on CPU takes seven times as long for an argmax.
    return jax.lax.top_k(logits, 1)[1][:, 0]


def penalize_repetition(
    logits: Float[Array, "N V"], seen: Bool[Array, "N V"], penalty: Array | float
) -> Float[Array, "N V"]:
    """Divides the positive logits of the tokens in `seen` by the penalty and multiplies the negative ones by it."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Float[Array, "N V"], k: int) -> Float[Array, "N V"]:
    """Sets logits below the k-th largest of their row to -inf."""
    # Takes the minimum, because for [:, -1:] XLA on CPU would sort all V.
    kth = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0].min(-1, keepdims=True)
    return jnp.where(logits < kth, -jnp.inf, logits)


def keep_top_p(logits: Float[Array, "N V"], p: Array | float) -> Float[Array, "N V"]:
    """Sets a logit to -inf if more probable tokens already make up p; always keeps the most probable token.

    Tokens of equal probability stay or go together. Finds the threshold by bisection over the bit patterns of
    floating-point numbers, which have the same order as the numbers; on CPU this takes a tenth of the time of a sort.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    integer, bits = (jnp.int32, 32) if logits.dtype == jnp.float32 else (jnp.int64, 64)
    patterns = jax.lax.bitcast_convert_type(probabilities, integer)
    # Searches for the smallest pattern above which less than p is left; tokens that reach it stay.
    low = jnp.full(logits.shape[0], -1, integer)
    high = patterns.max(-1)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        more = jnp.where(patterns > middle[:, None], probabilities, 0).sum(-1) >= p
        return jnp.where(more, middle, low), jnp.where(more, high, middle)

    _, threshold = jax.lax.fori_loop(0, bits, halve, (low, high))
    return jnp.where(patterns < threshold[:, None], -jnp.inf, logits)


def keep_min_p(logits: Float[Array, "N V"], p: Array | float) -> Float[Array, "N V"]:
    """Sets the logits of tokens less than p times as probable as the most probable one to -inf."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    return jnp.where(probabilities < p * probabilities.max(-1, keepdims=True), -jnp.inf, logits)


def draw(logits: Float[Array, "N V"], keys: Key[Array, " N"]) -> Int[Array, " N"]:
    """Draws a token from softmax(logits) by inversion: the first whose cumulative probability exceeds a uniform number.

    Needs one random number per row, while the usual Gumbel maximum needs V (ten times as slow on CPU at V = 50257).
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    # XLA sums in blocks, so rounding may change the sums even where nothing is added.
    cumulative = jnp.where(probabilities > 0, jnp.cumsum(probabilities, axis=-1), 0)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), logits.dtype))(keys)
    # uniform < 1, so the largest sum exceeds the product.
    exceed = cumulative > uniform[:, None] * cumulative.max(-1, keepdims=True)
    vocabulary = logits.shape[-1]
    return jnp.where(exceed, jnp.arange(vocabulary)[None], vocabulary - 1).min(-1).astype(jnp.int32)
