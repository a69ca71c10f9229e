"""The parameters and buffers of a torch module as candidates: each by itself, and those of several layers as one."""

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from parity.match.candidates import Tensor
from parity.match.parameter_names import ParameterName, understand

HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "num_key_value_heads", "heads")
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
            None,
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
    return [*single, *_stacked(single)], arrays


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.is_meta:
        return np.zeros(tuple(tensor.shape), np.float32)
    tensor = tensor.detach().cpu()
    array: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _stacked(single: Iterable[Tensor]) -> list[Tensor]:
    """Tensors of one shape whose names differ in one number, counted from 0, as one tensor of several layers."""
    families: dict[tuple[str, int], dict[int, Tensor]] = {}
    for tensor in single:
        components = tensor.name.split(".")
        count = 0
        for index, component in enumerate(components):
            if component.isdigit():
                template = ".".join([*components[:index], "{layer}", *components[index + 1 :]])
                families.setdefault((template, count), {})[int(component)] = tensor
                count += 1
    found = []
    for (template, place), family in families.items():
        layers = [family[number] for number in sorted(family)]
        first = layers[0]
        numbers = first.meaning.numbers
        if (
            sorted(family) != list(range(len(family)))
            or len({one.shape for one in layers}) > 1
            or place >= len(numbers)
        ):
            continue
        meaning = replace(
            first.meaning,
            path=template,
            numbers=numbers[:place] + numbers[place + 1 :],
            parent=template.rpartition(".")[0],
        )
        found.append(
            replace(
                first, name=template, members=tuple(one.name for one in layers), layers=len(layers), meaning=meaning
            )
        )
    return found


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
