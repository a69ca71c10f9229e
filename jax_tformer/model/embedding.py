"""The embeddings of tokens (paper, section 3.4) and of where they stand, the same as in torch_ref/embedding.py.

Positions are sinusoidal (paper, section 3.5), learned, rotary or relative.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_tformer.config import RotaryConfig, StackConfig, TransformerConfig
from jax_tformer.config.errors import require
from jax_tformer.model.layers import Norm, identity
from jax_tformer.model.masks import Mask
from jax_tformer.model.parameters import (
    Dropout,
    DropoutKey,
    Ids,
    Numbers,
    Positions,
    Start,
    Stream,
    accumulator,
    dtype_of,
    parameter,
)


class Table(nnx.Module):
    """A lookup table `[rows, D]`."""

    def __init__(self, rows: int, config: TransformerConfig, *, std: float) -> None:
        self.embedding = parameter((rows, config.d_model), config, Start("normal", std))
        self.dtype = config.compute.dtype

    def __call__(self, ids: Positions) -> Float[Array, "#B T D"]:
        """Looks up the rows `ids`, which must be in range (checked on the host, not here)."""
        return jnp.take(self.embedding[...], ids, axis=0).astype(dtype_of(self.dtype))


class InputEmbedding(nnx.Module):
    """Token + position + token-type embeddings, then norm and dropout.

    With xavier_uniform, token tables start at d_model^-0.5, so that the paper's scaling by sqrt(d_model) (section 3.4)
    brings them to unit size. With `tokens=False` the table is another stack's (`shared_embedding`).
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, tokens: bool = True) -> None:
        assert config.vocab_size is not None
        std = config.initializer_std
        token_std = std if config.initializer == "normal" else config.d_model**-0.5
        self.tokens = Table(config.vocab_size, config, std=token_std) if tokens else None
        learned = stack.positions == "learned"
        self.positions = Table(stack.table_positions, config, std=std) if learned else None
        self.token_types = Table(stack.token_types, config, std=std) if stack.token_types else None
        self.norm = Norm(config, stack) if stack.embedding_norm else identity
        self.dropout = Dropout(config.dropout.embedding)
        self.stack = stack

    def __call__(
        self, ids: Ids, positions: Positions, table: Table, types: Numbers = None, dropout_key: DropoutKey = None
    ) -> Stream:
        """Embeds `ids` by `table`; raises InputError if the sequence is longer than `max_positions`."""
        x = table(ids)
        if self.stack.embedding_scale:
            x = x * math.sqrt(x.shape[-1])
        longest = self.stack.max_positions
        require(
            longest is None or ids.shape[1] <= longest,
            f"the sequence has {ids.shape[1]} tokens and the model {longest} positions; give a shorter sequence",
        )
        if self.positions is not None:
            x = x + self.positions(positions + self.stack.position_offset)
        elif self.stack.positions.startswith("sinusoidal"):
            interleaved = self.stack.positions == "sinusoidal_interleaved"
            x = x + sinusoidal(positions, x.shape[-1], self.stack.position_base, interleaved, x.dtype)
        if self.token_types is not None:
            x = x + self.token_types(jnp.zeros_like(ids) if types is None else types)
        return self.dropout(self.norm(x), dropout_key)


def angles(
    positions: Positions, width: int, base: float, dtype: jnp.dtype, scaling: RotaryConfig | None = None
) -> Float[Array, "#B T W"]:
    """position / base^(2i / width) for i = 0 .. width/2 - 1 (paper, section 3.5); radians, in at least float32.

    `scaling` says what divides the angles of rotary positions.
    """
    dtype = accumulator(dtype)
    denominator = jnp.power(jnp.asarray(base, dtype), jnp.arange(0, width, 2, dtype=dtype) / width)
    if scaling is not None:
        denominator = scaled(denominator, scaling)
    return positions[:, :, None].astype(dtype) / denominator[None, None, :]


def scaled(denominator: Float[Array, " W"], scaling: RotaryConfig) -> Float[Array, " W"]:
    """Stretches the waves of rotary positions for texts longer than those of training.

    linear: all by `factor` (Chen et al., 2023). llama3: only the long ones (Llama 3.1's config, 2024). A wave that
    turns more than `high_frequency_factor` times in `original_positions` stays as it is, one that turns less than
    `low_frequency_factor` times is stretched in full, and the frequencies in between are mixed.
    """
    if scaling.scaling == "none":
        return denominator
    if scaling.scaling == "linear":
        return denominator * scaling.factor
    turns = scaling.original_positions / (2 * math.pi * denominator)
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return denominator / (kept + (1 - kept) / scaling.factor)


