"""The embedding of a stack's input (paper, section 3.4): B batch, T length, D model width, V vocabulary."""

import math

import torch
from torch import Tensor, nn

from jax_tformer.config import StackConfig, TransformerConfig
from torch_ref.dropout import Dropout
from torch_ref.layers import Norm, high
from torch_ref.positions import sinusoidal


class InputEmbedding(nn.Module):
    """Token + position + token-type embeddings, then norm and dropout."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, tokens: bool = True):
        super().__init__()
        assert config.vocab_size is not None
        self.tokens = nn.Embedding(config.vocab_size, config.d_model) if tokens else None
        learned = stack.positions == "learned"
        self.positions = nn.Embedding(stack.table_positions, config.d_model) if learned else None
        self.token_types = nn.Embedding(stack.token_types, config.d_model) if stack.token_types else None
        self.norm = Norm(config, stack) if stack.embedding_norm else None
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
        return self.dropout(x if self.norm is None else self.norm(x))
