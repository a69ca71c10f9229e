"""The layers of "Attention is all you need" and its descendants, on nn.Linear, nn.LayerNorm and nn.Embedding.

B batch, T query length, S key length, D model width, H heads, K key/value heads, C head width.
Masks are boolean, True = may attend. Norms, scores and softmax are in float32 at least, whatever the type of x.
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
    """Rotary positions: column i of `[B, H, T, C]` turns with column i + C/2."""
    angle = angles(positions, x.shape[-1], base)[:, None]
    cos, sin = torch.cat([angle.cos()] * 2, dim=-1), torch.cat([angle.sin()] * 2, dim=-1)
    first, second = high(x).chunk(2, dim=-1)
    return (high(x) * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """softmax(scale * Q K^T) V over heads; x asks, memory answers."""

    def __init__(self, config: TransformerConfig, stack: StackConfig):
        super().__init__()
        self.heads, self.groups = stack.num_heads, stack.num_heads // (stack.key_value_heads or stack.num_heads)
        self.width = config.head_width(stack)
        shared = self.heads // self.groups * self.width
        self.query = nn.Linear(config.d_model, self.heads * self.width, bias=stack.query_bias)
        self.key = nn.Linear(config.d_model, shared, bias=stack.key_bias)
        self.value = nn.Linear(config.d_model, shared, bias=stack.value_bias)
        self.output = nn.Linear(self.heads * self.width, config.d_model, bias=stack.output_bias)
        widths = {"head_width": self.width, "model_width": config.d_model, "none": 1}
        self.scale = 1 / math.sqrt(widths[stack.attention_scale])
        self.rotary_base = stack.position_base if stack.positions == "rotary" else None
        self.dropout = Dropout(config.dropout.attention)

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor | None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

        query, key, value = heads(self.query(x)), heads(self.key(memory)), heads(self.value(memory))
        if self.rotary_base is not None and positions is not None:
            query, key = rotate(query, positions, self.rotary_base), rotate(key, positions, self.rotary_base)
        key, value = key.repeat_interleave(self.groups, dim=1), value.repeat_interleave(self.groups, dim=1)
        scores = high(high(query) @ high(key).transpose(-2, -1)) * self.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)  # a row that may attend to nothing yields zeros
        output = self.dropout(weights).to(value.dtype) @ value
        return self.output(output.transpose(1, 2).flatten(-2)), weights


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


class Block(nn.Module):
    """One layer: post-norm as in the paper, norm(x + f(x)), or pre-norm, x + f(norm(x))."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, cross: bool):
        super().__init__()
        self.self_attention, self.self_attention_norm = Attention(config, stack), Norm(config, stack)
        self.cross_attention = Attention(config, stack) if cross else None
        self.cross_attention_norm = Norm(config, stack) if cross else None
        self.feedforward, self.feedforward_norm = FeedForward(config, stack), Norm(config, stack)
        self.self_attention_residual_dropout = Dropout(config.dropout.residual)
        self.cross_attention_residual_dropout = Dropout(config.dropout.residual) if cross else None
        self.feedforward_residual_dropout = Dropout(config.dropout.residual)
        self.pre = stack.norm_placement == "pre"

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual stream after the layer, self-attention weights, cross-attention weights."""
        cross_weights = None
        h = self.self_attention_norm(x) if self.pre else x
        h, self_weights = self.self_attention(h, h, mask, positions)
        x = self._add(x, self.self_attention_residual_dropout(h), self.self_attention_norm)
        if self.cross_attention is not None and self.cross_attention_norm is not None and memory is not None:
            assert self.cross_attention_residual_dropout is not None
            h = self.cross_attention_norm(x) if self.pre else x
            h, cross_weights = self.cross_attention(h, memory, memory_mask)
            x = self._add(x, self.cross_attention_residual_dropout(h), self.cross_attention_norm)
        h = self.feedforward(self.feedforward_norm(x) if self.pre else x)
        x = self._add(x, self.feedforward_residual_dropout(h), self.feedforward_norm)
        return x, self_weights, cross_weights

    def _add(self, x: Tensor, h: Tensor, norm: Norm) -> Tensor:
        return x + h if self.pre else norm(x + h)
