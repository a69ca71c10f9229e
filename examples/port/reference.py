"""What is ported: a PyTorch module, as somebody else wrote it."""

import torch
from torch import nn


class Block(nn.Module):
    """A feed-forward block: `[B, D]` to `[B, D]`."""

    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
