"""Positions 8190 and 8191 are both 8192: the story is in docs/gallery.md.

https://github.com/keras-team/keras-hub/issues/1494
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

SIZE = 8
FREQUENCIES = 10000.0 ** (-np.arange(0, SIZE, 2) / SIZE)


def rotated(x, positions):
    angles = positions[:, None] * FREQUENCIES
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)), -1)


def ours(params, x, positions):
    # The bug. Mended: positions = positions.astype(x.dtype)
    positions = positions.astype(jnp.bfloat16).astype(x.dtype)
    q, k = (rotated(x @ params[name], positions) for name in ("query", "key"))
    return jax.nn.softmax(q @ k.swapaxes(1, 2) / SIZE**0.5)


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = (nn.Linear(SIZE, SIZE, bias=False) for _ in "qk")

    def rotated(self, x, positions):
        angles = (positions[:, None] * torch.tensor(FREQUENCIES)).repeat(1, 2)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()

    def forward(self, x, positions):
        q, k = (self.rotated(project(x), positions) for project in (self.q_proj, self.k_proj))
        return (q @ k.transpose(1, 2) / SIZE**0.5).softmax(-1)


WEIGHTS = {name: (f"{name[0]}_proj.weight", "o i -> i o") for name in ("query", "key")}
INPUTS = [np.random.default_rng(0).standard_normal((2, 6, SIZE)), np.array([8000, 8050, 8100, 8150, 8190, 8191])]
