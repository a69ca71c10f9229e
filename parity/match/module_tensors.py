"""The parameters and buffers of a torch module, as candidates."""

import re

import numpy as np
import torch
from torch import nn

from parity.gates.pytrees import Tensors
from parity.gates.torch_side import from_torch, tied_names
from parity.match.candidates import Tensor
from parity.match.parameter_names import understand

HEADS = (
    *("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads"),
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups"),
)
"""What modules and configs call their number of heads."""
CONSTANTS = re.compile(r"position_ids|token_type_ids|inv_freq|masked_bias|num_batches_tracked|causal_mask")
"""Buffers that a module makes for itself."""


def tensors(module: nn.Module) -> tuple[list[Tensor], Tensors]:
    """What our parameters may be, and the numbers of each parameter and floating buffer, by name."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    everything = [*parameters.items(), *buffers.items()]
    held = {name: tensor for name, tensor in everything if not is_constant(name, tensor)}
    kinds = {name: _kind(module, name) for name in held}
    names, tied = understand(kinds), tied_names(module)
    others = understand({other: _kind(module, other) for other in tied})
    found = [
        Tensor(
            name=name,
            shape=tuple(tensor.shape),
            members=(name,),
            layers=(),
            meaning=names[name],
            place=index / max(len(held) - 1, 1),
            aliases=tuple(others[other] for other in tied if tied[other] == name),
            buffer=name in buffers,
            trained=name in parameters and tensor.requires_grad,
            heads=_heads(module, name),
        )
        for index, (name, tensor) in enumerate(held.items())
    ]
    return found, {
        name: np.zeros(tuple(tensor.shape), np.float32) if tensor.is_meta else from_torch(tensor)
        for name, tensor in held.items()
    }


def _kind(module: nn.Module, name: str) -> str:
    return type(module.get_submodule(name.rpartition(".")[0])).__name__


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
