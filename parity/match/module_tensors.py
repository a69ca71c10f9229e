"""The parameters and buffers of a torch module as candidates: each by itself, and those of several layers as one."""

import re
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from parity.match.candidates import Tensor, families
from parity.match.parameter_names import ParameterName, understand

HEADS = (
    *("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads"),
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups"),
)
"""What modules and configs call their number of heads."""
CONSTANTS = re.compile(r"position_ids|token_type_ids|inv_freq|masked_bias|num_batches_tracked|causal_mask")
"""Buffers that a module makes for itself."""


def tensors(module: nn.Module) -> tuple[list[Tensor], dict[str, np.ndarray]]:
    """What our parameters may be, and the numbers of each parameter and floating buffer, by name."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    everything = [*parameters.items(), *buffers.items()]
    held = {name: tensor for name, tensor in everything if not is_constant(name, tensor)}
    kinds = {name: type(_owner(module, name)).__name__ for name in held}
    names = understand(kinds)
    aliases = _aliases(module, parameters)
    places = {name: index / max(len(held) - 1, 1) for index, name in enumerate(held)}
    single = [
        Tensor(
            name,
            tuple(tensor.shape),
            (name,),
            (),
            names[name],
            aliases.get(name, ()),
            kinds[name],
            places[name],
            name in buffers,
            name in parameters and tensor.requires_grad,
            _heads(module, name),
        )
        for name, tensor in held.items()
    ]
    arrays = {name: _array(tensor) for name, tensor in held.items()}
    stacked = [
        replace(
            several[0], name=meaning.path, members=tuple(one.name for one in several), layers=counts, meaning=meaning
        )
        for meaning, several, counts in families({one.name: one for one in single})
    ]
    return [*single, *stacked], arrays


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.is_meta:
        return np.zeros(tuple(tensor.shape), np.float32)
    tensor = tensor.detach().cpu()
    array: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _aliases(module: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, tuple[ParameterName, ...]]:
    """What the other names of shared parameters say."""
    first = {id(parameter): name for name, parameter in parameters.items()}
    others: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name != first[id(parameter)]:
            others.setdefault(first[id(parameter)], []).append(name)
    return {
        name: tuple(understand({other: type(_owner(module, other)).__name__ for other in more}).values())
        for name, more in others.items()
    }


def _heads(module: nn.Module, name: str) -> tuple[int, ...]:
    """Numbers of heads that the module of `name` mentions, or one around it, or its config."""
    components = name.split(".")[:-1]
    found: list[int] = []
    for length in range(len(components), -1, -1):
        around = module.get_submodule(".".join(components[:length]))
        for holder in (around, getattr(around, "config", None)):
            found += [count for word in HEADS if isinstance(count := getattr(holder, word, None), int) and count > 1]
    return tuple(dict.fromkeys(found))


def is_constant(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that a module makes for itself: whole numbers, masks, frequencies."""
    return not tensor.is_floating_point() or bool(CONSTANTS.search(name))
