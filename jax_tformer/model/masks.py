"""Who may attend to whom, and the softmax under such a mask; `visible` in torch_ref/attention.py says the same.

A `Mask` is a description: fused kernels read its fields, and `Mask.softmax` makes a boolean array of it, True = may
attend. `within` (attention.py) makes the mask of self-attention, `EncoderDecoder.decode` that of cross-attention.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_tformer.errors import InputError


@dataclass(frozen=True)
class Mask:
    """Query t, which stands at place `first` + t among the keys, attends to key s where all that is set allows it."""

    causal: bool = False
    """Keys at its own place and before (paper, section 3.2.3)."""
    window: int | None = None
    """Keys less than so many places away, to either side (Beltagy et al., 2020); padding counts as a place."""
    is_token: Bool[Array, "B S"] | None = None
    """Keys that are tokens (True) and not padding."""
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None
    """Keys of the query's own segment, a document in the row, say: the numbers of the queries, and of the keys."""
    prefix: tuple[Bool[Array, "B T"], Bool[Array, "B S"]] | None = None
    """Where causal: queries in the prefix (True) also see keys in the prefix that come later (Raffel et al., 2020)."""
    first: Int[Array, ""] | int = 0
    """The place of the first query: 0, or behind what a cache holds already."""
    bias: Float[Array, "#B #H #T #S"] | None = None
    """What is added to the scores, already scaled; allows everything."""

    def boolean(
        self, length: int, slots: int, rows: slice = slice(None), columns: slice = slice(None)
    ) -> Bool[Array, "B 1 t s"] | None:
        """The mask of `length` queries and `slots` keys, `[B or 1, 1, T or 1, S]`, or of some rows and columns of it.

        None where every query may attend to every key.
        """
        parts = []
        if self.causal or self.window is not None:
            places = self.first + jnp.arange(length)[rows]
            distance = (places[:, None] - jnp.arange(slots)[columns][None, :])[None, None]
            if self.causal:
                seen = distance >= 0
                if self.prefix is not None:
                    query_prefix, key_prefix = self.prefix
                    seen = jnp.logical_or(seen, query_prefix[:, None, rows, None] & key_prefix[:, None, None, columns])
                parts.append(seen)
            if self.window is not None:
                parts.append(jnp.abs(distance) < self.window)
        if self.is_token is not None:
            parts.append(self.is_token[:, None, None, columns])
        if self.segments is not None:
            query_segments, key_segments = self.segments
            parts.append(query_segments[:, None, rows, None] == key_segments[:, None, None, columns])
        return reduce(jnp.logical_and, parts) if parts else None

    def spanned(self, rows: range, slots: int) -> range:
        """The keys that queries in `rows` can see at all, as far as is known before anything is computed."""
        if not isinstance(self.first, int):
            return range(slots)
        begin, end = self.first + rows.start, self.first + rows.stop
        last = end if self.causal and self.prefix is None else slots
        if self.window is None:
            return range(min(last, slots))
        return range(max(0, begin - self.window + 1), min(last, slots, end + self.window - 1))

    def softmax(
        self,
        scores: Float[Array, "B H t s"],
        length: int,
        slots: int,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> Float[Array, "B H t s"]:
        """Attention weights of some queries and keys, given their scores: adds the bias, and gives 0 to hidden keys."""
        if self.bias is not None:
            _, _, queries, keys = self.bias.shape
            every = slice(None)
            part = self.bias[:, :, rows if queries > 1 else every, columns if keys > 1 else every]
            scores = scores + part.astype(scores.dtype)
        seen = self.boolean(length, slots, rows, columns)
        if seen is not None and self.causal and self.is_token is None:
            # Every row sees itself, so that none is empty: adding is enough, and costs nothing in the backward pass.
            zero, never = jnp.zeros((), scores.dtype), jnp.full((), -jnp.inf, scores.dtype)
            scores, seen = scores + jnp.where(seen, zero, never), None
        return masked_softmax(scores, seen)


def position_ids(
    length: int, is_token: Bool[Array, "B T"] | None, segments: Int[Array, "B T"] | None = None
) -> Int[Array, "#B T"]:
    """0, 1, 2 ... along the tokens of each segment; padding (False) on the left does not count."""
    if segments is None:
        if is_token is None:
            return jnp.arange(length)[None, :]
        return jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0)
    counted = jnp.ones_like(segments) if is_token is None else is_token.astype(segments.dtype)
    so_far = jnp.cumsum(counted, axis=1)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    before = jax.lax.cummax(jnp.where(begins, so_far - counted, 0), axis=1)
    return jnp.maximum(so_far - before - 1, 0)


def require_mask(name: str, mask: Array | None, shape: tuple[int, ...]) -> None:
    """Raises InputError unless the mask, if there is one, has the shape of the tokens that it marks."""
    if mask is not None and jnp.shape(mask) != shape:
        what = ": True at tokens, False at padding" if name.endswith("mask") else ""
        raise InputError(
            f"{name} has the shape {list(jnp.shape(mask))}; expected {list(shape)}, that of its tokens{what}"
        )


@jax.custom_jvp
def masked_softmax(scores: Float[Array, "B H T S"], mask: Bool[Array, "#B #H #T S"] | None) -> Float[Array, "B H T S"]:
    """Attention weights; 0 where the mask is False, and 0 all along a row that may attend to nothing.

    The derivative is that of the whole function, arranged so that its transpose is w * (g - sum(w * g)). What JAX makes
    of `jax.nn.softmax` divides g by the sum of the exponentials before it subtracts, and so subtracts rounded numbers:
    where all g are nearly equal, the gradients of queries and keys were seen to lose three times as much as PyTorch's.
    """
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.where(mask, weights, jnp.zeros((), scores.dtype))


@masked_softmax.defjvp
def _masked_softmax_jvp(primals: tuple[Array, Array | None], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    weights, (slope, _) = masked_softmax(*primals), tangents
    moved = weights * slope
    return weights, moved - weights * moved.sum(-1, keepdims=True)
