"""From token ids to the residual stream, and from the residual stream to logits."""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.errors import InputError
from jax_tformer.nn.arrays import accumulator, dtype_of
from jax_tformer.nn.dropout import draw_mask, dropout
from jax_tformer.nn.feedforward import activate
from jax_tformer.nn.linear import Linear
from jax_tformer.nn.norms import Norm
from jax_tformer.nn.parameters import ZEROS, Start, parameter, projection_start
from jax_tformer.nn.positions import sinusoidal


class Table(nnx.Module):
    """A lookup table `[rows, D]`."""

    def __init__(self, rows: int, config: TransformerConfig, *, std: float):
        self.embedding = parameter((rows, config.d_model), config, Start("normal", std))
        self.dtype = config.compute.dtype

    def __call__(self, ids: Int[Array, "#B T"]) -> Float[Array, "#B T D"]:
        """The rows called `ids`; ids must be in range (checked on the host, not here)."""
        return jnp.take(self.embedding[...], ids, axis=0).astype(dtype_of(self.dtype))


class InputEmbedding(nnx.Module):
    """What a stack reads: token, position and token-type embeddings, added; then norm and dropout.

    Token tables start at d_model^-0.5 under xavier_uniform, so that the paper's scaling by sqrt(d_model)
    (section 3.4) brings them to unit size. With `tokens=False` the table belongs to another stack and comes as an
    argument (`shared_embedding`).
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, tokens: bool = True):
        assert config.vocab_size is not None
        std = config.initializer_std
        token_std = std if config.initializer == "normal" else config.d_model**-0.5
        self.tokens = Table(config.vocab_size, config, std=token_std) if tokens else None
        learned = stack.positions == "learned"
        self.positions = Table(stack.max_positions or 0, config, std=std) if learned else None
        self.token_types = Table(stack.token_types, config, std=std) if stack.token_types else None
        self.norm = Norm(config, stack) if stack.embedding_norm else None
        self.config, self.stack = config, stack

    @property
    def table(self) -> Table:
        """The token table, which must be this embedding's own."""
        assert self.tokens is not None
        return self.tokens

    def draw_keep(self, key: Key[Array, ""] | None, ids: Int[Array, "B T"]) -> Bool[Array, "B T D"] | None:
        """The dropout mask for `ids`; None where nothing is dropped."""
        return draw_mask(key, self.config.dropout.embedding, (*ids.shape, self.config.d_model))

    def __call__(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "#B T"],
        *,
        token_types: Int[Array, "B T"] | None = None,
        table: Table | None = None,
        keep: Bool[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Embeds `ids`; raises InputError where the sequence is longer than the learned positions.

        `keep` is the dropout mask of the result (`draw_keep`).
        """
        x = (table or self.table)(ids)
        if self.stack.embedding_scale:
            x = x * math.sqrt(self.config.d_model)
        if self.positions is not None:
            if ids.shape[1] > (self.stack.max_positions or 0):
                raise InputError(
                    f"the sequence has {ids.shape[1]} tokens and the model {self.stack.max_positions} learned "
                    "positions; give a shorter sequence"
                )
            x = x + self.positions(positions)
        elif self.stack.positions.startswith("sinusoidal"):
            interleaved = self.stack.positions == "sinusoidal_interleaved"
            base = self.stack.position_base
            x = x + sinusoidal(positions, self.config.d_model, interleaved=interleaved, base=base, dtype=x.dtype)
        if self.token_types is not None:
            x = x + self.token_types(jnp.zeros_like(ids) if token_types is None else token_types)
        if self.norm is not None:
            x = self.norm(x)
        return dropout(x, self.config.dropout.embedding, keep)


class Head(nnx.Module):
    """logits = x W (+ b) (paper, section 3.4); W may be the token table, transposed (Press & Wolf, 2017).

    With head "transform", x first passes dense, activation and norm, as in BERT's masked language model.
    """

    def __init__(self, config: TransformerConfig):
        assert config.vocab_size is not None
        stack, width = config.output_stack, config.d_model
        transform = config.head == "transform"
        self.dense = Linear((width,), (width,), config, bias=True) if transform else None
        self.norm = Norm(config, stack) if transform else None
        start = projection_start(config, width, config.vocab_size)
        self.kernel = None if config.tied_head else parameter((width, config.vocab_size), config, start)
        self.bias = parameter((config.vocab_size,), config, ZEROS) if config.head_bias else None
        self.activation = stack.activation
        self.dtype = config.compute.dtype

    def __call__(self, x: Float[Array, "B T D"], table: Table) -> Float[Array, "B T V"]:
        """Logits, in at least float32; `table` is used where the head is tied."""
        x = self.transformed(x)
        matrix, bias = self.projection(table)
        kernel = matrix.T.astype(dtype_of(self.dtype))
        logits = jnp.matmul(x.reshape(-1, x.shape[-1]), kernel, preferred_element_type=accumulator(x.dtype))
        if bias is not None:
            logits = logits + bias.reshape(1, -1).astype(logits.dtype)
        return logits.reshape(*x.shape[:-1], -1)

    def transformed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What is projected to the vocabulary."""
        if self.dense is None or self.norm is None:
            return x
        return self.norm(activate(self.dense(x), self.activation))

    def projection(self, table: Table) -> tuple[Float[Array, "V D"], Float[Array, " V"] | None]:
        """The matrix (its rows are the tokens') and the bias of the vocabulary projection."""
        matrix = table.embedding[...] if self.kernel is None else self.kernel[...].T
        return matrix, None if self.bias is None else self.bias[...]
