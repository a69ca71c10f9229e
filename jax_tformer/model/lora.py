"""Parameters with low-rank adapters (LoRA; Hu et al., 2021): which of them train, and the same model without them.

`Adapter` in layers.py computes with them. Everything here is a pure function of parameters, and can be jitted.
"""

import dataclasses

import jax
from flax import traverse_util
from jaxtyping import Array, Key

from jax_tformer.config import LoraConfig, TransformerConfig
from jax_tformer.errors import InputError
from jax_tformer.model.functional import AnyTransformer, Params, transformer
from jax_tformer.model.layers import accumulator

Path = tuple[str, ...]


def is_adapter(path: Path) -> bool:
    """Whether the parameter at this path is the A or the B of an adapter."""
    return path[-2:-1] == ("lora",)


def split(params: Params) -> tuple[Params, Params]:
    """Returns what trains and what does not: the adapters and the rest, or everything and nothing without adapters."""
    flat = traverse_util.flatten_dict(params)
    adapters = {path: leaf for path, leaf in flat.items() if is_adapter(path)}
    if not adapters:
        return params, {}
    rest = {path: leaf for path, leaf in flat.items() if path not in adapters}
    return traverse_util.unflatten_dict(adapters), traverse_util.unflatten_dict(rest)


def joined(trained: Params, frozen: Params) -> Params:
    """Inverts `split`."""
    if not frozen:
        return trained
    flat = traverse_util.flatten_dict(trained) | traverse_util.flatten_dict(frozen)
    params: Params = traverse_util.unflatten_dict(flat)
    return params


def trained(params: Params) -> Params:
    """Returns the parameters that train: the adapters, or all parameters of a model without them."""
    return split(params)[0]


def without_adapters(config: TransformerConfig) -> TransformerConfig:
    """Returns the config of the model into which adapters are merged."""
    return dataclasses.replace(config, lora=None)


def merge_lora(net: AnyTransformer, params: Params) -> tuple[AnyTransformer, Params]:
    """Returns the model without adapters that computes the same to rounding: W + scale * A B in place of W.

    The product and the sum are computed in at least float32, and rounded to the type of W once. Returns the arguments
    themselves if the model has no adapters.
    """
    if net.config.lora is None:
        return net, params
    plain = transformer(without_adapters(net.config))
    plain.origin = net.origin
    return plain, jax.jit(merged, static_argnums=0)(net.config.lora, params)


def merged(lora: LoraConfig, params: Params) -> Params:
    """Returns parameters with the adapters added to their kernels; see `merge_lora`."""
    flat = traverse_util.flatten_dict(params)
    kernels: dict[Path, Array] = {}
    for path, a in flat.items():
        if is_adapter(path) and path[-1] == "a":
            place = (*path[:-2], "kernel")
            kernel, b = flat[place], flat[(*path[:-1], "b")]
            high, layers = accumulator(kernel.dtype), kernel.shape[0]
            change = a.reshape(layers, -1, lora.rank).astype(high) @ b.reshape(layers, lora.rank, -1).astype(high)
            kernels[place] = (kernel.astype(high) + lora.scale * change.reshape(kernel.shape)).astype(kernel.dtype)
    rest = {path: leaf for path, leaf in (flat | kernels).items() if not is_adapter(path)}
    params = traverse_util.unflatten_dict(rest)
    return params


def add_lora(
    net: AnyTransformer, params: Params, lora: LoraConfig, key: Key[Array, ""]
) -> tuple[AnyTransformer, Params]:
    """Returns the model with fresh adapters beside `params`, which computes the same until they train.

    Raises InputError if the model has adapters already, or no matrices for these (see `TransformerConfig.lora`).
    """
    if net.config.lora is not None:
        raise InputError("the model has adapters already; expected one without, as merge_lora returns")
    adapted = transformer(dataclasses.replace(net.config, lora=lora))
    adapted.origin = net.origin
    fresh = jax.jit(lambda key: trained(adapted.init(key)))(key)
    return adapted, joined(fresh, params)
