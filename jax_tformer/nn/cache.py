"""What decoding remembers: the keys and values of the tokens so far, in slots that are allocated once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_tformer.config import require
from jax_tformer.nn.positions import Rotation


class KeyValue(NamedTuple):
    """Keys and values of one attention, `[R, S, C]` with R = B * K: a row for each key/value head of each sequence.

    One leading axis and not two: where a single sequence is decoded, an axis of size one makes XLA on CPU copy the
    whole cache several times a token.
    """

    key: Float[Array, "R S C"]
    value: Float[Array, "R S C"]

    def write(self, new: "KeyValue", slot: Int[Array, ""]) -> "KeyValue":
        """With `new`, `[R, T, C]`, in the slots from `slot` on."""
        return KeyValue(
            *(jax.lax.dynamic_update_slice_in_dim(old, x, slot, axis=1) for old, x in zip(self, new, strict=True))
        )


class LayerCache(NamedTuple):
    """What one layer remembers."""

    self_attention: KeyValue
    cross_attention: KeyValue | None
    """Of the encoder's output, computed once. Its rows may be fewer: sequences with one source share them."""


class NewTokens(NamedTuple):
    """Where tokens stand that come after those in a cache, and what they may attend to; all layers see it alike."""

    slot: Int[Array, ""]
    """The first of their slots."""
    self_mask: Bool[Array, "B 1 T S"]
    cross_mask: Bool[Array, "B 1 1 S"] | None = None
    rotation: Rotation | None = None


class Cache(NamedTuple):
    """The state of a decoder between tokens: an argument of `extend` and its result."""

    layers: tuple[LayerCache, ...]
    tokens: Bool[Array, "B S"]
    """The slots that hold a token; the others are padding, or still empty."""
    filled: Int[Array, ""]
    """Slots in use, padding included: where the next token goes."""
    source_mask: Bool[Array, "B S"] | None = None
    """Which positions of the encoder's output are tokens."""

    def place(self, new: Bool[Array, "B T"]) -> tuple["Cache", Int[Array, "B T"], Bool[Array, "B 1 T S"]]:
        """Takes the next T slots (`new`: True at tokens): the cache, their positions, and what they may attend to.

        Positions count tokens only, as `position_ids` does; a token attends to tokens in slots up to its own. Raises
        InputError where fewer than T slots are free; compiled code, which cannot know, would overwrite the last ones.
        """
        if not isinstance(self.filled, jax.core.Tracer):
            used, available = int(self.filled), self.tokens.shape[1]
            require(
                used + new.shape[1] <= available,
                f"the cache has {available} slots and {used} are used; expected {new.shape[1]} free",
            )
        positions = jnp.maximum(self.tokens.sum(1, keepdims=True) + jnp.cumsum(new, axis=1) - 1, 0)
        tokens = jax.lax.dynamic_update_slice_in_dim(self.tokens, new, self.filled, axis=1)
        slots = self.filled + jnp.arange(new.shape[1])
        causal = jnp.arange(tokens.shape[1])[None, :] <= slots[:, None]
        placed = self._replace(tokens=tokens, filled=self.filled + new.shape[1])
        return placed, positions, jnp.logical_and(tokens[:, None, None, :], causal[None, None])

    def grown(self, slots: int) -> "Cache":
        """With `slots` slots, of which the new ones are empty."""
        more = slots - self.tokens.shape[1]

        def pad(attention: KeyValue) -> KeyValue:
            return KeyValue(*(jnp.pad(x, ((0, 0), (0, more), (0, 0))) for x in attention))

        layers = tuple(layer._replace(self_attention=pad(layer.self_attention)) for layer in self.layers)
        return self._replace(layers=layers, tokens=jnp.pad(self.tokens, ((0, 0), (0, more))))

    def rows(self, chosen: Int[Array, " N"]) -> "Cache":
        """With the sequences `chosen`, in that order; each may be chosen often.

        Cross-attention stays as it is: the sequences of one source must remain neighbours.
        """

        def take(attention: KeyValue) -> KeyValue:
            return KeyValue(*(take_rows(x) for x in attention))

        def take_rows(x: Array) -> Array:
            apart = x.reshape(self.tokens.shape[0], -1, *x.shape[1:])
            return apart[chosen].reshape(-1, *x.shape[1:])

        layers = tuple(layer._replace(self_attention=take(layer.self_attention)) for layer in self.layers)
        return self._replace(layers=layers, tokens=self.tokens[chosen])
