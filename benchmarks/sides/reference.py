"""`torch_ref` as a side: its Trainer, eager or compiled; decoding without a cache. Nothing here imports JAX."""

import time
from typing import Any

import numpy as np
import torch

from benchmarks.sides import Decoded, Prompts, Training, draw_weights
from benchmarks.training_cases import OPTIMIZER, START_ID, TRAINING, BatchShape
from jax_tformer.config import TransformerConfig
from torch_ref import reference
from twin.sides import Setting, Tensors
from twin.torch_side import TorchSide, device_memory, torch_device


class Reference(TorchSide):
    """As in the comparison; compiled, also with AdamW as one kernel."""

    def start(self, seed: int, weights: Tensors | None) -> None:
        """Step 0 from `weights`."""
        super().start(seed, weights)
        if self._compiled:
            for optimizer in self._trainer.optimizers:
                fuse(optimizer)


def training(config: TransformerConfig, shape: BatchShape, device: str, compiled: bool = False) -> Training:
    """Makes the side that trains as `torch_ref` does."""
    return Training(Reference("torch_ref", Setting(config, OPTIMIZER, TRAINING, device), compiled), config, shape)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Makes AdamW one kernel."""
    for group in optimizer.param_groups:
        group["fused"] = True


class TorchDecoding:
    """A model of PyTorch on one device, without dropout."""

    def __init__(self, model: Any, config: TransformerConfig, device: str) -> None:
        self._device = torch_device(device)
        self._model, self._translates = model.to(self._device).eval(), config.encoder is not None

    def device_memory(self) -> int | None:
        """As torch's allocator counts it."""
        return device_memory(self._device)


class Decoding(TorchDecoding):
    """The whole forward pass for every token. It also judges where sides disagree."""

    def __init__(self, config: TransformerConfig, device: str) -> None:
        model = reference(config)
        drawn = draw_weights({name: tuple(x.shape) for name, x in model.state_dict().items()})
        model.load_state_dict({name: torch.from_numpy(x) for name, x in drawn.items()})
        super().__init__(model, config, device)

    def decode(self, prompts: Prompts, new_tokens: int, room: int, beams: int) -> Decoded:
        """Greedy search alone."""
        assert beams == 1
        found = np.zeros((len(prompts), 0), np.int32)
        began = time.perf_counter()
        for _ in range(new_tokens):
            best = self._logits(prompts, found).argmax(-1, keepdim=True)
            found = np.concatenate([found, best.cpu().numpy().astype(np.int32)], axis=1)
        return Decoded(time.perf_counter() - began, found)

    def gap(self, prompt: list[int], before: list[int], one: int, other: int) -> float:
        """How far apart the logits of two tokens are, after `prompt` and the new tokens `before`."""
        logits = self._logits([prompt], np.array([before], np.int32))[0]
        return abs(float(logits[one] - logits[other]))

    @torch.inference_mode()
    def _logits(self, prompts: Prompts, found: np.ndarray) -> torch.Tensor:
        """Of the next token, `[B, V]`."""
        given = torch.tensor(prompts, device=self._device)
        new = torch.from_numpy(found.astype(np.int64)).to(self._device)
        if not self._translates:
            return self._model(torch.cat([given, new], dim=1)).logits[:, -1]
        start = torch.full((len(given), 1), START_ID, device=self._device)
        return self._model(given, torch.cat([start, new], dim=1)).logits[:, -1]
