"""A transposed convolution with its kernel the other way round: the story is in docs/gallery.md.

https://github.com/jax-ml/jax/issues/11252
https://github.com/google/flax/issues/3137
"""

import numpy as np
from flax import linen
from torch import nn


class Port(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Conv(6, (3, 3), padding=1, name="neck")(x))
        # The bug. Mended: x = linen.ConvTranspose(6, (4, 4), (4, 4), "VALID", transpose_kernel=True, name="resize")(x)
        x = linen.ConvTranspose(6, (4, 4), (4, 4), "VALID", name="resize")(x)
        return linen.Conv(1, (1, 1), name="depth")(x)


def ours(params, images):
    return Port().apply({"params": params}, images.transpose(0, 2, 3, 1))[..., 0]


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.neck = nn.Conv2d(3, 6, 3, padding=1)
        self.resize = nn.ConvTranspose2d(6, 6, kernel_size=4, stride=4)
        self.depth = nn.Conv2d(6, 1, 1)

    def forward(self, images):
        return self.depth(self.resize(self.neck(images).relu()))[:, 0]


WEIGHTS = {f"{name}.kernel": (f"{name}.weight", "o i h w -> h w i o") for name in ("neck", "resize", "depth")}
WEIGHTS |= {f"{name}.bias": f"{name}.bias" for name in ("neck", "resize", "depth")}
INPUTS = [np.random.default_rng(0).standard_normal((2, 3, 6, 6))]