def sinusoidal(
    positions: Positions, width: int, base: float, interleaved: bool, dtype: jnp.dtype
) -> Float[Array, "#B T D"]:
    """Computes the paper's position encoding (section 3.5): if `interleaved`, sines in even and cosines in odd columns.

    Otherwise all sines, then all cosines, as in its first implementation (tensor2tensor) and many later ones.
    """
    angle = angles(positions, width, base, dtype)
    order = "(w part)" if interleaved else "(part w)"
    table = rearrange([jnp.sin(angle), jnp.cos(angle)], f"part b t w -> b t {order}")
    return table.astype(dtype)


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles of the positions in one forward pass."""

    cosine: Float[Array, "#B T c"]
    sine: Float[Array, "#B T c"]


def rotary_angles(
    config: TransformerConfig, stack: StackConfig, positions: Positions, window: int | None
) -> Rotation | None:
    """Computes the rotary angles of `positions` for all layers with this window; None without rotary positions."""
    if stack.positions != "rotary":
        return None
    width = stack.rotary.width or config.head_width(stack)
    dtype = dtype_of(config.compute.dtype)
    if window is not None and stack.rotary.window_base is not None:
        angle = angles(positions, width, stack.rotary.window_base, dtype)
    else:
        angle = angles(positions, width, stack.position_base, dtype, stack.rotary)
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(x: Float[Array, "B T H C"], rotation: Rotation | None) -> Float[Array, "B T H C"]:
    """Rotary positions (Su et al., 2021): rotates columns i and i + C/2 by the angle of their position.

    Hugging Face stores weights for this pairing of the two halves. With fewer angles than C/2, the columns after the
    turned ones stay. Computes in the type of the angles and returns that of x; without a rotation, x itself.
    """
    if rotation is None:
        return x
    cosine, sine = (part[:, :, None, :] for part in rotation)
    half = cosine.shape[-1]
    first, second, rest = jnp.split(x.astype(cosine.dtype), [half, 2 * half], axis=-1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate([*turned, rest], axis=-1).astype(x.dtype)


class RelativePositions(nnx.Module):
    """A learned bias of the scores of a stack's self-attention, by distance and head (Raffel et al., 2020, 2.1).

    All layers of the stack share it. Distances are counted in places of the row or the cache, so padding between two
    tokens takes part in their distance; padding on either side of all tokens changes nothing.
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig) -> None:
        shape = (stack.relative_buckets, stack.num_heads)
        self.embedding = parameter(shape, config, Start("normal", config.initializer_std))
        self.max_distance = stack.relative_max_distance
        self.dtype = config.compute.dtype

    def __call__(self, mask: Mask, length: int, slots: int) -> Float[Array, "1 H T S"]:
        """Returns the bias of `length` queries and `slots` keys, in at least float32.

        `mask.first` is the place of the first query. If `mask.causal`, no bucket is for keys that come later.
        """
        # Every place of a key less that of a query once: the number of buckets to find grows with T + S, not T * S.
        relative = jnp.arange(1 - length, slots) - mask.first
        table = self.embedding[...]
        values = jnp.take(table, relative_buckets(relative, len(table), self.max_distance, mask.causal), axis=0)
        which = jnp.arange(slots)[None, :] - jnp.arange(length)[:, None] + length - 1
        return values.T[None, :, which].astype(accumulator(dtype_of(self.dtype)))


def relative_buckets(relative: Int[Array, " N"], buckets: int, max_distance: int, causal: bool) -> Int[Array, " N"]:
    """Returns the bucket of each distance, place of the key less place of the query (Raffel et al., 2020, section 2.1).

    Half of a side's buckets are for one distance each. The others divide the distances up to `max_distance`, from where
    on all are alike, evenly in their logarithm. If `causal`, all buckets are for keys that come earlier, and keys that
    come later are in that of the query's own place; otherwise the second half is for keys that come later.
    """
    side = buckets if causal else buckets // 2
    distance = jnp.maximum(-relative, 0) if causal else jnp.abs(relative)
    bucket = (distance[:, None] >= jnp.asarray(first_distances(side, max_distance))[None, :]).sum(1) - 1
    return bucket if causal else bucket + jnp.where(relative > 0, side, 0)


def first_distances(buckets: int, max_distance: int) -> np.ndarray:
    """Returns the smallest distance in each bucket of one side, as whole numbers, int32 `[buckets]`.

    Bucket m + k of m + n begins where n log(distance / m) / log(max_distance / m) reaches k, which is at the n-th root
    of max_distance^k m^(n - k). Whole numbers compare exactly; logarithms in floating point put some distances that lie
    on an edge, such as 84 of 36 buckets up to 392, on one side or the other by the type and the machine.
    """
    single = buckets // 2
    spread = buckets - single
    powers = [max_distance**k * single ** (spread - k) for k in range(spread)]
    edges = [bisect_left(range(max_distance), power, key=lambda distance: distance**spread) for power in powers]
    return np.array([*range(single), *edges], np.int32)
