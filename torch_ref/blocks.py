"""A layer, and the stack of them (paper, section 3.1): B batch, T length, D model width, H heads, S key length."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from jax_tformer.config import StackConfig, TransformerConfig
from torch_ref.attention import Attention
from torch_ref.embedding import RelativePositions
from torch_ref.layers import Dropout, FeedForward, Norm, high
from torch_ref.masks import visible

Masks = dict[int | None, Tensor | None]
"""Window -> who sees whom in the layers with this window, `[B or 1, 1, T, T]`; None: all see all."""


class Captured(NamedTuple):
    """Per layer: the residual stream after it `[B, T, D]` and its attention weights `[B, H, T, S]`."""

    hidden: list[Tensor]
    self_attention: list[Tensor]
    cross_attention: list[Tensor]


class Block(nn.Module):
    """One layer: post-norm as in the paper, norm(x + f(x)), pre-norm, x + f(norm(x)), or x + norm'(f(norm(x)))."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, cross: bool, window: int | None):
        super().__init__()
        sandwich = stack.norm_placement == "sandwich"
        self.self_attention, self.self_attention_norm = Attention(config, stack, window), Norm(config, stack)
        self.self_attention_output_norm = Norm(config, stack) if sandwich else nn.Identity()
        self.cross_attention = Attention(config, stack) if cross else None
        self.cross_attention_norm = Norm(config, stack) if cross else nn.Identity()
        self.cross_attention_output_norm = Norm(config, stack) if cross and sandwich else nn.Identity()
        self.feedforward, self.feedforward_norm = FeedForward(config, stack), Norm(config, stack)
        self.feedforward_output_norm = Norm(config, stack) if sandwich else nn.Identity()
        self.self_attention_residual_dropout = Dropout(config.dropout.of_attention_output)
        self.cross_attention_residual_dropout = Dropout(config.dropout.of_attention_output) if cross else nn.Identity()
        self.feedforward_residual_dropout = Dropout(config.dropout.residual)
        self.placement, self.parallel = stack.norm_placement, stack.parallel

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual stream after the layer, self-attention weights, cross-attention weights."""
        entering, cross_weights = x, None
        h = self._before(x, self.self_attention_norm)
        h, weights = self.self_attention(h, h, mask, positions, bias)
        h = self.self_attention_residual_dropout(self.self_attention_output_norm(h))
        x = self._add(x, h, self.self_attention_norm)
        if self.cross_attention is not None and memory is not None:
            h = self._before(x, self.cross_attention_norm)
            h, cross_weights = self.cross_attention(h, memory, memory_mask)
            h = self.cross_attention_residual_dropout(self.cross_attention_output_norm(h))
            x = self._add(x, h, self.cross_attention_norm)
        h = self._before(entering if self.parallel else x, self.feedforward_norm)
        h = self.feedforward(h)
        h = self.feedforward_residual_dropout(self.feedforward_output_norm(h))
        x = self._add(x, h, self.feedforward_norm)
        return x, weights, cross_weights

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        return x if self.placement == "post" else norm(x)

    def _add(self, x: Tensor, h: Tensor, norm: nn.Module) -> Tensor:
        return norm(x + h) if self.placement == "post" else x + h


class Stack(nn.Module):
    """num_layers blocks, then the final norm if there is one."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, causal: bool, cross: bool = False):
        super().__init__()
        self.windows = [stack.windows[layer % len(stack.windows)] for layer in range(stack.num_layers)]
        self.blocks = nn.ModuleList(Block(config, stack, cross, window) for window in self.windows)
        relative = stack.positions == "relative"
        self.relative_positions = RelativePositions(stack, causal) if relative else None
        self.final_norm = Norm(config, stack) if stack.final_norm else nn.Identity()
        self.final_dropout = Dropout(config.dropout.final)
        self.causal = causal

    def forward(
        self,
        x: Tensor,
        masks: Masks,
        positions: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, Captured]:
        """Runs all layers; `masks` are those of self-attention."""
        captured = Captured([], [], [])
        bias = None if self.relative_positions is None else self.relative_positions(x.shape[1])
        for block, window in zip(self.blocks, self.windows, strict=True):
            at = positions.to(high(x).dtype)
            x, self_weights, cross_weights = block(x, masks[window], at, memory, memory_mask, bias)
            captured.hidden.append(x)
            captured.self_attention.append(self_weights)
            if cross_weights is not None:
                captured.cross_attention.append(cross_weights)
        return self.final_dropout(self.final_norm(x)), captured

    def masks(self, tokens: Tensor, **rules: Any) -> Masks:
        """Who sees whom among `tokens`, for each window of the layers; `rules` are those of `visible`."""
        return {window: visible(tokens, causal=self.causal, window=window, **rules) for window in set(self.windows)}
