"""The last norm is not like the other norms: the story is in docs/gallery.md.

https://github.com/AI-Hypercomputer/maxtext/pull/2672
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen
from torch import nn

WIDTH, VOCABULARY = 16, 20


class QwenNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        scale = self.param("scale", linen.initializers.zeros, x.shape[-1:])
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * (1 + scale)


class Port(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(VOCABULARY, WIDTH, name="embed")
        x = embed(tokens)
        up = linen.Dense(2 * WIDTH, name="up")(QwenNorm(name="layer_norm")(x))
        x = x + linen.Dense(WIDTH, name="down")(linen.silu(up))
        # The bug. Mended: x = QwenNorm(name="final_norm")(x)
        x = linen.RMSNorm(name="final_norm")(x)
        return embed.attend(x)


def ours(params, tokens):
    return Port().apply({"params": params}, tokens)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) / 10)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.layer_norm, self.norm = nn.Embedding(VOCABULARY, WIDTH), Norm(), Norm()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        x = x + self.down(nn.functional.silu(self.up(self.layer_norm(x))))
        return self.norm(x) @ self.embed_tokens.weight.T


WEIGHTS = {
    "embed.embedding": "embed_tokens.weight",
    "layer_norm.scale": "layer_norm.weight",
    "final_norm.scale": "norm.weight",
    "up.kernel": ("up.weight", "o i -> i o"),
    "up.bias": "up.bias",
    "down.kernel": ("down.weight", "o i -> i o"),
    "down.bias": "down.bias",
}
INPUTS = [np.random.default_rng(0).integers(0, VOCABULARY, (2, 7))]
