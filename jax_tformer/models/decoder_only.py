"""The decoder alone: a language model, GPT's shape."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.config import TransformerConfig
from jax_tformer.models.outputs import Outputs
from jax_tformer.nn.blocks import Context
from jax_tformer.nn.cache import Cache, NewTokens
from jax_tformer.nn.dropout import split_key
from jax_tformer.nn.embedding import Head, InputEmbedding
from jax_tformer.nn.masks import padding_mask
from jax_tformer.nn.positions import position_ids
from jax_tformer.nn.stacks import Stack


class DecoderOnly(nnx.Module):
    """logits = head(decoder(embedding(tokens))), every position seeing itself and what stands before it."""

    def __init__(self, config: TransformerConfig):
        assert config.decoder is not None
        self.embedding = InputEmbedding(config, config.decoder)
        self.decoder = Stack(config, config.decoder, cross=False)
        self.head = Head(config) if config.head != "none" else None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        mask: Bool[Array, "B T"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        token_types: Int[Array, "B T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        capture: bool = False,
        project: bool = True,
    ) -> Float[Array, "B T V"] | Outputs:
        """Logits `[B, T, V]` (without a head: hidden states `[B, T, D]`); with `capture`, Outputs.

        Without `project`, what the vocabulary projection would be given `[B, T, D]` (see `projection`).

        `mask` is True at tokens and False at padding, on either side; positions then count tokens only.
        """
        embedding_key, decoder_key = split_key(dropout_key, 2)
        positions = position_ids(tokens.shape[1], mask) if positions is None else positions
        keep = self.embedding.draw_keep(embedding_key, tokens)
        x = self.embedding(tokens, positions, token_types=token_types, keep=keep)
        context = Context(causal=True, self_mask=padding_mask(mask), rotation=self.decoder.rotation(positions))
        x, captured = self.decoder(x, context, dropout_key=decoder_key, capture=capture)
        if self.head is not None:
            x = self.head(x, self.embedding.table) if project else self.head.transformed(x)
        return Outputs(x, decoder=captured, embedding_dropout={"embedding": keep}) if capture else x

    def projection(self) -> tuple[Float[Array, "V D"], Float[Array, " V"] | None]:
        """The matrix and the bias of the vocabulary projection, which must exist."""
        assert self.head is not None
        return self.head.projection(self.embedding.table)

    def new_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache for `batch` sequences of up to `slots` tokens, padding included."""
        layers = self.decoder.empty_cache(batch, slots)
        return Cache(layers, jnp.zeros((batch, slots), bool), jnp.asarray(0, jnp.int32))

    def extend(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        *,
        mask: Bool[Array, "B T"] | None = None,
        only_last: bool = False,
    ) -> tuple[Float[Array, "B t V"], Cache]:
        """Logits after each of `tokens` (or after the last one), which come after those in the cache; the new cache.

        `mask` is True at tokens and False at padding, on either side.
        """
        cache, positions, self_mask = cache.place(jnp.ones(tokens.shape, bool) if mask is None else mask)
        new = NewTokens(cache.filled - tokens.shape[1], self_mask, rotation=self.decoder.rotation(positions))
        x, layers = self.decoder.extend(self.embedding(tokens, positions), cache.layers, new)
        x = x[:, -1:] if only_last else x
        return (x if self.head is None else self.head(x, self.embedding.table)), cache._replace(layers=layers)
