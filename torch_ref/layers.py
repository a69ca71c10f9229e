"""The layers of "Attention is all you need" and its descendants, on nn.Linear, nn.LayerNorm and nn.Embedding.

B batch, T length, D model width, H heads, C head width. Norms are in float32 at least, whatever the type of x.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jax_tformer.config import StackConfig, TransformerConfig
from torch_ref.dropout import Dropout


def high(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Norm(nn.Module):
    """LayerNorm, weight * (x - mean) / sqrt(var + eps) + bias, or RMSNorm, without mean and bias."""

    def __init__(self, config: TransformerConfig, stack: StackConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.d_model)) if stack.norm_bias else None
        self.kind, self.eps = stack.norm, stack.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        shape, weight = x.shape[-1:], high(self.weight)
        if self.kind == "rmsnorm":
            return F.rms_norm(high(x), shape, weight, self.eps).to(x.dtype)
        bias = None if self.bias is None else high(self.bias)
        return F.layer_norm(high(x), shape, weight, bias, self.eps).to(x.dtype)


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


class FeedForward(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    def __init__(self, config: TransformerConfig, stack: StackConfig):
        super().__init__()
        sizes, bias = (config.d_model, stack.feedforward_width), stack.feedforward_bias
        self.gate = nn.Linear(*sizes, bias=bias) if stack.gated else None
        self.up = nn.Linear(*sizes, bias=bias)
        self.down = nn.Linear(stack.feedforward_width, config.d_model, bias=bias)
        self.activation = activation(stack.activation)
        self.dropout = Dropout(config.dropout.feedforward)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.dropout(self.activation(self.up(x))))
        return self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))


def activation(name: str) -> nn.Module:
    """The activation module called `name`."""
    return {
        "relu": nn.ReLU(),
        "gelu_erf": nn.GELU(approximate="none"),
        "gelu_tanh": nn.GELU(approximate="tanh"),
        "silu": nn.SiLU(),
    }[name]


class InputEmbedding(nn.Module):
    """Token + position + token-type embeddings, then norm and dropout."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, tokens: bool = True):
        super().__init__()
        assert config.vocab_size is not None
        self.tokens = nn.Embedding(config.vocab_size, config.d_model) if tokens else None
        learned = stack.positions == "learned"
        self.positions = nn.Embedding(stack.max_positions or 0, config.d_model) if learned else None
        self.token_types = nn.Embedding(stack.token_types, config.d_model) if stack.token_types else None
        self.norm = Norm(config, stack) if stack.embedding_norm else None
        self.dropout = Dropout(config.dropout.embedding)
        self.stack = stack

    def forward(self, ids: Tensor, positions: Tensor, table: nn.Embedding, types: Tensor | None = None) -> Tensor:
        x = table(ids)
        if self.stack.embedding_scale:
            x = x * math.sqrt(x.shape[-1])
        if self.positions is not None:
            x = x + self.positions(positions)
        elif self.stack.positions.startswith("sinusoidal"):
            interleaved = self.stack.positions == "sinusoidal_interleaved"
            positions = positions.to(high(x).dtype)
            x = x + sinusoidal(positions, x.shape[-1], self.stack.position_base, interleaved).to(x.dtype)
        if self.token_types is not None:
            x = x + self.token_types(torch.zeros_like(ids) if types is None else types)
        return self.dropout(x if self.norm is None else self.norm(x))
