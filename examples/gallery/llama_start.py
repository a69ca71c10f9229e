"""Every new token stands at the beginning: the story is in docs/gallery.md.

https://github.com/keras-team/keras-hub/pull/1544
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


def ours(params, x, keys, values):
    # The bug. Mended: positions = keys.shape[1] + jnp.arange(x.shape[1])
    positions = jnp.arange(x.shape[1])
    q, k = (rotated(x @ params[name], positions) for name in ("query", "key"))
    keys, values = jnp.concatenate((keys, k), 1), jnp.concatenate((values, x @ params["value"]), 1)
    return jax.nn.softmax(q @ keys.swapaxes(1, 2) / SIZE**0.5) @ values


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(SIZE, SIZE, bias=False) for _ in "qkv")

    def rotated(self, x, positions):
        angles = (positions[:, None] * torch.tensor(FREQUENCIES)).repeat(1, 2)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()

    def forward(self, x, keys, values):
        past = keys.shape[1]
        positions = torch.arange(past, past + x.shape[1])
        q, k = (self.rotated(project(x), positions) for project in (self.q_proj, self.k_proj))
        keys, values = torch.cat((keys, k), 1), torch.cat((values, self.v_proj(x)), 1)
        return (q @ keys.transpose(1, 2) / SIZE**0.5).softmax(-1) @ values


WEIGHTS = {name: (f"{name[0]}_proj.weight", "o i -> i o") for name in ("query", "key", "value")}
INPUTS = [np.random.default_rng(0).standard_normal((2, length, SIZE)) for length in (3, 5, 5)]
