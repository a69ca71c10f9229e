"""Chooses the next token of each row: logits processors and sampling, with the semantics of Hugging Face's `generate`.

Pure functions of logits `[N, V]`. Some processors look at the history of a row: it makes tokens less probable, and
forbids the ends of n-grams and of words of several tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jax_tformer.config.experiment import DecodingConfig, LengthPenaltyForm
from jax_tformer.model.parameters import Count, Scalar

Logits = Float[Array, "N V"]
"""Logits, or log-probabilities, of N rows."""
TokenIds = Int[Array, " N"]
Keys = Key[Array, " N"]


class History(NamedTuple):
    """The tokens of each of N rows so far: its prompt (of an encoder-decoder, the start token), and the new ones."""

    tokens: Int[Array, "N H"]
    """The last token of every row is in the same column; -1 stands for padding before the prompt, and behind it."""
    length: Count
    """The number of columns up to the last token."""
    source: Int[Array, "N S"]
    """The prompt, or an encoder-decoder's source; -1 for padding."""
    made: Count
    """How many new tokens the rows have."""
    limits: Int[Array, " N"]
    """The largest number of new tokens of each row."""

    @staticmethod
    def of(prompts: np.ndarray, room: int, source: np.ndarray, limits: np.ndarray) -> "History":
        """Begins with prompts that are padded on the left, with room for new tokens."""
        tokens = np.pad(prompts, ((0, 0), (0, room)), constant_values=-1)
        return History(*map(jnp.asarray, (tokens, np.int32(prompts.shape[1]), source, np.int32(0), limits)))

    def append(self, token: TokenIds) -> "History":
        """Returns the history with one more token in each row."""
        tokens = jax.lax.dynamic_update_slice_in_dim(self.tokens, token[:, None], self.length, axis=1)
        return self._replace(tokens=tokens, length=self.length + 1, made=self.made + 1)

    def take(self, rows: TokenIds) -> "History":
        """Returns the history of the given rows, in that order; a row may come several times."""
        return self._replace(tokens=self.tokens[rows], source=self.source[rows], limits=self.limits[rows])

    def last(self, count: int) -> Int[Array, "N n"]:
        """Returns the last `count` tokens of each row; -1 where there are fewer."""
        columns = self.length - count + jnp.arange(count)
        return jnp.where(columns >= 0, self.tokens[:, jnp.maximum(columns, 0)], -1)


_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """A DecodingConfig for compiled code. Its numbers are traced, so another temperature needs no compilation.

    Unused settings are None and cost nothing.
    """

    temperature: Scalar | None
    """None: take the best token instead of drawing."""
    top_p: Scalar | None
    min_p: Scalar | None
    repetition_penalty: Scalar | None
    length_penalty: Scalar
    begin_suppress_tokens: Int[Array, " m"] | None
    bad_words_ids: Int[Array, "w L"] | None
    """Words that never come; -1 before those with fewer than L tokens."""
    end_ids: Int[Array, " E"]
    """The tokens that end a row; -1 never occurs."""
    min_new_tokens: Count | None
    forced_bos_token_id: Count | None
    forced_eos_token_id: Count | None
    no_repeat_ngram_size: int = field(metadata=_STATIC)
    encoder_no_repeat_ngram_size: int = field(metadata=_STATIC)
    renormalize_logits: bool = field(metadata=_STATIC)
    top_k: int | None = field(metadata=_STATIC)
    num_beams: int = field(metadata=_STATIC)
    length_penalty_form: LengthPenaltyForm = field(metadata=_STATIC)
    early_stopping: bool | Literal["never"] = field(metadata=_STATIC)


_WITHOUT_EFFECT: dict[str, Any] = {"top_p": 1, "min_p": 0, "length_penalty": None}
"""Setting -> the value that does nothing, where that is not its default."""


def make_rules(decoding: DecodingConfig, end_ids: Sequence[int] = (-1,)) -> Rules:
    """Converts a config to rules for rows that end with any of `end_ids`, which are no bad words on their own."""
    words = [word for word in decoding.bad_words_ids if len(word) > 1 or word[0] not in end_ids]
    words += [(id,) for id in decoding.suppress_tokens]
    longest = max(map(len, words), default=0)
    values: dict[str, Any] = {field.name: getattr(decoding, field.name, end_ids) for field in fields(Rules)}
    values["bad_words_ids"] = tuple([-1] * (longest - len(word)) + [*word] for word in words)
    for name in [each.name for each in fields(Rules) if each.metadata != _STATIC]:
        unused = _WITHOUT_EFFECT.get(name, getattr(DecodingConfig, name, None))
        value = values[name]
        if value is not None and not name.endswith(("_tokens", "_id", "_ids")):
            # Of a weak type, which takes that of the logits that it meets.
            value = float(value)
        values[name] = None if value is None or value == unused else jnp.asarray(value)
    return Rules(**values)


def choose(logits: Logits, keys: Keys, rules: Rules, history: History) -> TokenIds:
    """Draws one token per row with the row's own key, or takes the best one without a temperature."""
    logits = process_logits(logits, rules, history)
    return argmax(logits) if rules.temperature is None else draw(logits, keys)


