"""How a model knows where a token stands: position ids, sinusoids, rotation."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_tformer.nn.arrays import accumulator


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the rotary angles `[#B, T, C/2]` of the positions in one forward pass."""

    cosine: Float[Array, "#B T c"]
    sine: Float[Array, "#B T c"]


def position_ids(length: int, tokens: Bool[Array, "B T"] | None) -> Int[Array, "#B T"]:
    """0, 1, 2 ... along the tokens (True) of each row, so that padding on the left does not shift them."""
    if tokens is None:
        return jnp.arange(length)[None, :]
    return jnp.maximum(jnp.cumsum(tokens, axis=1) - 1, 0)


def angles(positions: Int[Array, "#B T"], width: int, base: float, dtype: jnp.dtype) -> Float[Array, "#B T W"]:
    """position / base^(2i / width) for i = 0 .. width/2 - 1 (paper, section 3.5); radians, in at least float32."""
    dtype = accumulator(dtype)
    denominator = jnp.power(jnp.asarray(base, dtype), jnp.arange(0, width, 2, dtype=dtype) / width)
    return positions[:, :, None].astype(dtype) / denominator[None, None, :]


def sinusoidal(
    positions: Int[Array, "#B T"], width: int, *, interleaved: bool, base: float, dtype: jnp.dtype
) -> Float[Array, "#B T D"]:
    """The paper's position encoding (section 3.5).

    Interleaved: sine at even and cosine at odd columns, as the paper writes it. Otherwise all sines, then all
    cosines, as its first implementation (tensor2tensor) and many after it have them.
    """
    angle = angles(positions, width, base, dtype)
    if interleaved:
        table = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape((*angle.shape[:2], width))
    else:
        table = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return table.astype(dtype)


def rotate(
    x: Float[Array, "B T H C"], cosine: Float[Array, "#B T c"], sine: Float[Array, "#B T c"]
) -> Float[Array, "B T H C"]:
    """Rotary positions (Su et al., 2021): turns column i with column i + C/2 by the angle of its position.

    This pairing of the two halves is the one in which Hugging Face stores weights. Computed in the type of the
    angles, returned in that of x.
    """
    first, second = jnp.split(x.astype(cosine.dtype), 2, axis=-1)
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
