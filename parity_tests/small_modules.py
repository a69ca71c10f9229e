"""Modules of a few lines, to be held against a few lines of JAX."""

import numpy as np
import torch
from torch import nn


class Module(nn.Module):
    """A module of these parts, with random weights that are always the same, whose forward pass is a function of it."""

    def __init__(self, forward, **parts):
        super().__init__()
        torch.manual_seed(0)
        for name, make in parts.items():
            setattr(self, name, make())
        self._run = forward

    def forward(self, *given, **named):
        return self._run(self, *given, **named)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


class Tied(nn.Module):
    """A table of tokens that is the head's matrix, too."""

    def __init__(self, tokens, width):
        super().__init__()
        self.embedding, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def linear_rows(*names, ours="", theirs=""):
    """Of a weight map: linear layers that both sides call by these names, behind what ours and theirs begin with."""
    rows = {}
    for name in names:
        rows[f"{ours}{name}.kernel"] = (f"{theirs}{name}.weight", "o i -> i o")
        rows[f"{ours}{name}.bias"] = f"{theirs}{name}.bias"
    return rows
