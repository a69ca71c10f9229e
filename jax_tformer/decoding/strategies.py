"""Chooses one token per row from logits `[N, V]`, in pure functions with the semantics of Hugging Face's `generate`."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.decoding.settings import DecodingConfig, LengthPenaltyForm


class Past(NamedTuple):
    """The tokens of each of N rows so far: its prompt (of an encoder-decoder, the start token), and the new ones."""

    tokens: Int[Array, "N H"]
    """The last token of every row in the same column; -1 for padding before the prompt, and behind that column."""
    length: Int[Array, ""]
    """The number of columns up to the last token."""

    @staticmethod
    def of(prompt: Int[Array, "N P"], mask: Bool[Array, "N P"], room: int) -> "Past":
        """Begins with prompts that are padded on the left, and leaves room for new tokens."""
        tokens = jnp.pad(jnp.where(mask, prompt, -1), ((0, 0), (0, room)), constant_values=-1)
        return Past(tokens, jnp.asarray(prompt.shape[1], jnp.int32))

    def then(self, token: Int[Array, " N"]) -> "Past":
        """Appends a token to each row."""
        tokens = jax.lax.dynamic_update_slice_in_dim(self.tokens, token[:, None], self.length, axis=1)
        return Past(tokens, self.length + 1)


class Place(NamedTuple):
    """The place of the next token in each of N rows."""

    made: Int[Array, ""]
    """How many new tokens the rows have."""
    limits: Int[Array, " N"]
    """The most new tokens of each row."""
    end_ids: Int[Array, " E"]
    """The tokens that end a row; -1 never occurs."""
    past: Past | None = None
    """What the rows have said; needed only where repeated n-grams are forbidden."""


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
    fewest: Int[Array, ""] | None
    """No end token comes before this many new tokens."""
    first: Int[Array, ""] | None
    """The first new token."""
    last: Int[Array, ""] | None
    """The last new token of a row that reaches its limit."""
    no_repeat_ngram_size: int = field(metadata={"static": True})
    """0: n-grams may repeat."""
    renormalize_logits: bool = field(metadata={"static": True})
    top_k: int | None = field(metadata={"static": True})
    num_beams: int = field(metadata={"static": True})
    length_penalty_form: LengthPenaltyForm = field(metadata={"static": True})
    early_stopping: bool | Literal["never"] = field(metadata={"static": True})


def rules_of(decoding: DecodingConfig) -> Rules:
    """Converts a config to rules."""

    def number(value: float | None, idle: float) -> Array | None:
        return None if value is None or value == idle else jnp.asarray(value, jnp.result_type(float))

    def whole(value: int | tuple[int, ...] | None) -> Array | None:
        return None if value is None else jnp.asarray(value, jnp.int32)

    return Rules(
        temperature=number(decoding.temperature, 0.0),
        top_p=number(decoding.top_p, 1.0),
        min_p=number(decoding.min_p, 0.0),
        repetition_penalty=number(decoding.repetition_penalty, 1.0),
        length_penalty=jnp.asarray(decoding.length_penalty, jnp.result_type(float)),
        suppressed=whole(decoding.suppress_tokens or None),
        fewest=whole(decoding.min_new_tokens or None),
        first=whole(decoding.forced_bos_token_id),
        last=whole(decoding.forced_eos_token_id),
        no_repeat_ngram_size=decoding.no_repeat_ngram_size,
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
    penalty. `place` may be None if there are no constraints and n-grams may repeat.
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

    The repetition penalty comes first, then the ban of repeated n-grams, then constraints.
    """
    if rules.repetition_penalty is not None and seen is not None:
        scores = penalize_repetition(scores, seen, rules.repetition_penalty.astype(scores.dtype))
    if rules.no_repeat_ngram_size and place is not None and place.past is not None:
        scores = forbid_repeats(scores, place.past, rules.no_repeat_ngram_size)
    return scores if place is None else constrain(scores, rules, place)


def constrain(scores: Float[Array, "N V"], rules: Rules, place: Place) -> Float[Array, "N V"]:
    """Sets the scores of tokens that may not come here to -inf; a token that must come gets 0, and all others -inf."""
    if rules.suppressed is not None:
        scores = scores.at[:, rules.suppressed].set(-jnp.inf)
    if rules.fewest is not None:
        # An id beyond the vocabulary is dropped, and a negative one would count from the end.
        ends = jnp.where(place.end_ids < 0, scores.shape[1], place.end_ids)
        scores = jnp.where(place.made < rules.fewest, scores.at[:, ends].set(-jnp.inf, mode="drop"), scores)
    if rules.first is not None:
        scores = jnp.where(place.made == 0, _only(rules.first, scores), scores)
    if rules.last is not None:
        scores = jnp.where((place.made == place.limits - 1)[:, None], _only(rules.last, scores), scores)
    return scores


def forbid_repeats(scores: Float[Array, "N V"], past: Past, size: int) -> Float[Array, "N V"]:
    """Sets the scores of tokens that would end an n-gram of `size` tokens that the row contains already to -inf."""
    (rows, columns), before = past.tokens.shape, size - 1
    if columns < size:
        return scores
    # What the next token will stand behind; in a text that is too short there is -1 in it, and nothing repeats that.
    begin = jnp.maximum(past.length - before, 0)
    last = jax.lax.dynamic_slice_in_dim(past.tokens, begin, before, axis=1)
    following = past.tokens[:, before:]
    repeats = following >= 0
    for place in range(before):
        earlier = past.tokens[:, place : place + columns - before]
        repeats &= (earlier == last[:, place, None]) & (earlier >= 0)
    # An id beyond the vocabulary is dropped.
    banned = jnp.where(repeats, following, scores.shape[1])
    return scores.at[jnp.arange(rows)[:, None], banned].set(-jnp.inf, mode="drop")


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
