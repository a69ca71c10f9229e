"""Two functions called GELU: the story is in docs/gallery.md.

https://github.com/huggingface/transformers/pull/11364
"""

import numpy as np
from flax import linen
from torch import nn

WIDTH = 16


class Port(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = linen.Dense(4 * WIDTH, name="intermediate")(x)
        # The bug. Mended: hidden = linen.gelu(hidden, approximate=False)
        hidden = linen.gelu(hidden)
        return linen.LayerNorm(epsilon=1e-12, name="norm")(linen.Dense(WIDTH, name="output")(hidden) + x)


def ours(params, x):
    return Port().apply({"params": params}, x)


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate, self.output = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x):
        hidden = nn.functional.gelu(self.intermediate(x))
        return self.norm(self.output(hidden) + x)


WEIGHTS = {
    "intermediate.kernel": ("intermediate.weight", "o i -> i o"),
    "intermediate.bias": "intermediate.bias",
    "output.kernel": ("output.weight", "o i -> i o"),
    "output.bias": "output.bias",
    "norm.scale": "norm.weight",
    "norm.bias": "norm.bias",
}
INPUTS = [np.random.default_rng(0).standard_normal((2, 5, WIDTH))]
