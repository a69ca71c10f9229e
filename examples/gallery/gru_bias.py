"""A bias that is zero until it is trained: the story is in docs/gallery.md.

https://github.com/google/flax/issues/5594
https://github.com/google/flax/pull/5595
"""

import jax
import jax.numpy as jnp
import numpy as np
from torch import nn

INPUT, WIDTH = 5, 8


def ours(params, x, h):
    def step(h, x):
        xr, xz, xn = jnp.split(x @ params["dense_i"]["kernel"] + params["dense_i"]["bias"], 3, axis=-1)
        # The bug. Mended: from_h = h @ params["dense_h"]["kernel"] + params["dense_h"]["bias"]
        from_h = h @ params["dense_h"]["kernel"]
        hr, hz, hn = jnp.split(from_h, 3, axis=-1)
        update = jax.nn.sigmoid(xz + hz)
        h = (1 - update) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + update * h
        return h, h

    return jax.lax.scan(step, h, x)[1]


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(INPUT, WIDTH)
        # PyTorch has the bias of both other gates twice; one of the two can be zero.
        nn.init.zeros_(self.gru.bias_hh_l0[: 2 * WIDTH])

    def forward(self, x, h):
        return self.gru(x, h[None])[0]


WEIGHTS = {
    "dense_i.kernel": ("gru.weight_ih_l0", "o i -> i o"),
    "dense_i.bias": "gru.bias_ih_l0",
    "dense_h.kernel": ("gru.weight_hh_l0", "o i -> i o"),
    "dense_h.bias": "gru.bias_hh_l0",
}
INPUTS = [np.random.default_rng(0).standard_normal(shape) for shape in ((4, 2, INPUT), (2, WIDTH))]
