"""Dropout (paper, section 5.4): every site has a name, from which its masks follow, inside a model and outside."""

import math
import zlib
from functools import reduce
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from jax_tformer.model.parameters import DropoutKey, context_parts

Model = TypeVar("Model", bound=nnx.Module)


class Dropout(nnx.Module):
    """Zeroes elements with probability `rate` and divides the others by 1 - rate; without a key, drops nothing."""

    site: str
    """Its path in the model, which `name_sites` gives it."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, x: Float[Array, "..."], key: DropoutKey) -> Float[Array, "..."]:
        """Drops elements of x; `key` is that of the forward pass or, inside a layer, of the layer."""
        return drop(x, self.rate, self.keep(key, x.shape))

    def keep(self, key: DropoutKey, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
        """Draws the mask of an array of this shape, True = kept; None if nothing is dropped."""
        return None if key is None or self.rate == 0 else keep_mask(site_key(key, self.site), self.rate, shape)


def drop(x: Array, rate: float, keep: Bool[Array, "..."] | None) -> Array:
    """Zeroes elements that `keep` drops and divides the rest by 1 - rate; with None, returns x unchanged."""
    return x if keep is None else jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def name_sites(model: Model) -> Model:
    """Gives every dropout site of the model its name, such as `decoder.blocks.feedforward.dropout`."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Dropout):
            module.site = ".".join(map(str, path))
    return model


def site_key(key: Key[Array, ""], site: str) -> Key[Array, ""]:
    """Returns the key of a site: that of the forward pass, folded with the layer's number, then with the name.

    From outside, `decoder.blocks.3.feedforward.dropout` names a site with its layer.
    """
    parts = site.split(".")
    key = reduce(layer_key, (int(part) for part in parts if part.isdigit()), key)
    return jax.random.fold_in(key, zlib.crc32(".".join(part for part in parts if not part.isdigit()).encode()))


def layer_key(key: Key[Array, ""], layer: int | Array) -> Key[Array, ""]:
    """Returns the key of one layer of a stack."""
    return jax.random.fold_in(key, layer)


def layer_keys(key: DropoutKey, layers: int) -> Key[Array, " L"] | None:
    """Returns the keys of all layers of a stack; None without dropout."""
    return None if key is None else jax.vmap(layer_key, (None, 0))(key, jnp.arange(layers))


def keep_mask(key: Key[Array, ""], rate: float, shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """Draws True (kept) with probability 1 - rate for each element."""
    # Drawn flat, then reshaped: XLA on CPU takes six times as long to compile a generator of four axes. Devices that
    # share the positions of a row can draw their parts, the same numbers, only of an array with its axes.
    drawn = shape if context_parts() > 1 else (math.prod(shape),)
    return jax.random.bernoulli(key, 1 - rate, drawn).reshape(shape)
