"""Scaled dot-product attention with its projections (paper, section 3.2), written out.

B batch, T query length, S key length, D model width, H heads, K key/value heads, C head width.
Masks are boolean, True = may attend. Scores and softmax are in float32 at least, whatever the type of x.
"""

import math

import torch
from torch import Tensor, nn

from jax_tformer.config import StackConfig, TransformerConfig
from torch_ref.embedding import rotary_angles, rotate
from torch_ref.layers import Dropout, Linear, Norm, high, soft_cap


class Attention(nn.Module):
    """softmax(scale * Q K^T) V over heads; queries come from x, keys and values from memory."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, window: int | None = None):
        super().__init__()
        self.config, self.stack, self.window = config, stack, window
        self.heads, self.groups = stack.num_heads, stack.num_heads // (stack.key_value_heads or stack.num_heads)
        self.width = config.head_width(stack)
        shared = self.heads // self.groups * self.width
        self.query = Linear(config.d_model, self.heads * self.width, config, bias=stack.query_bias, target="query")
        self.key = Linear(config.d_model, shared, config, bias=stack.key_bias, target="key")
        self.value = Linear(config.d_model, shared, config, bias=stack.value_bias, target="value")
        self.output = Linear(self.heads * self.width, config.d_model, config, bias=stack.output_bias, target="output")
        normed, scales = stack.query_key_norm, stack.query_key_scale
        self.query_norm = Norm(config, stack, self.width, scales=scales) if normed else nn.Identity()
        self.key_norm = Norm(config, stack, self.width, scales=scales) if normed else nn.Identity()
        self.scale = 1 / math.sqrt(config.scale_width(stack))
        self.dropout = Dropout(config.dropout.attention)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output `[B, T, D]`, and the weights before dropout `[B, H, T, S]`."""

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

        query, key = self.query_norm(heads(self.query(x))), self.key_norm(heads(self.key(memory)))
        value = heads(self.value(memory))
        if self.stack.positions == "rotary" and positions is not None:
            angle = rotary_angles(self.config, self.stack, positions, self.window)
            query, key = rotate(query, angle), rotate(key, angle)
        key, value = key.repeat_interleave(self.groups, dim=1), value.repeat_interleave(self.groups, dim=1)
        scores = high(high(query) @ high(key).transpose(-2, -1)) * self.scale
        scores = scores if self.stack.score_cap is None else soft_cap(scores, self.stack.score_cap)
        scores = scores if bias is None else scores + high(bias)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)  # a row that may attend to nothing yields zeros
        output = self.dropout(weights).to(value.dtype) @ value
        return self.output(output.transpose(1, 2).flatten(-2)), weights
