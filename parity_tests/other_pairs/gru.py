"""`torch.nn.GRU` in two layers, between an embedding and a head, as a `lax.scan` in plain JAX."""

import jax
import jax.numpy as jnp
from torch import nn

from parity_tests.other_pairs.pair import OtherPair, ids, prepared

VOCABULARY, INPUT, WIDTH, TAGS = 31, 12, 20, 7


class Tagger(nn.Module):
    """A tag's logits for every token: `[B, T]` -> `[B, T, V]`."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, INPUT)
        self.gru = nn.GRU(INPUT, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, TAGS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x, _ = self.gru(x)
        return self.head(x)


def tagger(params, tokens):
    """`[B, T, V]`, from `[B, T]`."""
    x = params["embedding"][tokens]
    for layer in params["layers"].values():
        x = gru(layer, x)
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def gru(p, x):
    """`[B, T, D]`, the states of one layer, from `[B, T, I]`."""

    def step(h, x):
        from_x = x @ p["input"]["kernel"] + p["input"]["bias"]
        from_h = h @ p["state"]["kernel"] + p["state"]["bias"]
        (xr, xz, xn), (hr, hz, hn) = jnp.split(from_x, 3, axis=-1), jnp.split(from_h, 3, axis=-1)
        reset = jax.nn.sigmoid(xr + hr)
        update = jax.nn.sigmoid(xz + hz)
        new = jnp.tanh(xn + reset * hn)
        h = (1 - update) * new + update * h
        return h, h

    start = jnp.zeros((x.shape[0], p["state"]["kernel"].shape[0]), x.dtype)
    _, states = jax.lax.scan(step, start, x.swapaxes(0, 1))
    return states.swapaxes(0, 1)


WEIGHTS = {
    "embedding": "embedding.weight",
    "head.kernel": ("head.weight", "o i -> i o"),
    "head.bias": "head.bias",
}
for layer in (0, 1):
    for ours, theirs in {"input": "ih", "state": "hh"}.items():
        WEIGHTS[f"layers.{layer}.{ours}.kernel"] = (f"gru.weight_{theirs}_l{layer}", "o i -> i o")
        WEIGHTS[f"layers.{layer}.{ours}.bias"] = f"gru.bias_{theirs}_l{layer}"


def pair():
    """Three rows of 6 tokens."""
    return OtherPair(tagger, prepared(Tagger()), WEIGHTS, (ids(VOCABULARY, 3, 6),))
