"""A convolutional network with batch norm, in Flax Linen: channels last, running means and variances as variables."""

import jax
import jax.numpy as jnp
from flax import linen
from torch import nn
from torch.nn import functional as F

from parity_tests.other_pairs.pair import OtherPair, prepared
from parity_tests.small_modules import numbers

CLASSES = 10


class Convolutions(nn.Module):
    """`[B, C, H, W]` -> `[B, V]`."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, kernel_size=3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.conv3 = nn.Conv2d(16, 16, kernel_size=3, dilation=2, padding=2)
        self.head = nn.Linear(16 * 4 * 4, CLASSES)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(x, 2)
        x = F.relu(self.norm2(self.conv2(x)))
        x = F.silu(self.conv3(x)) + x
        return self.head(x.flatten(1))


class Port(linen.Module):
    """`[B, H, W, C]` -> `[B, V]`."""

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(8, (3, 3), padding=1, param_dtype=x.dtype, name="conv1")(x)
        x = linen.BatchNorm(use_running_average=True, epsilon=1e-5, param_dtype=x.dtype, name="norm1")(x)
        x = linen.relu(x)
        x = linen.max_pool(x, (2, 2), strides=(2, 2))
        x = linen.Conv(16, (3, 3), strides=2, padding=1, use_bias=False, param_dtype=x.dtype, name="conv2")(x)
        x = linen.BatchNorm(use_running_average=True, epsilon=1e-5, param_dtype=x.dtype, name="norm2")(x)
        x = linen.relu(x)
        wide = linen.Conv(16, (3, 3), kernel_dilation=2, padding=2, param_dtype=x.dtype, name="conv3")(x)
        x = linen.silu(wide) + x
        # PyTorch's linear layer counts channels first.
        x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)
        return linen.Dense(CLASSES, param_dtype=x.dtype, name="head")(x)


def convolutions(variables, images):
    """`[B, V]`, from `[B, C, H, W]`."""
    return Port().apply(variables, images.transpose(0, 2, 3, 1))


KERNEL = "o i h w -> h w i o"
WEIGHTS = {
    "params.conv1.kernel": ("conv1.weight", KERNEL),
    "params.conv1.bias": "conv1.bias",
    "params.norm1.scale": "norm1.weight",
    "params.norm1.bias": "norm1.bias",
    "batch_stats.norm1.mean": "norm1.running_mean",
    "batch_stats.norm1.var": "norm1.running_var",
    "params.conv2.kernel": ("conv2.weight", KERNEL),
    "params.norm2.scale": "norm2.weight",
    "params.norm2.bias": "norm2.bias",
    "batch_stats.norm2.mean": "norm2.running_mean",
    "batch_stats.norm2.var": "norm2.running_var",
    "params.conv3.kernel": ("conv3.weight", KERNEL),
    "params.conv3.bias": "conv3.bias",
    "params.head.kernel": ("head.weight", "o i -> i o"),
    "params.head.bias": "head.bias",
}


def pair():
    """Four images of 16 x 16."""
    images = numbers(4, 3, 16, 16, seed=1)
    like = jax.eval_shape(lambda x: Port().init(jax.random.key(0), x), jnp.zeros((4, 16, 16, 3)))
    return OtherPair(convolutions, prepared(Convolutions()), WEIGHTS, (images,), like=like)
