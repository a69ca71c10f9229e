"""An average over what is not there: the story is in docs/gallery.md.

https://github.com/google/flax/issues/2401
https://github.com/google/flax/issues/2448
https://github.com/google/flax/pull/2451
"""

import numpy as np
from flax import linen
from torch import nn

WIDTH = 8


class Port(linen.Module):
    @linen.compact
    def __call__(self, x):
        normed = linen.LayerNorm(epsilon=1e-5, name="norm")(x)
        # The bug. Mended: pooled = linen.avg_pool(normed, (3, 3), padding="SAME", count_include_pad=False)
        pooled = linen.avg_pool(normed, (3, 3), padding="SAME")
        return linen.Dense(10, name="head")((x + pooled - normed).mean((1, 2)))


def ours(params, images):
    return Port().apply({"params": params}, images)


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, 10)
        self.pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)

    def forward(self, images):
        normed = self.norm(images)
        pooled = self.pool(normed.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.head((images + pooled - normed).mean((1, 2)))


WEIGHTS = {
    "norm.scale": "norm.weight",
    "norm.bias": "norm.bias",
    "head.kernel": ("head.weight", "o i -> i o"),
    "head.bias": "head.bias",
}
INPUTS = [np.random.default_rng(0).standard_normal((2, 6, 6, WIDTH))]