def process_logits(logits: Logits, rules: Rules, history: History) -> Logits:
    """Applies what `restrict` does, then temperature, top-k, top-p and min-p.

    Logits are correct up to a constant per row.
    """
    logits = restrict(logits, rules, history)
    if rules.temperature is not None:
        # Makes the largest logit 0, so that it stays finite. XLA would treat temperatures below `tiny` as 0.
        temperature = jnp.maximum(rules.temperature, np.finfo(logits.dtype).tiny)
        logits = (logits - logits.max(-1, keepdims=True)) / temperature
    if rules.top_k is not None:
        logits = keep_top_k(logits, rules.top_k)
    if rules.top_p is not None:
        logits = keep_top_p(logits, rules.top_p)
    if rules.min_p is not None:
        logits = keep_min_p(logits, rules.min_p)
    return logits


def restrict(scores: Logits, rules: Rules, history: History) -> Logits:
    """Applies what changes logits, or log-probabilities, without drawing.

    The repetition penalty comes first, then the ban of n-grams and words, and of tokens that may not come here. Last, a
    token that must come gets 0, and all others -inf.
    """
    if (penalty := rules.repetition_penalty) is not None:
        # Divides positive scores of the row's tokens by it, and multiplies negative ones; -1 is no token.
        said = jnp.take_along_axis(scores, jnp.maximum(history.tokens, 0), axis=1)
        scores = _set(scores, history.tokens, jnp.where(said < 0, said * penalty, said / penalty))
    scores = forbid_ngrams(scores, history, history.tokens, rules.no_repeat_ngram_size)
    scores = forbid_ngrams(scores, history, history.source, rules.encoder_no_repeat_ngram_size)
    if rules.bad_words_ids is not None:
        # The last token of a word, where a row ends with all tokens before it. Short words begin with -1.
        begins = rules.bad_words_ids[None, :, :-1]
        begun = ((begins == history.last(begins.shape[2])[:, None]) | (begins < 0)).all(-1)
        scores = _forbid(scores, jnp.where(begun, rules.bad_words_ids[None, :, -1], -1))
    if rules.begin_suppress_tokens is not None:
        begins = history.made == (0 if rules.forced_bos_token_id is None else 1)
        scores = jnp.where(begins, scores.at[:, rules.begin_suppress_tokens].set(-jnp.inf), scores)
    if rules.min_new_tokens is not None:
        scores = jnp.where(history.made < rules.min_new_tokens, _forbid(scores, rules.end_ids[None]), scores)
    first = history.made == 0
    last = (history.made == history.limits - 1)[:, None]
    for now, token in (first, rules.forced_bos_token_id), (last, rules.forced_eos_token_id):
        if token is not None:
            only = jnp.where(jnp.arange(scores.shape[1]) == token, 0.0, -jnp.inf).astype(scores.dtype)
            scores = jnp.where(now, only, scores)
    return scores


def forbid_ngrams(scores: Logits, history: History, text: Int[Array, "N X"], size: int) -> Logits:
    """Sets the scores of tokens that would end an n-gram of `size` tokens of the row's `text` to -inf; 0: none.

    `text` has -1 where there is no token.
    """
    columns = text.shape[1]
    before = size - 1
    if not 0 < size <= columns:
        return scores
    # What the next token will stand behind. A history that is too short has -1 there, and equals nothing but
    # itself, where no token follows.
    last = history.last(before)
    following = text[:, before:]
    repeats = following >= 0
    for offset in range(before):
        repeats &= text[:, offset : offset + columns - before] == last[:, offset, None]
    return _forbid(scores, jnp.where(repeats, following, -1))


def _forbid(scores: Logits, tokens: Int[Array, "#N n"]) -> Logits:
    """Sets the scores of each row's `tokens` to -inf; -1 is no token."""
    return _set(scores, tokens, -jnp.inf)


def _set(scores: Logits, tokens: Int[Array, "#N n"], values: Float[Array, "N n"] | float) -> Logits:
    rows, vocabulary = scores.shape
    # An id beyond the vocabulary is dropped, and a negative one would count from the end.
    tokens = jnp.where(tokens < 0, vocabulary, tokens)
    return scores.at[jnp.arange(rows)[:, None], tokens].set(values, mode="drop")


def argmax(logits: Logits) -> TokenIds:
    """Returns the token with the largest logit; if there are several, the first."""
    # XLA on CPU takes seven times as long for an argmax.
    return jax.lax.top_k(logits, 1)[1][:, 0]


def keep_top_k(logits: Logits, k: int) -> Logits:
    """Sets logits below the k-th largest of their row to -inf."""
    # Takes the minimum, because for [:, -1:] XLA on CPU would sort all V.
    kth = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0].min(-1, keepdims=True)
    return jnp.where(logits < kth, -jnp.inf, logits)


def keep_top_p(logits: Logits, p: Array | float) -> Logits:
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


def keep_min_p(logits: Logits, p: Array | float) -> Logits:
    """Sets the logits of tokens less than p times as probable as the most probable one to -inf."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    return jnp.where(probabilities < p * probabilities.max(-1, keepdims=True), -jnp.inf, logits)


def draw(logits: Logits, keys: Keys) -> TokenIds:
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
