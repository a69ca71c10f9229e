"""Queries divided by the root of another number: the story is in docs/gallery.md.

https://github.com/keras-team/keras-hub/pull/1701
"""

import jax
import jax.numpy as jnp
import numpy as np
from torch import nn

from parity import Weight

WIDTH, HEADS, SIZE = 18, 2, 8


def ours(params, x):
    q, k, v = (jnp.einsum("btd,dhc->bthc", x, params[name]) for name in ("query", "key", "value"))
    # The bug. Mended: read = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=(WIDTH / HEADS) ** -0.5)
    read = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.einsum("bthc,hcd->btd", read, params["out"])


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, HEADS * SIZE, bias=False) for _ in "qkv")
        self.o_proj = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.query_pre_attn_scalar = WIDTH / HEADS

    def forward(self, x):
        split = (projection(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for projection in self.projections)
        scale = self.query_pre_attn_scalar**-0.5
        read = nn.functional.scaled_dot_product_attention(*split, is_causal=True, scale=scale)
        return self.o_proj(read.transpose(1, 2).flatten(-2))

    @property
    def projections(self):
        return self.q_proj, self.k_proj, self.v_proj


WEIGHTS = {
    name: Weight(f"{name[0]}_proj.weight", "(h c) d -> d h c", {"h": HEADS}) for name in ("query", "key", "value")
}
WEIGHTS["out"] = Weight("o_proj.weight", "d (h c) -> h c d", {"h": HEADS})
INPUTS = [np.random.default_rng(0).standard_normal((2, 6, WIDTH))]
