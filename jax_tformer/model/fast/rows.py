"""What XLA on CPU multiplies fastest: attention in rows and blocks, and products of few rows, which decoding needs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jax_tformer.model.dropout import drop
from jax_tformer.model.masks import Mask
from jax_tformer.model.parameters import accumulator
from jax_tformer.scan import ATTENTION_OUTPUT

FEW_ROWS = 64
"""Up to so many rows, `multiply_by_rows` is faster than an ordinary product."""


def block_length(length: int) -> int:
    """Returns the queries per block: small blocks skip more of what a mask hides, large ones multiply faster.

    There are at most 32 blocks, because each is compiled separately.
    """
    return max(32 if length <= 64 else 64 if length <= 512 else 128, -(-length // 32))


def attend_in_rows(
    query: Float[Array, "N T H C"],
    key: Float[Array, "B S K C"],
    value: Float[Array, "B S K C"],
    mask: Mask,
    scale: float,
    dropout_rate: float = 0.0,
    keep: Bool[Array, "N H T S"] | None = None,
) -> tuple[Float[Array, "N T H C"], None]:
    """Computes `attend` with a row for each head of each sequence, a block of queries after the other.

    Multiplies a block of queries only with the keys that the mask may let it see. One leading axis, R = B * K, gives
    XLA's fast matrix products on CPU. The blocks are static, so plain differentiation gives the backward pass. N may be
    a multiple of B: then N/B neighbours attend to the same keys under one mask.
    """
    batch, slots, heads, width = key.shape
    key, value = (x.transpose(0, 2, 1, 3).reshape(-1, slots, width) for x in (key, value))
    groups = query.shape[2] // heads
    apart = query.reshape(batch, -1, heads, groups, width).transpose(0, 2, 3, 1, 4)
    queries, length = apart.reshape(len(key), groups, -1, width), apart.shape[3]
    skips = (mask.causal or mask.window is not None) and isinstance(mask.first, int)
    step = block_length(length) if skips else length
    outputs = []
    for start in range(0, length, step):
        block = range(start, min(start + step, length))
        span = mask.spanned(block, slots)
        rows, columns = slice(block.start, block.stop), slice(span.start, span.stop)
        part = queries[:, :, rows].reshape(len(key), -1, width)
        scores = jnp.einsum("rtc,rsc->rts", part, key[:, columns], preferred_element_type=accumulator(query.dtype))
        apart_by_head = (scores * scale).reshape(batch, -1, len(block), len(span))
        weights = mask.softmax(apart_by_head, length, slots, rows, columns)
        dropped = drop(weights, dropout_rate, None if keep is None else keep[:, :, rows, columns])
        output = jnp.einsum("rts,rsc->rtc", dropped.astype(value.dtype).reshape(scores.shape), value[:, columns])
        outputs.append(output.reshape(len(key), groups, len(block), width))
    together = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=2)
    output = together.reshape(apart.shape).transpose(0, 3, 1, 2, 4).reshape(query.shape)
    return checkpoint_name(output, ATTENTION_OUTPUT), None


def multiply_by_rows(
    x: Float[Array, "N I"], matrix: Float[Array, "O I"], dtype: DTypeLike | None = None
) -> Float[Array, "N O"]:
    """Computes x W^T for a matrix W that has a row for each output; `dtype` is that of the result, by default x's.

    Few rows of x are multiplied by two or more parts of W at a time. XLA on CPU then reads W as it lies in memory, and
    copies no part of it.
    """
    parts = next((count for count in range(2, 65) if len(matrix) % count == 0), 1)
    if len(x) > FEW_ROWS or parts == 1 or jax.default_backend() != "cpu":
        return jnp.matmul(x, matrix.T, preferred_element_type=dtype)
    apart, repeated = matrix.reshape(parts, -1, x.shape[1]), jnp.broadcast_to(x, (parts, *x.shape))
    return jnp.einsum("goi,gni->gon", apart, repeated, preferred_element_type=dtype).reshape(-1, len(x)).T


def multiply_new_tokens(
    x: Float[Array, "B T I"], matrix: Float[Array, "O I"], dtype: DTypeLike
) -> Float[Array, "B T O"]:
    """Computes x W^T; where each of several sequences has one token, as in decoding, by rows.

    Not elsewhere, since in training the gradients of x would be added up over the parts of W in the type of x.
    """
    flat = x.reshape(-1, x.shape[-1])
    by_rows = 1 < len(x) == len(flat)
    y = multiply_by_rows(flat, matrix, dtype) if by_rows else jnp.matmul(flat, matrix.T, preferred_element_type=dtype)
    return y.reshape(*x.shape[:-1], -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A kernel as its transposed matrix, the fastest layout to multiply few rows of x with (`multiply_by_rows`).

    `Linear` uses it like a matrix: it indexes it, reshapes it to inputs by outputs, casts it and multiplies.
    """

    matrix: Float[Array, "O I"]

    @staticmethod
    def of(kernel: Float[Array, "..."], inputs: int) -> "Transposed":
        """Transposes a kernel whose first axes have `inputs` elements together."""
        return Transposed(kernel.reshape(inputs, -1).T)

    def __getitem__(self, _: object) -> "Transposed":
        return self

    def reshape(self, *_: int) -> "Transposed":
        """Returns itself, because its shape is always that of a matrix."""
        return self

    def astype(self, dtype: DTypeLike) -> "Transposed":
        """Converts its numbers to another type."""
        return Transposed(self.matrix.astype(dtype))

    def __rmatmul__(self, x: Float[Array, "N I"]) -> Float[Array, "N O"]:
        return multiply_by_rows(x, self.matrix)
