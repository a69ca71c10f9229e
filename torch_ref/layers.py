"""The layers of "Attention is all you need" and its descendants, on PyTorch's own linear layers, norms and tables.

B batch, T length, D model width, H heads, C head width. Norms are in float32 at least, whatever the type of x.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jax_tformer.config import LoraConfig, StackConfig, TransformerConfig


def high(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Dropout(nn.Dropout):
    """nn.Dropout; with `keep` (True = kept) exactly that mask, whether training or not."""

    keep: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes what is not kept and divides the rest by 1 - p."""
        return super().forward(x) if self.keep is None else (x / (1 - self.p)).masked_fill(~self.keep, 0.0)


class Linear(nn.Linear):
    """x W^T + b, and LoRA's change of it if `target`, the projection's name, is one of its targets."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig, *, bias: bool, target: str):
        super().__init__(inputs, outputs, bias=bias)
        lora = config.lora
        self.lora = Adapter(inputs, outputs, lora) if lora is not None and lora.adapts(target) else None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.lora is None else (high(y) + self.lora(x)).to(y.dtype)


class Adapter(nn.Module):
    """scale * (x A^T) B^T, of low rank (Hu et al., 2021, section 4.1)."""

    def __init__(self, inputs: int, outputs: int, lora: LoraConfig):
        super().__init__()
        self.a, self.b = nn.Linear(inputs, lora.rank, bias=False), nn.Linear(lora.rank, outputs, bias=False)
        self.scale, self.dropout = lora.scale, Dropout(lora.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return high(self.b(self.a(self.dropout(x)))) * self.scale


class Norm(nn.Module):
    """LayerNorm, weight * (x - mean) / sqrt(var + eps) + bias, or RMSNorm, without mean and bias.

    With norm_unit_offset 1 + weight takes the place of weight. `width` is that of the last axis; None: D. Without
    `scales` there is neither weight nor bias.
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, width: int | None = None, *, scales: bool = True):
        super().__init__()
        width = config.d_model if width is None else width
        start = torch.zeros(width) if stack.norm_unit_offset else torch.ones(width)
        self.weight = nn.Parameter(start) if scales else None
        self.bias = nn.Parameter(torch.zeros(width)) if scales and stack.norm_bias else None
        self.kind, self.eps, self.offset = stack.norm, stack.norm_eps, stack.norm_unit_offset

    def forward(self, x: Tensor) -> Tensor:
        shape, weight = x.shape[-1:], None if self.weight is None else high(self.weight)
        weight = 1 + weight if self.offset and weight is not None else weight
        match self.kind:
            case "layernorm":
                bias = None if self.bias is None else high(self.bias)
                return F.layer_norm(high(x), shape, weight, bias, self.eps).to(x.dtype)
            case "rmsnorm":
                return F.rms_norm(high(x), shape, weight, self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    def __init__(self, config: TransformerConfig, stack: StackConfig):
        super().__init__()
        sizes, bias = (config.d_model, stack.feedforward_width), stack.feedforward_bias
        self.gate = Linear(*sizes, config, bias=bias, target="gate") if stack.gated else None
        self.up = Linear(*sizes, config, bias=bias, target="up")
        self.down = Linear(stack.feedforward_width, config.d_model, config, bias=bias, target="down")
        self.activation = activation(stack.activation)
        self.dropout = Dropout(config.dropout.feedforward)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.dropout(self.activation(self.up(x))))
        return self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))


class ReLUSquared(nn.Module):
    """max(x, 0)^2 (So et al., 2021)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


def activation(name: str) -> nn.Module:
    """The activation module called `name`."""
    return {
        "relu": nn.ReLU(),
        "relu_squared": ReLUSquared(),
        "gelu_erf": nn.GELU(approximate="none"),
        "gelu_tanh": nn.GELU(approximate="tanh"),
        "silu": nn.SiLU(),
    }[name]


def soft_cap(x: Tensor, cap: float, form: str = "tanh") -> Tensor:
    """cap * tanh(x / cap), or cap * x / sqrt(x^2 + cap^2): bounds x smoothly."""
    return cap * torch.tanh(x / cap) if form == "tanh" else cap * x / torch.sqrt(x.square() + cap**2)


def inject(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Gives each dropout site of `model` whose rate is above 0 its mask; an empty mapping takes all masks away.

    `masks` are boolean, True = kept, by the name of the site (`decoder.blocks.0.feedforward.dropout`). Raises
    ValueError, which lists both sides, unless there is one mask for each site with a rate above 0.
    """
    sites = {name: module for name, module in model.named_modules() if isinstance(module, Dropout)}
    expected = {name for name, site in sites.items() if site.p > 0}
    if masks and masks.keys() != expected:
        without, unknown = sorted(expected - masks.keys()), sorted(masks.keys() - expected)
        raise ValueError(f"dropout masks do not fit: sites without a mask {without}, masks without a site {unknown}")
    for name, site in sites.items():
        site.keep = masks.get(name)
