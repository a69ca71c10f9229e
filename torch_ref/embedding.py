"""The embeddings of tokens (paper, section 3.4) and of where they stand: sinusoidal (3.5), rotary and relative.

B batch, T length, D model width, H heads, C head width, V vocabulary. Angles are in the type of the positions given.
"""

import math
from itertools import count

import torch
from torch import Tensor, nn

from jax_tformer.config import RotaryConfig, StackConfig, TransformerConfig
from torch_ref.layers import Dropout, Norm, high


class InputEmbedding(nn.Module):
    """Token + position + token-type embeddings, then norm and dropout."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, tokens: bool = True):
        super().__init__()
        assert config.vocab_size is not None
        self.tokens = nn.Embedding(config.vocab_size, config.d_model) if tokens else None
        learned = stack.positions == "learned"
        self.positions = nn.Embedding(stack.table_positions, config.d_model) if learned else None
        self.token_types = nn.Embedding(stack.token_types, config.d_model) if stack.token_types else None
        self.norm = Norm(config, stack) if stack.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout.embedding)
        self.stack = stack

    def forward(self, ids: Tensor, positions: Tensor, table: nn.Embedding, types: Tensor | None = None) -> Tensor:
        x = table(ids)
        if self.stack.embedding_scale:
            x = x * math.sqrt(x.shape[-1])
        if self.positions is not None:
            x = x + self.positions(positions + self.stack.position_offset)
        elif self.stack.positions.startswith("sinusoidal"):
            interleaved = self.stack.positions == "sinusoidal_interleaved"
            positions = positions.to(high(x).dtype)
            x = x + sinusoidal(positions, x.shape[-1], self.stack.position_base, interleaved).to(x.dtype)
        if self.token_types is not None:
            x = x + self.token_types(torch.zeros_like(ids) if types is None else types)
        return self.dropout(self.norm(x))


def angles(positions: Tensor, width: int, base: float, scaling: RotaryConfig | None = None) -> Tensor:
    """position / base^(2i / width), `[B, T, width / 2]`, with the waves that `scaling` stretches."""
    denominator = torch.pow(base, torch.arange(0, width, 2, dtype=positions.dtype) / width)
    if scaling is not None:
        denominator = scaled(denominator, scaling)
    return positions[..., None] / denominator.to(positions.device)


def scaled(denominator: Tensor, scaling: RotaryConfig) -> Tensor:
    """linear: all waves are `factor` times as long; llama3: the long ones, and those between in part."""
    if scaling.scaling == "none":
        return denominator
    if scaling.scaling == "linear":
        return denominator * scaling.factor
    wavelength = 2 * math.pi * denominator
    longest = scaling.original_positions / scaling.low_frequency_factor
    shortest = scaling.original_positions / scaling.high_frequency_factor
    between = scaling.original_positions / wavelength - scaling.low_frequency_factor
    kept = between / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    frequency = (1 - kept) / (denominator * scaling.factor) + kept / denominator
    stretched = torch.where(wavelength > longest, denominator * scaling.factor, 1 / frequency)
    return torch.where(wavelength < shortest, denominator, stretched)


def rotary_angles(config: TransformerConfig, stack: StackConfig, positions: Tensor, window: int | None) -> Tensor:
    """The angles of a layer with this window, `[B, T, c]`, c pairs of columns."""
    width = stack.rotary.width or config.head_width(stack)
    if window is not None and stack.rotary.window_base is not None:
        return angles(positions, width, stack.rotary.window_base)
    return angles(positions, width, stack.position_base, stack.rotary)


def sinusoidal(positions: Tensor, width: int, base: float, interleaved: bool) -> Tensor:
    """The paper's position encoding, `[B, T, D]`: sine and cosine by turns, or all sines, then all cosines."""
    angle = angles(positions, width, base)
    if interleaved:
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotary positions: rotates columns i and i + c of `[B, H, T, C]` by the c angles of their position.

    c is C / 2, or less: then the columns from 2c on stay.
    """
    angle = angle[:, None]
    cosine, sine = torch.cat([angle.cos()] * 2, dim=-1), torch.cat([angle.sin()] * 2, dim=-1)
    turning, staying = high(x).split([cosine.shape[-1], x.shape[-1] - cosine.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cosine + torch.cat([-second, first], dim=-1) * sine
    return torch.cat([turned, staying], dim=-1).to(x.dtype)


class RelativePositions(nn.Module):
    """A learned bias of the scores by distance and head, which all layers of a stack share (Raffel et al., 2020)."""

    def __init__(self, stack: StackConfig, causal: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(stack.relative_buckets, stack.num_heads))
        self.max_distance, self.causal = stack.relative_max_distance, causal

    def forward(self, length: int) -> Tensor:
        """The bias of the scores, `[1, H, T, T]`."""
        places = torch.arange(length, device=self.weight.device)
        # Place of the key less place of the query.
        relative = places[None, :] - places[:, None]
        rows = bucket(relative, len(self.weight), self.max_distance, self.causal)
        return self.weight[rows].permute(2, 0, 1)[None]


def bucket(relative: Tensor, buckets: int, max_distance: int, causal: bool) -> Tensor:
    """The row for each distance: the first half of a side's for one each, the others evenly in the logarithm.

    Where `causal`, all keys that come later count as the query's own place; otherwise the second half is for them.
    """
    side = buckets if causal else buckets // 2
    distance = (-relative).clamp(min=0) if causal else relative.abs()
    exact = side // 2
    rows = distance.clamp(max=exact)
    # A distance is k buckets on if (distance / exact)^rest >= (max_distance / exact)^k: a sum of whole comparisons,
    # which no rounding of a logarithm can turn.
    rest = side - exact
    for k in range(1, rest):
        first = next(d for d in count(exact) if d**rest * exact**k >= max_distance**k * exact**rest)
        rows = rows + (distance >= first)
    return rows if causal else rows + side * (relative > 0)
