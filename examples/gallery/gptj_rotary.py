"""Rotary positions that turn other pairs

`rotate_every_two` of FlaxGPTJ did not do what PyTorch's did: hidden states were off by about 1e-2, no test saw it, and ydshieh
found it while making the tests of the two frameworks stricter. Here the port turns the first half of a head against
the second, as Llama does; GPT-J turns neighbours.

https://github.com/huggingface/transformers/issues/16288
https://github.com/huggingface/transformers/pull/16298
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from parity import Weight

HEADS, SIZE, LENGTH = 2, 8, 12
ANGLES = np.outer(np.arange(LENGTH), 10000.0 ** (-np.arange(0, SIZE, 2) / SIZE)).repeat(2, axis=-1)[:, None]


def rotate_every_two(x):
    # The bug. Mended: return jnp.stack((-x[..., 1::2], x[..., ::2]), axis=-1).reshape(x.shape)
    return jnp.stack((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), axis=-1).reshape(x.shape)


def ours(params, x):
    q, k = (jnp.einsum("btd,dhc->bthc", x, params[name]) for name in ("query", "key"))
    q, k = (each * jnp.cos(ANGLES) + rotate_every_two(each) * jnp.sin(ANGLES) for each in (q, k))
    return jax.nn.softmax(jnp.einsum("bqhc,bkhc->bhqk", q, k) / SIZE**0.5)


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = (nn.Linear(HEADS * SIZE, HEADS * SIZE, bias=False) for _ in "qk")

    def forward(self, x):
        angles = torch.tensor(ANGLES)
        q, k = (project(x).unflatten(-1, (HEADS, SIZE)) for project in (self.q_proj, self.k_proj))
        q, k = (each * angles.cos() + self.rotate_every_two(each) * angles.sin() for each in (q, k))
        return (torch.einsum("bqhc,bkhc->bhqk", q, k) / SIZE**0.5).softmax(-1)

    def rotate_every_two(self, x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


WEIGHTS = {
    "query": Weight("q_proj.weight", "(h c) d -> d h c", {"h": HEADS}),
    "key": Weight("k_proj.weight", "(h c) d -> d h c", {"h": HEADS}),
}
INPUTS = [np.random.default_rng(0).standard_normal((2, LENGTH, HEADS * SIZE))]
