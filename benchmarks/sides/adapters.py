"""Hugging Face's GPT-2 with adapters of PEFT as a side that trains, with the same adapters as ours."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from benchmarks.sides import Training, draw_weights
from benchmarks.sides.hugging_face import HuggingFace, gpt2_with
from benchmarks.training_cases import OPTIMIZER, TRAINING, BatchShape
from jax_tformer.config import TransformerConfig
from jax_tformer.model.functional import transformer
from jax_tformer.model.lora import without_adapters
from jax_tformer.pretrained.adapters import save_adapters
from jax_tformer.weights.names import from_reference, reference_shape, slots


class Peft(HuggingFace):
    """A side of the comparison with PEFT's adapters in Hugging Face's model."""

    def _build(self) -> torch.nn.Module:
        net = transformer(self._config)
        weights = draw_weights({name: reference_shape(slot) for name, slot in slots(net.shapes).items()})
        plain = {name: array for name, array in weights.items() if ".lora." not in name}
        model = gpt2_with(without_adapters(self._config), plain)
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "adapters"
            save_adapters(folder, net, from_reference(weights, net.shapes), architecture="GPT2LMHeadModel")
            adapted: Any = PeftModel.from_pretrained(model, folder, is_trainable=True)
        # The model itself, in which PEFT has replaced the adapted modules.
        return adapted.base_model.model


def training(config: TransformerConfig, shape: BatchShape, device: str) -> Training:
    """Makes the side that trains adapters as PEFT does."""
    return Training(Peft("PEFT", config, OPTIMIZER, TRAINING, device, False), config, shape)
