"""What follows the last stack.

B batch, T length, D model width, V vocabulary. Logits are in float32 at least, whatever the type of x.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jax_tformer.config import TransformerConfig
from torch_ref.layers import Dropout, Norm, activation, high, soft_cap


class Head(nn.Module):
    """logits = x W^T (+ b); W may be the token table; with head "transform", x first passes dense, activation, norm."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        assert config.vocab_size is not None
        transform, stack = config.head == "transform", config.output_stack
        self.dense = nn.Linear(config.d_model, config.d_model) if transform else None
        self.norm = Norm(config, stack) if transform else nn.Identity()
        self.weight = None if config.tied_head else nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.head_bias else None
        self.activation = activation(stack.activation)
        self.scale = config.d_model**-0.5 if config.head_scale else None
        self.cap, self.cap_form = config.logit_cap, config.logit_cap_form

    def forward(self, x: Tensor, table: nn.Embedding) -> Tensor:
        if self.dense is not None:
            x = self.norm(self.activation(self.dense(x)))
        if self.scale is not None:
            x = x * self.scale
        weight, bias = table.weight if self.weight is None else self.weight, self.bias
        logits = high(F.linear(high(x), high(weight), None if bias is None else high(bias)))
        return logits if self.cap is None else soft_cap(logits, self.cap, self.cap_form)


class Pooler(nn.Module):
    """activation(dense(x_0)): the first position stands for the whole text."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.dropout = Dropout(config.dropout.pooler)
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.activation = nn.Tanh() if config.pooler == "tanh" else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(self.dropout(x[:, 0])))


class Classifier(nn.Module):
    """logits = x W^T + b, of each token's classes `[B, T, classes]`, or of the pooled text's `[B, classes]`."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        assert config.classes is not None
        self.dropout = Dropout(config.dropout.classifier)
        self.weight = nn.Parameter(torch.empty(config.classes, config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.classes))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(high(self.dropout(x)), high(self.weight), high(self.bias))
