"""What follows the last stack, the same as in torch_ref/heads.py."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_tformer.config import TransformerConfig
from jax_tformer.model.embedding import Table
from jax_tformer.model.fast import multiply_new_tokens
from jax_tformer.model.layers import Linear, Norm, activate, identity, soft_cap
from jax_tformer.model.parameters import (
    ZEROS,
    Dropout,
    DropoutKey,
    Stream,
    accumulator,
    dtype_of,
    parameter,
    projection_start,
)


class Head(nnx.Module):
    """logits = x W (+ b) (paper, section 3.4); W may be the token table, transposed (Press & Wolf, 2017).

    With head "transform", x first passes dense, activation and norm, as in BERT's masked language model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        assert config.vocab_size is not None
        stack = config.output_stack
        width = config.d_model
        transform = config.head == "transform"
        self.dense = Linear((width,), (width,), config, bias=True) if transform else None
        self.norm = Norm(config, stack) if transform else identity
        start = projection_start(config, width, config.vocab_size)
        self.kernel = None if config.tied_head else parameter((width, config.vocab_size), config, start)
        self.bias = parameter((config.vocab_size,), config, ZEROS) if config.head_bias else None
        self.activation = stack.activation
        self.dtype = config.compute.dtype
        self.scale = config.d_model**-0.5 if config.head_scale else None
        self.cap = config.cap

    def transform(self, x: Stream) -> Stream:
        """Returns the input of the vocabulary projection."""
        if self.dense is not None:
            x = self.norm(activate(self.dense(x), self.activation))
        return x if self.scale is None else x * self.scale

    def matrix(self, table: Table) -> Float[Array, "V D"]:
        """Returns the matrix of the vocabulary projection, a row for each token."""
        return table.embedding[...] if self.kernel is None else self.kernel[...].T

    def __call__(self, x: Stream, table: Table) -> Float[Array, "B T V"]:
        """Computes the logits of what `transform` returns, in at least float32; a tied head uses `table`."""
        dtype = dtype_of(self.dtype)
        high = accumulator(x.dtype)
        if self.kernel is None:
            logits = multiply_new_tokens(x, table.embedding[...].astype(dtype), high)
        else:
            flat = x.reshape(-1, x.shape[-1])
            logits = jnp.matmul(flat, self.kernel[...].astype(dtype), preferred_element_type=high)
            logits = logits.reshape(*x.shape[:-1], -1)
        if self.bias is not None:
            logits = logits + self.bias[...].reshape(1, 1, -1).astype(logits.dtype)
        return logits if self.cap is None else soft_cap(logits, *self.cap)


class Pooler(nnx.Module):
    """activation(dense(x_0)): the first position stands for the whole text (Devlin et al., 2018, section 3).

    The first position is the first of the row, so pad on the right.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.dense = Linear((config.d_model,), (config.d_model,), config, bias=True)
        self.activation = config.pooler
        self.dropout = Dropout(config.dropout.pooler)

    def __call__(self, x: Stream, dropout_key: DropoutKey = None) -> Float[Array, "B D"]:
        """Pools each sequence."""
        return activate(self.dense(self.dropout(x[:, 0], dropout_key)), self.activation)


class Classifier(nnx.Module):
    """logits = x W + b, of each token's classes or of the pooled text's."""

    def __init__(self, config: TransformerConfig) -> None:
        assert config.classes is not None
        start = projection_start(config, config.d_model, config.classes)
        self.kernel = parameter((config.d_model, config.classes), config, start)
        self.bias = parameter((config.classes,), config, ZEROS)
        self.dropout = Dropout(config.dropout.classifier)
        self.dtype = config.compute.dtype

    def __call__(self, x: Float[Array, "B ... D"], dropout_key: DropoutKey = None) -> Float[Array, "B ... classes"]:
        """Computes logits in at least float32."""
        x = self.dropout(x, dropout_key)
        dtype = dtype_of(self.dtype)
        flat = x.reshape(-1, x.shape[-1])
        kernel = self.kernel[...].astype(dtype)
        logits = jnp.matmul(flat, kernel, preferred_element_type=accumulator(dtype))
        logits = logits + self.bias[...].reshape(1, -1).astype(logits.dtype)
        return logits.reshape(*x.shape[:-1], -1)
