"""A fused projection, split all at once or head by head: the story is in docs/gallery.md.

https://github.com/AI-Hypercomputer/maxtext/pull/2672
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from einops import rearrange
from torch import nn

HEADS, SIZE = 3, 4
WIDTH = HEADS * SIZE


def ours(params, x):
    mixed = x @ params["qkvz"]
    # The bug. Mended: q, k, v, z = rearrange(mixed, "b t (h part c) -> part b t h c", part=4, h=HEADS)
    q, k, v, z = rearrange(mixed, "b t (part h c) -> part b t h c", part=4, h=HEADS)
    state = jnp.cumsum(k[..., :, None] * v[..., None, :], axis=1)
    read = jnp.einsum("bthc,bthcd->bthd", q, state) * jax.nn.silu(z)
    return rearrange(read, "b t h c -> b t (h c)") @ params["out"]


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj_qkvz = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        mixed = self.in_proj_qkvz(x).unflatten(-1, (HEADS, 4 * SIZE))
        q, k, v, z = mixed.split(SIZE, dim=-1)
        state = (k[..., :, None] * v[..., None, :]).cumsum(1)
        read = torch.einsum("bthc,bthcd->bthd", q, state) * nn.functional.silu(z)
        return self.out_proj(read.flatten(-2))


WEIGHTS = {"qkvz": ("in_proj_qkvz.weight", "o i -> i o"), "out": ("out_proj.weight", "o i -> i o")}
INPUTS = [np.random.default_rng(0).standard_normal((2, 6, WIDTH))]
