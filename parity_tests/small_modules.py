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
