"""What a pair of others is: a function in JAX, a module in PyTorch, the map between their weights, and inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from parity import WeightMap


@dataclass(frozen=True)
class OtherPair:
    """A PyTorch module in float64, with weights off their 0 and 1, and its port."""

    ours: Callable[..., Any]
    """`ours(params, *inputs)` -> array."""
    theirs: nn.Module
    """`theirs(*inputs)` -> tensor."""
    weights: WeightMap
    inputs: tuple[np.ndarray, ...]
    like: Any = None
    """Our parameters as their library keeps them; None where they are nested dicts."""


def prepared(module):
    """The module in float64, in `eval`, with random weights: matrices of deviation 0.2, vectors off their 0 and 1.

    Running variances stay positive, and buffers that are made by a formula stay as they are.
    """
    generator = torch.Generator().manual_seed(0)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            # Near what a vector starts at, which is 0 or 1 in most libraries.
            start = parameter.round() if parameter.ndim == 1 else torch.zeros_like(parameter)
            parameter.copy_(start + 0.2 * noise)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.3, generator=generator)
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2, generator=generator)
    return module


def ids(vocabulary, *shape):
    """Token ids below `vocabulary`; 0, which often stands for padding, is among them."""
    drawn = np.random.default_rng(1).integers(0, vocabulary, shape)
    drawn[..., 1] = 0
    return drawn
