"""The encoder-decoder of "Attention is all you need" (Vaswani et al., 2017, section 3)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jax_tformer.config import TransformerConfig
from jax_tformer.models.outputs import Outputs
from jax_tformer.nn.blocks import Captured, Context
from jax_tformer.nn.cache import Cache, NewTokens
from jax_tformer.nn.dropout import split_key
from jax_tformer.nn.embedding import Head, InputEmbedding, Table
from jax_tformer.nn.masks import padding_mask
from jax_tformer.nn.positions import position_ids
from jax_tformer.nn.stacks import Stack


class EncoderDecoder(nnx.Module):
    """logits = decode(target, encode(source)): the decoder asks, the encoder's output answers."""

    def __init__(self, config: TransformerConfig):
        assert config.encoder is not None
        assert config.decoder is not None
        self.source_embedding = InputEmbedding(config, config.encoder)
        self.encoder = Stack(config, config.encoder, cross=False)
        self.target_embedding = InputEmbedding(config, config.decoder, tokens=not config.shared_embedding)
        self.decoder = Stack(config, config.decoder, cross=True)
        self.head = Head(config) if config.head != "none" else None

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        source_mask: Bool[Array, "B S"] | None = None,
        target_mask: Bool[Array, "B T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        capture: bool = False,
        project: bool = True,
    ) -> Float[Array, "B T V"] | Outputs:
        """Logits `[B, T, V]` of the token after each of `target` (shifted right: it begins with the start token).

        Masks are True at tokens and False at padding, on either side. Without a head: hidden states `[B, T, D]`;
        without `project`, what the vocabulary projection would be given (see `projection`); with `capture`, Outputs.
        """
        encoder_key, decoder_key = split_key(dropout_key, 2)
        source_key, encoder_key = split_key(encoder_key, 2)
        target_key, decoder_key = split_key(decoder_key, 2)
        source_keep = self.source_embedding.draw_keep(source_key, source)
        target_keep = self.target_embedding.draw_keep(target_key, target)
        memory, encoder = self._encode(source, source_mask, source_keep, encoder_key, capture)
        x, decoder = self._decode(target, memory, source_mask, target_mask, target_keep, decoder_key, capture)
        logits = self._read_out(x, project)
        keeps = {"source_embedding": source_keep, "target_embedding": target_keep}
        return Outputs(logits, encoder, decoder, keeps) if capture else logits

    def encode(
        self, source: Int[Array, "B S"], *, source_mask: Bool[Array, "B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """The memory that `decode` attends to."""
        return self._encode(source, source_mask, None, None, False)[0]

    def decode(
        self,
        target: Int[Array, "B T"],
        memory: Float[Array, "B S D"],
        *,
        source_mask: Bool[Array, "B S"] | None = None,
        target_mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the token after each of `target`, given the encoder's output."""
        return self._read_out(self._decode(target, memory, source_mask, target_mask, None, None, False)[0], True)

    def projection(self) -> tuple[Float[Array, "V D"], Float[Array, " V"] | None]:
        """The matrix and the bias of the vocabulary projection, which must exist."""
        assert self.head is not None
        return self.head.projection(self._target_table)

    def new_cache(
        self, source: Int[Array, "B S"], slots: int, *, source_mask: Bool[Array, "B S"] | None = None
    ) -> Cache:
        """A cache for targets of up to `slots` tokens that holds what the decoder needs of the encoded source."""
        layers = self.decoder.empty_cache(len(source), slots, self.encode(source, source_mask=source_mask))
        return Cache(layers, jnp.zeros((len(source), slots), bool), jnp.asarray(0, jnp.int32), source_mask)

    def extend(
        self,
        target: Int[Array, "N T"],
        cache: Cache,
        *,
        mask: Bool[Array, "N T"] | None = None,
        only_last: bool = False,
    ) -> tuple[Float[Array, "N t V"], Cache]:
        """Logits after each of `target` (or after the last one), which comes after what is in the cache; the new cache.

        `mask` is True at tokens and False at padding, on either side.
        """
        cache, positions, self_mask = cache.place(jnp.ones(target.shape, bool) if mask is None else mask)
        new = NewTokens(
            cache.filled - target.shape[1],
            self_mask,
            padding_mask(cache.source_mask),
            self.decoder.rotation(positions),
        )
        x = self.target_embedding(target, positions, table=self._target_table)
        x, layers = self.decoder.extend(x, cache.layers, new)
        x = x[:, -1:] if only_last else x
        return (x if self.head is None else self.head(x, self._target_table)), cache._replace(layers=layers)

    def _encode(
        self, source: Array, source_mask: Array | None, keep: Array | None, key: Array | None, capture: bool
    ) -> tuple[Array, Captured | None]:
        positions = position_ids(source.shape[1], source_mask)
        x = self.source_embedding(source, positions, keep=keep)
        context = Context(causal=False, self_mask=padding_mask(source_mask), rotation=self.encoder.rotation(positions))
        return self.encoder(x, context, dropout_key=key, capture=capture)

    def _decode(
        self,
        target: Array,
        memory: Array,
        source_mask: Array | None,
        target_mask: Array | None,
        keep: Array | None,
        key: Array | None,
        capture: bool,
    ) -> tuple[Array, Captured | None]:
        positions = position_ids(target.shape[1], target_mask)
        x = self.target_embedding(target, positions, table=self._target_table, keep=keep)
        context = Context(
            causal=True,
            self_mask=padding_mask(target_mask),
            memory=memory,
            cross_mask=padding_mask(source_mask),
            rotation=self.decoder.rotation(positions),
        )
        return self.decoder(x, context, dropout_key=key, capture=capture)

    def _read_out(self, x: Array, project: bool) -> Array:
        if self.head is None:
            return x
        return self.head(x, self._target_table) if project else self.head.transformed(x)

    @property
    def _target_table(self) -> Table:
        return self.target_embedding.tokens or self.source_embedding.table
