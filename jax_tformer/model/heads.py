"""What follows the last stack, the same as in torch_ref/heads.py: pooler, heads, and the outputs of a forward pass."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jax_tformer.config import TransformerConfig
from jax_tformer.model.attention import Cache, Captured
from jax_tformer.model.embedding import Table
from jax_tformer.model.layers import (
    ZEROS,
    Dropout,
    Linear,
    Norm,
    accumulator,
    activate,
    dtype_of,
    multiply_by_rows,
    parameter,
    projection_start,
    site_key,
    soft_cap,
)


class Outputs(NamedTuple):
    """The result of a forward pass."""

    logits: Float[Array, "B ... V"]
    """Logits of the vocabulary, `[B, T, V]`, or of classes, `[B, T, classes]` and for a whole text `[B, classes]`.

    Hidden states `[B, T, D]` if the model has no head.
    """
    hidden: Float[Array, "B T D"]
    """The input of the vocabulary projection. Compiled code that uses only this computes no logits."""
    encoder: Captured | None
    """Captured from the encoder's layers, stacked along L; None without `capture`."""
    decoder: Captured | None
    """Captured from the decoder's layers, stacked along L; None without `capture`."""
    cache: Cache | None
    """The given cache with these tokens in it."""
    pooled: Float[Array, "B D"] | None = None
    """The result of the pooler; None if the model has none."""


class Head(nnx.Module):
    """logits = x W (+ b) (paper, section 3.4); W may be the token table, transposed (Press & Wolf, 2017).

    With head "transform", x first passes dense, activation and norm, as in BERT's masked language model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        assert config.vocab_size is not None
        stack, width = config.output_stack, config.d_model
        transform = config.head == "transform"
        self.dense = Linear((width,), (width,), config, bias=True) if transform else None
        self.norm = Norm(config, stack) if transform else None
        start = projection_start(config, width, config.vocab_size)
        self.kernel = None if config.tied_head else parameter((width, config.vocab_size), config, start)
        self.bias = parameter((config.vocab_size,), config, ZEROS) if config.head_bias else None
        self.activation, self.dtype = stack.activation, config.compute.dtype
        self.scale, self.cap = config.d_model**-0.5 if config.head_scale else None, config.logit_cap

    def transformed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the input of the vocabulary projection."""
        if self.dense is not None and self.norm is not None:
            x = self.norm(activate(self.dense(x), self.activation))
        return x if self.scale is None else x * self.scale

    def projection(self, table: Table) -> tuple[Float[Array, "V D"], Float[Array, " V"] | None]:
        """Returns the matrix (a row per token) and the bias of the vocabulary projection."""
        matrix = table.embedding[...] if self.kernel is None else self.kernel[...].T
        return matrix, None if self.bias is None else self.bias[...]

    def __call__(self, x: Float[Array, "B T D"], table: Table) -> Float[Array, "B T V"]:
        """Computes logits in at least float32; a tied head uses `table`."""
        return self.logits(self.transformed(x), table)

    def logits(self, x: Float[Array, "B T D"], table: Table) -> Float[Array, "B T V"]:
        """Computes the logits of the result of `transformed`."""
        matrix, bias = self.projection(table)
        matrix, flat, high = matrix.astype(dtype_of(self.dtype)), x.reshape(-1, x.shape[-1]), accumulator(x.dtype)
        if self.kernel is None and 1 < len(flat) == len(x):
            # A new token of several sequences.
            logits = multiply_by_rows(flat, matrix, high)
        else:
            logits = jnp.matmul(flat, matrix.T, preferred_element_type=high)
        if bias is not None:
            logits = logits + bias.reshape(1, -1).astype(logits.dtype)
        logits = logits if self.cap is None else soft_cap(logits, self.cap)
        return logits.reshape(*x.shape[:-1], -1)


class Pooler(nnx.Module):
    """activation(dense(x_0)): the first position stands for the whole text (Devlin et al., 2018, section 3).

    The first position is the first of the row, so pad on the right.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.dense = Linear((config.d_model,), (config.d_model,), config, bias=True)
        self.activation = config.pooler
        self.dropout = Dropout(config.dropout.pooler)

    def __call__(self, x: Float[Array, "B T D"], dropout_key: Key[Array, ""] | None = None) -> Float[Array, "B D"]:
        """Pools each sequence."""
        y = self.dense(self.dropout(x[:, 0], site_key(dropout_key, "dropout")))
        if self.activation == "relu":
            return activate(y, "relu")
        return jnp.tanh(y.astype(accumulator(y.dtype))).astype(y.dtype)


class Classifier(nnx.Module):
    """logits = x W + b, of each token's classes or of the pooled text's."""

    def __init__(self, config: TransformerConfig) -> None:
        assert config.classes is not None
        start = projection_start(config, config.d_model, config.classes)
        self.kernel = parameter((config.d_model, config.classes), config, start)
        self.bias = parameter((config.classes,), config, ZEROS)
        self.dropout = Dropout(config.dropout.classifier)
        self.dtype = config.compute.dtype

    def __call__(
        self, x: Float[Array, "B ... D"], dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "B ... classes"]:
        """Computes logits in at least float32."""
        x, dtype = self.dropout(x, site_key(dropout_key, "dropout")), dtype_of(self.dtype)
        flat, kernel = x.reshape(-1, x.shape[-1]), self.kernel[...].astype(dtype)
        logits = jnp.matmul(flat, kernel, preferred_element_type=accumulator(dtype))
        logits = logits + self.bias[...].reshape(1, -1).astype(logits.dtype)
        return logits.reshape(*x.shape[:-1], -1)


class ReadOut(nnx.Module):
    """What the three transformers share: the steps from the last stack's output to logits."""

    head: Head | None
    pooler: Pooler | None
    classifier: Classifier | None

    def __init__(self, config: TransformerConfig) -> None:
        self.head = Head(config) if config.predicts_tokens else None
        self.pooler = None if config.pooler == "none" else Pooler(config)
        self.classifier = None if config.classes is None else Classifier(config)

    @property
    def table(self) -> Table:
        """The token table of the last stack."""
        raise NotImplementedError

    def read_out(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns the logits of `Outputs.hidden`; `hidden` itself if the model does not predict tokens."""
        return hidden if self.head is None else self.head.logits(hidden, self.table)

    def projection(self) -> tuple[Float[Array, "V D"], Float[Array, " V"] | None]:
        """Returns the matrix and the bias of the vocabulary projection, which must exist."""
        assert self.head is not None
        return self.head.projection(self.table)

    def outputs(
        self,
        x: Float[Array, "B T D"],
        encoder: Captured | None,
        decoder: Captured | None,
        cache: Cache | None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Outputs:
        """Makes the result of a forward pass from the last stack's output."""
        hidden = x if self.head is None else self.head.transformed(x)
        pooled = None if self.pooler is None else self.pooler(x, site_key(dropout_key, "pooler"))
        logits = self.read_out(hidden)
        if self.classifier is not None:
            logits = self.classifier(x if pooled is None else pooled, site_key(dropout_key, "classifier"))
        return Outputs(logits, hidden, encoder, decoder, cache, pooled)
