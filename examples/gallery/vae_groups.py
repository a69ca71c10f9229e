"""A number of groups that was read and not used: the story is in docs/gallery.md.

https://github.com/huggingface/diffusers/issues/621
https://github.com/huggingface/diffusers/pull/789
"""

import numpy as np
from flax import linen
from torch import nn

WIDTH, NORM_NUM_GROUPS = 64, 16


class Port(linen.Module):
    @linen.compact
    def __call__(self, x):
        # The bug. Mended: hidden = linen.GroupNorm(NORM_NUM_GROUPS, epsilon=1e-6, name="norm1")(x)
        hidden = linen.GroupNorm(32, epsilon=1e-6, name="norm1")(x)
        return x + linen.Conv(WIDTH, (3, 3), padding=1, name="conv1")(linen.swish(hidden))


def ours(params, images):
    return Port().apply({"params": params}, images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.GroupNorm(NORM_NUM_GROUPS, WIDTH, eps=1e-6)
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, images):
        return images + self.conv1(nn.functional.silu(self.norm1(images)))


WEIGHTS = {
    "norm1.scale": "norm1.weight",
    "norm1.bias": "norm1.bias",
    "conv1.kernel": ("conv1.weight", "o i h w -> h w i o"),
    "conv1.bias": "conv1.bias",
}
INPUTS = [np.random.default_rng(0).standard_normal((2, WIDTH, 6, 6))]
