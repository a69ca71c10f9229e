"""An MLP mixer for images in PyTorch, and in Equinox."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.nn import functional as F

from parity_tests.other_pairs.pair import OtherPair, numbers, prepared

WIDTH, TOKENS, TOKENS_INNER, INNER, BLOCKS, CLASSES = 24, 16, 20, 40, 2, 9


class Feed(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Mixes positions, then channels: `[B, T, D]` -> `[B, T, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.tokens = Feed(TOKENS, TOKENS_INNER)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.channels = Feed(WIDTH, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """`[B, C, H, W]` -> `[B, V]`."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(1))


class FeedPort(eqx.Module):
    """Of one vector."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, inner: int, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(width, inner, key=first)
        self.down = eqx.nn.Linear(inner, width, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(self.up(x), approximate=False)
        return self.down(hidden)


class BlockPort(eqx.Module):
    """Of one image: `[T, D]` -> `[T, D]`."""

    norm1: eqx.nn.LayerNorm
    tokens: FeedPort
    norm2: eqx.nn.LayerNorm
    channels: FeedPort

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(WIDTH, eps=1e-5)
        self.tokens = FeedPort(TOKENS, TOKENS_INNER, first)
        self.norm2 = eqx.nn.LayerNorm(WIDTH, eps=1e-5)
        self.channels = FeedPort(WIDTH, INNER, second)

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = jax.vmap(self.norm1)(x)
        x = x + jax.vmap(self.tokens)(normed.T).T
        normed = jax.vmap(self.norm2)(x)
        return x + jax.vmap(self.channels)(normed)


class MixerPort(eqx.Module):
    """Of one image: `[C, H, W]` -> `[V]`."""

    patches: eqx.nn.Conv2d
    blocks: list[BlockPort]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, last, *rest = jax.random.split(key, BLOCKS + 2)
        self.patches = eqx.nn.Conv2d(3, WIDTH, kernel_size=4, stride=4, key=first)
        self.blocks = [BlockPort(key) for key in rest]
        self.norm = eqx.nn.LayerNorm(WIDTH, eps=1e-5)
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=last)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.patches(image).reshape(WIDTH, TOKENS).T
        for block in self.blocks:
            x = block(x)
        x = jax.vmap(self.norm)(x)
        return self.head(jnp.mean(x, axis=0))


def mixer(model: Any, images: jax.Array) -> jax.Array:
    """`[B, V]`, from `[B, C, H, W]`."""
    return jax.vmap(model)(images)


SAME = ["patches.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"]
SAME += [
    f"blocks.{block}.{part}.{leaf}"
    for block in range(BLOCKS)
    for part in ("norm1", "norm2", "tokens.up", "tokens.down", "channels.up", "channels.down")
    for leaf in ("weight", "bias")
]
WEIGHTS: dict[str, str | tuple[str, str]] = {name: name for name in SAME}
WEIGHTS["patches.bias"] = ("patches.bias", "o -> o 1 1")


def pair() -> OtherPair:
    """Four images of 16 x 16, in patches of 4 x 4."""
    like = eqx.filter_eval_shape(MixerPort, jax.random.key(0))
    # It adds one number to all channels of a position, which every norm takes out again.
    unseen = tuple(f"blocks.{block}.tokens.down.bias" for block in range(BLOCKS))
    inputs = (numbers(4, 3, 16, 16),)
    return OtherPair(mixer, prepared(Mixer()), WEIGHTS, inputs, like=like, zero_gradients=unseen)
