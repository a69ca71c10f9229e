"""Low-rank adapters (LoRA; Hu et al., 2021): what they compute, which of them train, and the model without them."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jax_tformer.config import LoraConfig, TransformerConfig
from jax_tformer.config.errors import require
from jax_tformer.model.parameters import (
    ZEROS,
    Dropout,
    DropoutKey,
    RandomKey,
    Shape,
    Start,
    accumulator,
    flatten,
    parameter,
    unflatten,
)
from jax_tformer.scan import PROJECTION

if TYPE_CHECKING:
    from jax_tformer.functional import Params, Transformer

Net = TypeVar("Net", bound="Transformer[Any]")


class Adapter(nnx.Module):
    """scale * (x A) B, of rank R (section 4.1): what is added to a frozen projection x W.

    B starts at zero, so that training starts from the projection alone, and A as in PEFT: U(-a, a), a = inputs^-0.5.
    A B is never added to W here: the gradient of W, as large as W, would then be computed on the way to theirs.
    """

    def __init__(self, inputs: Shape, outputs: Shape, config: TransformerConfig, lora: LoraConfig) -> None:
        start = Start("uniform", math.prod(inputs) ** -0.5)
        self.a = parameter((*inputs, lora.rank), config, start)
        self.b = parameter((lora.rank, *outputs), config, ZEROS)
        self.scale = lora.scale
        self.rank = lora.rank
        self.dropout = Dropout(lora.dropout)

    def __call__(self, x: Float[Array, "*N I"], dropout_key: DropoutKey) -> Float[Array, "*N O"]:
        """Computes the change of the projection of tokens, in at least float32."""
        x = self.dropout(x, dropout_key)
        narrow = checkpoint_name(x @ self.a[...].reshape(-1, self.rank).astype(x.dtype), PROJECTION)
        wide = narrow @ self.b[...].reshape(self.rank, -1).astype(x.dtype)
        return wide.astype(accumulator(x.dtype)) * self.scale


def is_adapter(path: str) -> bool:
    """Whether the parameter at this path is the A or the B of an adapter."""
    return ".lora." in path


def split_adapters(params: "Params") -> tuple["Params", "Params"]:
    """Returns what trains and what does not: the adapters and the rest, or everything and nothing without adapters."""
    flat = flatten(params)
    adapters = {path: leaf for path, leaf in flat.items() if is_adapter(path)}
    if not adapters:
        return params, {}
    return unflatten(adapters), unflatten({path: leaf for path, leaf in flat.items() if path not in adapters})


def join_adapters(trained: "Params", frozen: "Params") -> "Params":
    """Inverts `split_adapters`."""
    return unflatten(flatten(trained) | flatten(frozen)) if frozen else trained


def trained(params: "Params") -> "Params":
    """Returns the parameters that train: the adapters, or all parameters of a model without them."""
    return split_adapters(params)[0]


def without_adapters(config: TransformerConfig) -> TransformerConfig:
    """Returns the config of the model into which adapters are merged."""
    return replace(config, lora=None)


def merge_lora(net: Net, params: "Params") -> tuple[Net, "Params"]:
    """Returns the model without adapters that computes the same to rounding: W + scale * A B in place of W.

    The product and the sum are computed in at least float32, and rounded to the type of W once. Returns the arguments
    themselves if the model has no adapters.
    """
    if net.config.lora is None:
        return net, params
    plain = type(net)(without_adapters(net.config))
    plain.origin = net.origin
    return plain, jax.jit(merge, static_argnums=0)(net.config.lora, params)


def merge(lora: LoraConfig, params: "Params") -> "Params":
    """Returns parameters with the adapters added to their kernels; see `merge_lora`."""
    flat = flatten(params)
    merged = {path: leaf for path, leaf in flat.items() if not is_adapter(path)}
    for module in (path.removesuffix(".lora.a") for path in flat if path.endswith(".lora.a")):
        kernel = flat[f"{module}.kernel"]
        high = accumulator(kernel.dtype)
        layers = kernel.shape[0]
        a = flat[f"{module}.lora.a"].reshape(layers, -1, lora.rank).astype(high)
        b = flat[f"{module}.lora.b"].reshape(layers, lora.rank, -1).astype(high)
        change = (a @ b).reshape(kernel.shape)
        merged[f"{module}.kernel"] = (kernel.astype(high) + lora.scale * change).astype(kernel.dtype)
    return unflatten(merged)


def add_lora(net: Net, params: "Params", lora: LoraConfig, key: RandomKey) -> tuple[Net, "Params"]:
    """Returns the model with fresh adapters beside `params`, which computes the same until they train.

    Raises InputError if the model has adapters already, or no matrices for these (see `TransformerConfig.lora`).
    """
    require(net.config.lora is None, "the model has adapters already; expected one without, as merge_lora returns")
    adapted = type(net)(replace(net.config, lora=lora))
    adapted.origin = net.origin
    fresh = jax.jit(lambda key: trained(adapted.init(key)))(key)
    return adapted, join_adapters(fresh, params)
