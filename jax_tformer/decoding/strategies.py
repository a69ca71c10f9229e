"""Chooses one token per row from logits `[N, V]`, in pure functions with the semantics of Hugging Face's `generate`."""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.decoding.constraints import Constraints, Place, constrain, constraints_of, forbid_repeats
from jax_tformer.decoding.settings import DecodingConfig, LengthPenaltyForm


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
    constraints: Constraints | None
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

    return Rules(
        temperature=number(decoding.temperature, 0.0),
        top_p=number(decoding.top_p, 1.0),
        min_p=number(decoding.min_p, 0.0),
        repetition_penalty=number(decoding.repetition_penalty, 1.0),
        length_penalty=jnp.asarray(decoding.length_penalty, jnp.result_type(float)),
        constraints=constraints_of(decoding),
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
    if rules.constraints is not None and place is not None:
        scores = constrain(scores, rules.constraints, place)
    return scores


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
