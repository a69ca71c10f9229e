"""Scores texts: how probable a model finds them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_tformer.config import StackConfig
from jax_tformer.config.errors import require, require_ids
from jax_tformer.decoding.generate import pad_rows, require_decoder, require_positions, round_up
from jax_tformer.decoding.texts import Ids
from jax_tformer.functional import AnyTransformer, DecoderTransformer, Params


class Scores(NamedTuple):
    """The result of `score` for B texts."""

    log_probs: list[np.ndarray]
    """For each text the log-probability of every scored token given those before it, `[T]`, in nats."""
    perplexity: np.ndarray
    """For each text exp(-mean of its log-probabilities), `[B]`."""


def score(
    net: AnyTransformer,
    params: Params,
    texts: Sequence[Ids],
    *,
    sources: Sequence[Ids] | None = None,
    start_id: int | None = None,
) -> Scores:
    """Computes the log-probabilities of given token ids, and their perplexity.

    With `start_id` every token is scored; without it the first token has no context and is left out. An encoder-decoder
    scores translations of `sources` and needs `start_id`. Raises InputError for an empty batch, texts without a token
    to score, ids outside the vocabulary, and texts longer than the learned positions.
    """
    encoder = net.config.encoder
    begin = [] if start_id is None else [start_id]
    decoder = require_decoder(net)
    require(len(texts) > 0, "there are no texts; expected at least one")
    require(
        (sources is not None) == (encoder is not None),
        "sources are for encoder-decoders, which need them; expected them for these models only",
    )
    rows = [[*begin, *text] for text in texts]
    require_ids(np.concatenate([*rows, *(sources or [])]), net.config.vocab_size or 0)
    for number, row in enumerate(rows, 1):
        least = "one" if begin else "two"
        require(len(row) > 1, f"text {number} has no token to score; expected at least {least}")
    # The last token is only predicted, never read.
    tokens = _pad([row[:-1] for row in rows], net.config.output_stack, "without its last token, a text")
    labels = pad_rows([row[1:] for row in rows], tokens.shape[1], side="right")
    inputs = [tokens]
    if sources is not None and encoder is not None:
        require(len(sources) == len(texts), "expected one source for each text")
        require(all(map(len, sources)), "a source has no tokens; expected at least one")
        require(begin, "start_id is None; an encoder-decoder needs a token to begin with")
        inputs = [_pad(sources, encoder, "a source"), tokens]
    found = np.asarray(_log_probs(decoder, params, inputs, labels))
    log_probs = [row[real] for row, real in zip(found, labels >= 0, strict=True)]
    return Scores(log_probs, np.exp([-row.mean() for row in log_probs]))


def _pad(rows: Sequence[Ids], stack: StackConfig, what: str) -> np.ndarray:
    longest = max(map(len, rows))
    require_positions(stack.max_positions, longest, what)
    return pad_rows(rows, round_up(longest, stack.max_positions), side="right")


@partial(jax.jit, static_argnames=("net",))
def _log_probs(
    net: DecoderTransformer, params: Params, inputs: list[Array], labels: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    names = ("source_mask", "target_mask") if len(inputs) > 1 else ("mask",)
    masks: dict[str, Any] = {name: ids >= 0 for name, ids in zip(names, inputs, strict=True)}
    logits = net.apply(params, *(jnp.maximum(ids, 0) for ids in inputs), **masks)
    chosen = jnp.take_along_axis(logits, labels[:, :, None], axis=-1)[:, :, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
