"""The embedding of a stack's input (paper, section 3.4), the same as in torch_ref/embedding.py."""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.errors import InputError
from jax_tformer.model.layers import Dropout, Norm, Start, dtype_of, parameter, site_key
from jax_tformer.model.positions import sinusoidal


class Table(nnx.Module):
    """A lookup table `[rows, D]`."""

    def __init__(self, rows: int, config: TransformerConfig, *, std: float) -> None:
        self.embedding = parameter((rows, config.d_model), config, Start("normal", std))
        self.dtype = config.compute.dtype

    def __call__(self, ids: Int[Array, "#B T"]) -> Float[Array, "#B T D"]:
        """Looks up the rows `ids`, which must be in range (checked on the host, not here)."""
        return jnp.take(self.embedding[...], ids, axis=0).astype(dtype_of(self.dtype))


class InputEmbedding(nnx.Module):
    """Token + position + token-type embeddings, then norm and dropout.

    With xavier_uniform, token tables start at d_model^-0.5, so that the paper's scaling by sqrt(d_model) (section 3.4)
    brings them to unit size. With `tokens=False` the table is another stack's (`shared_embedding`).
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, tokens: bool = True) -> None:
        assert config.vocab_size is not None
        std = config.initializer_std
        token_std = std if config.initializer == "normal" else config.d_model**-0.5
        self.tokens = Table(config.vocab_size, config, std=token_std) if tokens else None
        learned = stack.positions == "learned"
        self.positions = Table(stack.table_positions, config, std=std) if learned else None
        self.token_types = Table(stack.token_types, config, std=std) if stack.token_types else None
        self.norm = Norm(config, stack) if stack.embedding_norm else None
        self.dropout = Dropout(config.dropout.embedding)
        self.stack = stack

    def __call__(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "#B T"],
        table: Table,
        types: Int[Array, "B T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """Embeds `ids` by `table`; raises InputError if the sequence is longer than `max_positions`."""
        x = table(ids)
        if self.stack.embedding_scale:
            x = x * math.sqrt(x.shape[-1])
        longest = self.stack.max_positions
        if longest is not None and ids.shape[1] > longest:
            raise InputError(
                f"the sequence has {ids.shape[1]} tokens and the model {longest} positions; give a shorter sequence"
            )
        if self.positions is not None:
            x = x + self.positions(positions + self.stack.position_offset)
        elif self.stack.positions.startswith("sinusoidal"):
            interleaved = self.stack.positions == "sinusoidal_interleaved"
            x = x + sinusoidal(positions, x.shape[-1], self.stack.position_base, interleaved, x.dtype)
        if self.token_types is not None:
            x = x + self.token_types(jnp.zeros_like(ids) if types is None else types)
        return self.dropout(x if self.norm is None else self.norm(x), site_key(dropout_key, "dropout"))
