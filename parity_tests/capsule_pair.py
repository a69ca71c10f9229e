"""The pair that capsules are recorded of: two layers and a batch norm."""

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from parity import Weight
from parity_tests.small_modules import numbers

WEIGHTS = {
    "kernel": Weight("layers.{layer}.weight", "o i -> i o"),
    "bias": "layers.{layer}.bias",
    "scale": "norm.weight",
    "shift": "norm.bias",
    "mean": "norm.running_mean",
    "variance": "norm.running_var",
}
INPUTS = {"x": numbers(5, 4), "keep": np.array([1, 0, 1, 1, 0])}


class Theirs(nn.Module):
    """Two layers and a batch norm, with keyword inputs of two types."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, keep):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"kept": self.norm(x) * keep[:, None], "sign": x > 0}


def ours(params, x, keep, eps=1e-5):
    for layer in range(2):
        x = jnp.tanh(x @ params["kernel"][layer] + params["bias"][layer][None])
    normal = (x - params["mean"][None]) / jnp.sqrt(params["variance"][None] + eps)
    return {"sign": x > 0, "kept": (normal * params["scale"][None] + params["shift"][None]) * keep[:, None]}


def wrong(params, x, keep):
    return ours(params, x, keep, eps=1e-6)


def module(seed=0):
    torch.manual_seed(seed)
    made = Theirs()
    with torch.no_grad():
        made.norm.running_mean.uniform_()
        made.norm.running_var.uniform_(0.5, 2)
    return made


def parameters():
    rng = np.random.default_rng(1)
    shapes = {"kernel": (2, 4, 4), "bias": (2, 4), "scale": (4,), "shift": (4,), "mean": (4,), "variance": (4,)}
    return {name: rng.uniform(0.1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
