"""The operations of one training step, counted from the shapes: what no implementation can do without."""

import math
from typing import NamedTuple

from flax import traverse_util

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.model.functional import AnyTransformer


class Flops(NamedTuple):
    """Floating-point operations of one training step; a multiplication and an addition are two."""

    projections: int
    """Products of activations with parameters, the head included; looking up embeddings is none."""
    attention: int
    """Products of queries with keys and of weights with values; where causal, the half that must be computed."""
    hidden: int
    """The other half of causal attention, which an implementation computes for nothing, or skips."""

    @property
    def needed(self) -> int:
        """What counts as work."""
        return self.projections + self.attention


def training_flops(net: AnyTransformer, batch: int, length: int, source: int = 0) -> Flops:
    """Of a step on `batch` rows of `length` tokens, in an encoder-decoder targets, with `source` tokens before.

    Every product is computed once forward and twice backward, once for each of its factors: 6 operations for each
    parameter and token, and for self-attention 12 L H C T S in a row (two products of 2 H C T S forward). What
    softmax, norms, activations and the optimizer take is left out: it does not grow with the widths squared.
    """
    config = net.config
    tokens = {"source": batch * source, "target": batch * length}
    projections = sum(6 * size * tokens[side] for side, size in _matrix_parameters(net))
    attention = hidden = 0
    if config.encoder is not None:
        attention += batch * _attention(config, config.encoder, *2 * (source if config.decoder else length,))
    if config.decoder is not None:
        causal = batch * _attention(config, config.decoder, length, length)
        hidden = causal // 2
        attention += causal - hidden
        if config.encoder is not None:
            attention += batch * _attention(config, config.decoder, length, source)
    return Flops(projections, attention, hidden)


def _matrix_parameters(net: AnyTransformer) -> list[tuple[str, int]]:
    """The size of each matrix that activations are multiplied with, and which tokens these belong to."""
    config, found = net.config, []
    translates = config.encoder is not None and config.decoder is not None
    for path, leaf in traverse_util.flatten_dict(net.shapes, sep=".").items():
        if path.endswith(".kernel"):
            # Keys and values of cross-attention are made of the encoder's output.
            of_source = (
                path.startswith("encoder.") or ".cross_attention.key" in path or ".cross_attention.value" in path
            )
            found.append(("source" if translates and of_source else "target", math.prod(leaf.shape)))
    if config.tied_head:
        found.append(("target", (config.vocab_size or 0) * config.d_model))
    return found


def _attention(config: TransformerConfig, stack: StackConfig, queries: int, keys: int) -> int:
    return 12 * stack.num_layers * stack.num_heads * config.head_width(stack) * queries * keys
