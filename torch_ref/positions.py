"""Where tokens stand: sinusoidal positions (paper, section 3.5), rotary and relative ones.

B batch, T length, D model width, H heads, C head width. Angles are in the type of the positions given.
"""

from itertools import count

import torch
from torch import Tensor, nn

from jax_tformer.config import StackConfig
from torch_ref.layers import high


def angles(positions: Tensor, width: int, base: float) -> Tensor:
    """position / base^(2i / width), `[B, T, width / 2]`."""
    denominator = torch.pow(base, torch.arange(0, width, 2, dtype=positions.dtype) / width)
    return positions[..., None] / denominator.to(positions.device)


def sinusoidal(positions: Tensor, width: int, base: float, interleaved: bool) -> Tensor:
    """The paper's position encoding, `[B, T, D]`: sine and cosine by turns, or all sines, then all cosines."""
    angle = angles(positions, width, base)
    if interleaved:
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary positions: rotates columns i and i + C/2 of `[B, H, T, C]` by the angle of their position."""
    angle = angles(positions, x.shape[-1], base)[:, None]
    cosine, sine = torch.cat([angle.cos()] * 2, dim=-1), torch.cat([angle.sin()] * 2, dim=-1)
    first, second = high(x).chunk(2, dim=-1)
    return (high(x) * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)


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
