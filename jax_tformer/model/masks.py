"""Describes who may attend to whom, and computes the softmax under such a mask.

`Mask.boolean` is `visible` of torch_ref/masks.py, and `Mask.softmax` the middle of torch_ref/attention.py.
`Mask.softmax` makes a boolean array of a `Mask`, True = may attend; fused kernels read those of its fields that `READS`
names (fast.py). `Stack.masks` makes those of self-attention, `EncoderDecoder.decode` that of cross-attention.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_tformer.model.layers import soft_cap
from jax_tformer.model.parameters import Count, Ids, Marks, Numbers, Positions, SourceIds, SourceMarks


@dataclass(frozen=True)
class Mask:
    """Query t, at place `first` + t among the keys, attends to the keys that all of the first five fields allow.

    `first` and `stripe` say where the queries stand; `bias` and `cap` change scores, and hide nothing.
    """

    causal: bool = False
    """Allows keys at the query's own place and before (paper, section 3.2.3)."""
    window: int | None = None
    """Allows keys less than this many places away, on either side (Beltagy et al., 2020); padding takes places."""
    is_token: SourceMarks = None
    """Allows keys that are tokens (True), not padding."""
    segments: tuple[Ids, SourceIds] | None = None
    """Allows keys of the query's own segment, such as a document: the segment numbers of queries and of keys."""
    prefix: tuple[Bool[Array, "B T"], Bool[Array, "B S"]] | None = None
    """If causal, queries in the prefix (True) also see later keys in the prefix (Raffel et al., 2020)."""
    first: Count | int = 0
    """The place of the first query: 0, or the first free slot of a cache."""
    stripe: tuple[Count | int, int] = (0, 1)
    """(i, n): the queries are those at places `first` + i + n t, one of the n stripes that devices share."""
    bias: Float[Array, "#B #H T S"] | None = None
    """Added to the scaled scores; hides nothing."""
    cap: float | None = None
    """Bounds the scaled scores smoothly, before the bias (see `soft_cap`)."""

    def boolean(
        self, length: int, slots: int, rows: slice = slice(None), columns: slice = slice(None)
    ) -> Bool[Array, "B 1 t s"] | None:
        """Returns the mask of `length` queries and `slots` keys, `[B or 1, 1, T or 1, S]`, or some rows and columns.

        Returns None if every query may attend to every key.
        """
        parts = []
        if self.causal or self.window is not None:
            number, stripes = self.stripe
            places = self.first + number + stripes * jnp.arange(length)[rows]
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
        """Returns the keys that queries in `rows` can see at all, as far as is known before computing."""
        if not isinstance(self.first, int):
            return range(slots)
        # Of any stripe, so that all devices skip the same keys.
        begin, end = (self.first + self.stripe[1] * row for row in (rows.start, rows.stop))
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
        """Computes attention weights of some queries and keys from their scores: bound, add the bias, hide keys."""
        if self.cap is not None:
            scores = soft_cap(scores, self.cap)
        if self.bias is not None:
            scores = scores + self.bias[:, :, rows, columns].astype(scores.dtype)
        seen = self.boolean(length, slots, rows, columns)
        if seen is not None and self.causal and self.is_token is None:
            # Every row sees itself, so none is empty. Then adding is enough, and costs nothing in the backward pass.
            scores = scores + jnp.where(seen, 0.0, -jnp.inf).astype(scores.dtype)
            seen = None
        return masked_softmax(scores, seen)


def position_ids(tokens: Ids, is_token: Marks, segments: Numbers = None) -> Positions:
    """Numbers the tokens of each segment 0, 1, 2 ...; padding (False) on the left does not count."""
    if segments is None:
        if is_token is None:
            return jnp.arange(tokens.shape[1])[None, :]
        return jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0)
    counted = jnp.ones_like(segments) if is_token is None else is_token.astype(segments.dtype)
    so_far = jnp.cumsum(counted, axis=1)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    before = jax.lax.cummax(jnp.where(begins, so_far - counted, 0), axis=1)
    return jnp.maximum(so_far - before - 1, 0)


@jax.custom_jvp
def masked_softmax(scores: Float[Array, "B H T S"], mask: Bool[Array, "#B #H #T S"] | None) -> Float[Array, "B H T S"]:
    """Computes attention weights: 0 where the mask is False, and all 0 in a row that may attend to nothing.

    The transpose of its derivative is w * (g - sum(w * g)). JAX's derivative of `jax.nn.softmax` instead divides g by
    the sum of the exponentials first, and so subtracts rounded numbers: if all g are nearly equal, the gradients of
    queries and keys then lose three times as much precision as PyTorch's.
    """
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.where(mask, weights, 0)


@masked_softmax.defjvp
def _masked_softmax_jvp(primals: tuple[Array, Array | None], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    weights = masked_softmax(*primals)
    slope, _ = tangents
    moved = weights * slope
    return weights, moved - weights * moved.sum(-1, keepdims=True)
