"""Saves and loads weights as safetensors, with the names and layouts of `torch_ref` and the config in the header."""

import json
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.files import from_dict, parse_json, to_dict
from jax_tformer.functional import Params, transformer
from jax_tformer.hub.names import from_reference, to_reference

CONFIG_KEY = "jax_tformer.config"


def save_weights(path: Path | str, params: Params, config: TransformerConfig) -> None:
    """Writes a file for `load_weights`, and for PyTorch: `reference(config).load_state_dict(load_file(path))`.

    Raises WeightsError if `params` are not those of `config`.
    """
    weights = to_reference(params)
    from_reference(weights, transformer(config).shapes)
    save_file(weights, path, metadata={CONFIG_KEY: json.dumps(to_dict(config))})


def load_weights(path: Path | str) -> tuple[Params, TransformerConfig]:
    """Loads parameters (NumPy arrays) and config from a file of `save_weights`.

    Raises InputError if the file is missing, damaged or without a config, and WeightsError if they do not fit.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        weights: dict[str, np.ndarray] = load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"cannot read weights from {path}: {' '.join(str(error).split())}") from error
    if CONFIG_KEY not in metadata:
        raise InputError(f"{path} has no {CONFIG_KEY} in its header; expected a file written by save_weights")
    try:
        values = parse_json(metadata[CONFIG_KEY])
    except ValueError as error:
        raise InputError(f"the config in the header of {path} is not JSON ({error})") from error
    config = from_dict(TransformerConfig, values, where=str(path))
    return from_reference(weights, transformer(config).shapes), config
