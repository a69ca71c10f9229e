"""Where tokens stand: sinusoidal positions (paper, section 3.5) and rotary ones, as in torch_ref/positions.py."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.model.layers import accumulator, dtype_of


def angles(positions: Int[Array, "#B T"], width: int, base: float, dtype: jnp.dtype) -> Float[Array, "#B T W"]:
    """position / base^(2i / width) for i = 0 .. width/2 - 1 (paper, section 3.5); radians, in at least float32."""
    dtype = accumulator(dtype)
    denominator = jnp.power(jnp.asarray(base, dtype), jnp.arange(0, width, 2, dtype=dtype) / width)
    return positions[:, :, None].astype(dtype) / denominator[None, None, :]


def sinusoidal(
    positions: Int[Array, "#B T"], width: int, base: float, interleaved: bool, dtype: jnp.dtype
) -> Float[Array, "#B T D"]:
    """Computes the paper's position encoding (section 3.5): if `interleaved`, sines in even and cosines in odd columns.

    Otherwise all sines, then all cosines, as in its first implementation (tensor2tensor) and many later ones.
    """
    angle = angles(positions, width, base, dtype)
    if interleaved:
        table = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape((*angle.shape[:2], width))
    else:
        table = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return table.astype(dtype)


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles of the positions in one forward pass."""

    cosine: Float[Array, "#B T c"]
    sine: Float[Array, "#B T c"]


def rotary_angles(config: TransformerConfig, stack: StackConfig, positions: Int[Array, "#B T"]) -> Rotation | None:
    """Computes the rotary angles of `positions` once for all layers; returns None without rotary positions."""
    if stack.positions != "rotary":
        return None
    angle = angles(positions, config.head_width(stack), stack.position_base, dtype_of(config.compute.dtype))
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(x: Float[Array, "B T H C"], rotation: Rotation) -> Float[Array, "B T H C"]:
    """Rotary positions (Su et al., 2021): rotates columns i and i + C/2 by the angle of their position.

    Hugging Face stores weights for this pairing of the two halves. Computes in the type of the angles and returns that
    of x.
    """
    cosine, sine = (part[:, :, None, :] for part in rotation)
    first, second = jnp.split(x.astype(cosine.dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
