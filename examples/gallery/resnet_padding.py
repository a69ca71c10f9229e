"""SAME with a stride pads one side only: the story is in docs/gallery.md.

https://github.com/google/flax/issues/963
https://github.com/google/flax/issues/2993
"""

import numpy as np
from flax import linen
from torch import nn


class Port(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Conv(8, (3, 3), padding=1, name="conv1")(x))
        # The bug. Mended: x = linen.Conv(12, (3, 3), strides=2, padding=1, name="conv2")(x)
        x = linen.Conv(12, (3, 3), strides=2, name="conv2")(x)
        return linen.Dense(10, name="head")(linen.relu(x).mean((1, 2)))


def ours(params, images):
    return Port().apply({"params": params}, images.transpose(0, 2, 3, 1))


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.head = nn.Linear(12, 10)

    def forward(self, images):
        x = self.conv1(images).relu()
        x = self.conv2(x).relu()
        return self.head(x.mean((2, 3)))


WEIGHTS = {f"{name}.kernel": (f"{name}.weight", "o i h w -> h w i o") for name in ("conv1", "conv2")}
WEIGHTS |= {"head.kernel": ("head.weight", "o i -> i o")} | {
    f"{name}.bias": f"{name}.bias" for name in ("conv1", "conv2", "head")
}
INPUTS = [np.random.default_rng(0).standard_normal((2, 3, 12, 12))]
