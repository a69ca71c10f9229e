"""From logits `[N, V]` to one token a row: pure functions, with the semantics of Hugging Face's `generate`."""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.decoding.settings import DecodingConfig, LengthPenaltyForm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """A DecodingConfig as compiled code takes it: numbers are traced, so that another temperature compiles nothing.

    What the config does not ask for is None, and costs nothing.
    """

    temperature: Float[Array, ""] | None
    """None: the best token is chosen and nothing drawn."""
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None
    repetition_penalty: Float[Array, ""] | None
    length_penalty: Float[Array, ""]
    top_k: int | None = field(metadata={"static": True})
    num_beams: int = field(metadata={"static": True})
    length_penalty_form: LengthPenaltyForm = field(metadata={"static": True})
    early_stopping: bool | Literal["never"] = field(metadata={"static": True})


def rules_of(decoding: DecodingConfig) -> Rules:
    """The rules of a config."""

    def number(value: float | None, idle: float) -> Array | None:
        return None if value is None or value == idle else jnp.asarray(value, jnp.result_type(float))

    return Rules(
        temperature=number(decoding.temperature, 0.0),
        top_p=number(decoding.top_p, 1.0),
        min_p=number(decoding.min_p, 0.0),
        repetition_penalty=number(decoding.repetition_penalty, 1.0),
        length_penalty=jnp.asarray(decoding.length_penalty, jnp.result_type(float)),
        top_k=decoding.top_k,
        num_beams=decoding.num_beams,
        length_penalty_form=decoding.length_penalty_form,
        early_stopping=decoding.early_stopping,
    )


def choose(
    logits: Float[Array, "N V"], keys: Key[Array, " N"], rules: Rules, seen: Bool[Array, "N V"] | None
) -> Int[Array, " N"]:
    """One token a row, drawn with the row's own key, or the best one without a temperature. `seen`: as in `process`."""
    logits = process(logits, rules, seen)
    return best(logits) if rules.temperature is None else draw(logits, keys)


def process(logits: Float[Array, "N V"], rules: Rules, seen: Bool[Array, "N V"] | None) -> Float[Array, "N V"]:
    """The logits of what is drawn, up to a constant a row: repetition penalty, temperature, top-k, top-p and min-p.

    `seen` are the tokens that the row contains; None where there is no repetition penalty.
    """
    if rules.repetition_penalty is not None and seen is not None:
        logits = penalize_repetition(logits, seen, rules.repetition_penalty.astype(logits.dtype))
    if rules.temperature is not None:
        # The largest logit becomes 0, and so stays finite; at least `tiny`, since XLA takes smaller temperatures for 0.
        temperature = jnp.maximum(rules.temperature.astype(logits.dtype), np.finfo(logits.dtype).tiny)
        logits = (logits - logits.max(-1, keepdims=True)) / temperature
    if rules.top_k is not None:
        logits = keep_top_k(logits, rules.top_k)
    if rules.top_p is not None:
        logits = keep_top_p(logits, rules.top_p.astype(logits.dtype))
    if rules.min_p is not None:
        logits = keep_min_p(logits, rules.min_p.astype(logits.dtype))
    return logits


def best(logits: Float[Array, "N V"]) -> Int[Array, " N"]:
    """The token with the largest logit; of several, the first."""
    # XLA on CPU takes seven times as long for an argmax.
    return jax.lax.top_k(logits, 1)[1][:, 0]


def penalize_repetition(
    logits: Float[Array, "N V"], seen: Bool[Array, "N V"], penalty: Array | float
) -> Float[Array, "N V"]:
    """Divides the positive logits of the tokens in `seen` by the penalty and multiplies the negative ones by it."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Float[Array, "N V"], k: int) -> Float[Array, "N V"]:
    """-inf where a logit is below the k-th largest of its row."""
    # min and not [:, -1:], for which XLA on CPU would sort all V.
    kth = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0].min(-1, keepdims=True)
    return jnp.where(logits < kth, -jnp.inf, logits)


def keep_top_p(logits: Float[Array, "N V"], p: Array | float) -> Float[Array, "N V"]:
    """-inf where the tokens that are more probable make up p or more; the most probable one always stays.

    Tokens of equal probability stay or go together. The threshold is found by bisection over the bit patterns of
    floating-point numbers, which are ordered as the numbers are: on CPU a tenth of the time of a sort.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    integer, bits = (jnp.int32, 32) if logits.dtype == jnp.float32 else (jnp.int64, 64)
    patterns = jax.lax.bitcast_convert_type(probabilities, integer)
    # The smallest pattern above which less than p is left; all that reach it stay.
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
    """-inf where a token is less than p times as probable as the most probable one."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    return jnp.where(probabilities < p * probabilities.max(-1, keepdims=True), -jnp.inf, logits)


def draw(logits: Float[Array, "N V"], keys: Key[Array, " N"]) -> Int[Array, " N"]:
    """A token from softmax(logits), by inversion: the first whose cumulative probability exceeds a uniform number.

    One random number a row, where the usual Gumbel maximum needs V (on CPU, a tenth of the time at V = 50257).
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    # XLA sums in blocks, so that the sums may rise, or fall, by rounding where nothing is added.
    cumulative = jnp.where(probabilities > 0, jnp.cumsum(probabilities, axis=-1), 0)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), logits.dtype))(keys)
    # uniform < 1, so that the largest sum exceeds the product.
    exceed = cumulative > uniform[:, None] * cumulative.max(-1, keepdims=True)
    vocabulary = logits.shape[-1]
    return jnp.where(exceed, jnp.arange(vocabulary)[None], vocabulary - 1).min(-1).astype(jnp.int32)
