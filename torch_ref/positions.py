"""Where tokens stand: sinusoidal positions (paper, section 3.5) and rotary ones.

B batch, T length, D model width, H heads, C head width. Angles are in the type of the positions given.
"""

import torch
from torch import Tensor

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
