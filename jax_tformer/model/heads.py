"""What follows the last stack, the same as in torch_ref/heads.py."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_tformer.config import TransformerConfig
from jax_tformer.model.embedding import Table
from jax_tformer.model.layers import (
    ZEROS,
    Linear,
    Norm,
    accumulator,
    activate,
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
        stack, width = config.output_stack, config.d_model
        transform = config.head == "transform"
        self.dense = Linear((width,), (width,), config, bias=True) if transform else None
        self.norm = Norm(config, stack) if transform else None
        start = projection_start(config, width, config.vocab_size)
        self.kernel = None if config.tied_head else parameter((width, config.vocab_size), config, start)
        self.bias = parameter((config.vocab_size,), config, ZEROS) if config.head_bias else None
        self.activation, self.dtype = stack.activation, config.compute.dtype

    def transformed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the input of the vocabulary projection."""
        if self.dense is None or self.norm is None:
            return x
        return self.norm(activate(self.dense(x), self.activation))

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
        kernel = matrix.T.astype(dtype_of(self.dtype))
        logits = jnp.matmul(x.reshape(-1, x.shape[-1]), kernel, preferred_element_type=accumulator(x.dtype))
        if bias is not None:
            logits = logits + bias.reshape(1, -1).astype(logits.dtype)
        return logits.reshape(*x.shape[:-1], -1)
