"""What a decoder keeps between tokens: an argument of the forward pass, and part of its result."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.errors import require
from jax_tformer.model.masks import position_ids
from jax_tformer.model.parameters import Count, Ids, KeyHeads, Marks, Numbers, Positions, dtype_of


class KeyValue(NamedTuple):
    """Cached keys and values, `[R, S, C]` with R = B * K: a row for each head of each sequence.

    With two leading axes, that of a single sequence would have size one, and XLA on CPU would copy the whole cache
    several times per token.
    """

    key: Float[Array, "R S C"]
    value: Float[Array, "R S C"]

    def write(self, key: Float[Array, "B T K C"], value: Float[Array, "B T K C"], first: Count | int) -> "KeyValue":
        """Returns the cache with these keys and values in the slots from `first` on."""
        update = jax.lax.dynamic_update_slice_in_dim
        rows = (rearrange(x, "b t k c -> (b k) t c") for x in (key, value))
        return KeyValue(*(update(old, new, first, axis=1) for old, new in zip(self, rows, strict=True)))

    def read(self, heads: int) -> tuple[KeyHeads, KeyHeads]:
        """Returns keys and values in the layout of `attend`, for this many key/value heads."""
        key, value = (rearrange(x, "(b k) s c -> b s k c", k=heads) for x in self)
        return key, value


class LayerCache(NamedTuple):
    """The keys and values that one decoder layer keeps between tokens."""

    self_attention: KeyValue
    cross_attention: KeyValue | None
    """Keys and values of the encoder's output. Sequences with the same source may share rows."""


class Cache(NamedTuple):
    """The keys and values of all layers, and which slots are filled."""

    layers: tuple[LayerCache, ...]
    is_token: Bool[Array, "B S"]
    """Which slots hold a token; the others are padding, or still empty."""
    filled: Count | int
    """The number of used slots, padding included; the next token goes there."""
    source_is_token: Bool[Array, "b S"] | None = None
    """Which positions of the encoder's output are tokens; None: all."""

    def map_self_attention(self, change: Callable[[Array], Array]) -> "Cache":
        """Returns the cache with `change` made to the keys and values of self-attention, `[R, S, C]`, of all layers."""
        layers = (each._replace(self_attention=KeyValue(*map(change, each.self_attention))) for each in self.layers)
        return self._replace(layers=tuple(layers))

    def take_slots(self, new: Bool[Array, "B T"]) -> tuple[Ids, "Cache"]:
        """Takes the next T slots (`new`: True at tokens); returns their positions, counting only tokens, and the cache.

        Raises InputError if fewer than T slots are free. Compiled code cannot check that and overwrites the last ones.
        """
        used = self.filled
        available = self.is_token.shape[1]
        length = new.shape[1]
        if not isinstance(used, jax.core.Tracer):
            require(
                int(used) + length <= available,
                f"the cache has {available} slots and {used} are used; expected {length} free",
            )
        positions = jnp.maximum(self.is_token.sum(1, keepdims=True) + jnp.cumsum(new, axis=1) - 1, 0)
        is_token = jax.lax.dynamic_update_slice_in_dim(self.is_token, new, used, axis=1)
        return positions, self._replace(is_token=is_token, filled=used + length)


def empty_cache(
    config: TransformerConfig, stack: StackConfig, batch: int, slots: int, source_slots: int | None = None
) -> Cache:
    """Makes a cache for `slots` tokens of `batch` sequences, and for an encoder's output of `source_slots`."""
    rows = batch * (stack.key_value_heads or stack.num_heads)
    width = config.head_width(stack)
    dtype = dtype_of(config.compute.dtype)

    def empty(slots: int) -> KeyValue:
        zeros = jnp.zeros((rows, slots, width), dtype)
        return KeyValue(zeros, zeros)

    layer = LayerCache(empty(slots), None if source_slots is None else empty(source_slots))
    return Cache((layer,) * stack.num_layers, jnp.zeros((batch, slots), bool), 0)


def place_tokens(
    tokens: Ids, is_token: Marks, segments: Numbers, cache: Cache | None
) -> tuple[Positions, Cache | None]:
    """Returns the positions of a sequence's tokens, and the cache with slots for them behind those that it holds."""
    if cache is None:
        return position_ids(tokens, is_token, segments), None
    require(segments is None, "there are segments and a cache, which holds one text a row; expected one of them")
    return cache.take_slots(jnp.ones(tokens.shape, bool) if is_token is None else is_token)
