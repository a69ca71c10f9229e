"""Products of few rows, as decoding needs them: XLA on CPU reads a matrix fastest by its outputs, in several parts."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

FEW_ROWS = 64
"""Up to so many rows, `multiply_by_rows` is faster than an ordinary product."""


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
