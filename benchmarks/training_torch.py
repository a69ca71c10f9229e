"""What sides that train in PyTorch have in common, and `torch_ref`, eager and compiled. Nothing here imports JAX."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import forget_peak
from benchmarks.sides import draw_weights
from benchmarks.training_sides import OPTIMIZER, STEPS, BatchShape, draw_batch
from jax_tformer.config import TransformerConfig
from jax_tformer.experiment import TrainingConfig
from jax_tformer_comparison.machine import peak_memory
from torch_ref import reference
from torch_ref.training import Trainer


class TorchSide:
    """What all have alike: the batch, the clock, and bfloat16 as PyTorch does it, by autocast of float32 weights."""

    def __init__(self, config: TransformerConfig, shape: BatchShape, seed: int, device: str) -> None:
        forget_peak()
        self._libraries = peak_memory()
        self._device = torch.device("cuda" if device == "gpu" else device)
        self._dtype = getattr(torch, config.compute.dtype)
        self._batch = {
            name: torch.from_numpy(ids.astype(np.int64)).to(self._device)
            for name, ids in draw_batch(config, shape, seed).items()
        }
        self._loss = torch.tensor(math.nan)

    def steps(self, count: int) -> list[float]:
        """Each update is waited for. On a GPU the memory for activations is handed back afterwards."""
        seconds = []
        for _ in range(count):
            self._wait()
            began = time.perf_counter()
            self._loss = self._update()
            self._wait()
            seconds.append(time.perf_counter() - began)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return seconds

    def loss(self) -> float:
        """Of the last step."""
        return float(self._loss)

    def libraries_memory(self) -> int:
        """With the libraries that this side imports."""
        return self._libraries

    def forget_peak(self) -> None:
        """Of the process, and of torch's allocator."""
        forget_peak()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def device_memory(self) -> int | None:
        """As torch's allocator counts it."""
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else None

    def _update(self) -> Tensor:
        raise NotImplementedError

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype == torch.float32 else torch.autocast(self._device.type, self._dtype)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class Reference(TorchSide):
    """`torch_ref` with its Trainer; compiled, also with AdamW as one kernel."""

    def __init__(
        self, config: TransformerConfig, shape: BatchShape, seed: int, device: str, compiled: bool = False
    ) -> None:
        super().__init__(config, shape, seed, device)
        model = reference(config)
        load_drawn(model, seed)
        model.to(self._device)
        if compiled:
            model.compile()
        self._trainer = Trainer(model, OPTIMIZER, TrainingConfig(steps=STEPS))
        if compiled:
            fuse(self._trainer.optimizer)

    def _update(self) -> Tensor:
        with self._arithmetic():
            return self._trainer.step(self._batch).loss


def fuse(optimizer: torch.optim.AdamW) -> None:
    """AdamW as one kernel."""
    for group in optimizer.param_groups:
        group["fused"] = True


def load_drawn(model: nn.Module, seed: int) -> None:
    """Gives `model` the weights that all sides have."""
    weights = draw_weights({name: tuple(x.shape) for name, x in model.state_dict().items()}, seed)
    model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
