"""Folders as the Flax models of `transformers` wrote them, made of PyTorch models, since the Flax models are gone."""

import json
from pathlib import Path
from typing import Any

import flax.serialization
import numpy as np
import torch
from flax import traverse_util
from transformers.pytorch_utils import Conv1D

from parity_tests.huggingface import Oracle, config_json


def flax_tree(oracle: Oracle) -> dict[str, Any]:
    """The model's parameters as they were in Flax: by module, kernels transposed, tied arrays once."""
    modules = dict(oracle.model.named_modules())
    flat = {}
    for name, tensor in oracle._kept().items():
        module, _, leaf = name.rpartition(".")
        array = tensor.detach().numpy()
        if leaf == "weight" and isinstance(modules[module], torch.nn.Linear | Conv1D):
            leaf, array = "kernel", np.ascontiguousarray(array.T)
        elif leaf == "weight" and isinstance(modules[module], torch.nn.Embedding):
            leaf = "embedding"
        elif leaf == "weight" and isinstance(modules[module], torch.nn.LayerNorm):
            leaf = "scale"
        flat[(*module.split("."), leaf) if module else (leaf,)] = array
    tree: dict[str, Any] = traverse_util.unflatten_dict(flat)
    return tree


def save_flax(oracle: Oracle, folder: Path) -> None:
    """Writes config.json and flax_model.msgpack."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(oracle.model)))
    (folder / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(flax_tree(oracle)))
