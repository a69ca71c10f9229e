"""An epsilon that one norm has and the others have not: the story is in docs/gallery.md.

https://github.com/keras-team/keras-hub/issues/642
https://github.com/keras-team/keras-hub/pull/665
https://github.com/keras-team/keras-hub/issues/728
"""

import numpy as np
from flax import linen
from torch import nn

WIDTH = 16


class Port(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(20, WIDTH, name="tokens")(tokens)
        x = linen.LayerNorm(epsilon=1e-12, name="embeddings_norm")(x)
        hidden = linen.Dense(WIDTH, name="output")(linen.gelu(x, approximate=False))
        # The bug. Mended: return linen.LayerNorm(epsilon=1e-12, name="layer_norm")(x + hidden)
        return linen.LayerNorm(epsilon=1e-5, name="layer_norm")(x + hidden)


def ours(params, tokens):
    return Port().apply({"params": params}, tokens)


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.output = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.embeddings_norm, self.layer_norm = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, tokens):
        x = self.embeddings_norm(self.tokens(tokens))
        hidden = self.output(nn.functional.gelu(x))
        return self.layer_norm(x + hidden)


WEIGHTS = {
    "tokens.embedding": "tokens.weight",
    "output.kernel": ("output.weight", "o i -> i o"),
    "output.bias": "output.bias",
    "embeddings_norm.scale": "embeddings_norm.weight",
    "embeddings_norm.bias": "embeddings_norm.bias",
    "layer_norm.scale": "layer_norm.weight",
    "layer_norm.bias": "layer_norm.bias",
}
INPUTS = [np.random.default_rng(0).integers(0, 20, (2, 7))]
