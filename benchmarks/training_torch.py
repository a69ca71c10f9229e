"""Sides that train in PyTorch: `torch_ref`, eager and compiled, and Hugging Face's model of the same shape."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.harness import forget_peak
from benchmarks.hugging_face_models import same_model
from benchmarks.sides import draw_weights
from benchmarks.training_sides import OPTIMIZER, STEPS, BatchShape, draw_batch
from comparison.machine import peak_memory
from jax_tformer.config import TransformerConfig
from jax_tformer.experiment import TrainingConfig
from jax_tformer.models.transformer import transformer
from jax_tformer.weights.names import to_reference
from torch_ref import reference
from torch_ref.training import Trainer, adamw


class _TorchSide:
    """What both have alike: the batch, the clock, and bfloat16 as PyTorch does it, by autocast of float32 weights."""

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
        """JAX and transformers included, which this side does not train with."""
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


class Reference(_TorchSide):
    """`torch_ref` with its Trainer; compiled, also with AdamW as one kernel."""

    def __init__(
        self, config: TransformerConfig, shape: BatchShape, seed: int, device: str, compiled: bool = False
    ) -> None:
        super().__init__(config, shape, seed, device)
        model = reference(config)
        weights = to_reference(draw_weights(transformer(config), seed))
        model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
        model.to(self._device)
        if compiled:
            model.compile()
        self._trainer = Trainer(model, OPTIMIZER, TrainingConfig(steps=STEPS))
        if compiled:
            _fuse(self._trainer.optimizer)

    def _update(self) -> Tensor:
        with self._arithmetic():
            return self._trainer.step(self._batch).loss


class HuggingFace(_TorchSide):
    """Hugging Face's model with its own loss and attention kernels, fused AdamW, clipping as the Trainer does it."""

    def __init__(
        self, config: TransformerConfig, shape: BatchShape, seed: int, device: str, compiled: bool = False
    ) -> None:
        super().__init__(config, shape, seed, device)
        self._model = same_model(config, seed).to(self._device).train()
        self._optimizer = adamw(self._model, OPTIMIZER)
        _fuse(self._optimizer)
        if compiled:
            self._model.compile()
        labels = self._batch["labels"]
        if config.encoder is None:
            # These labels are next tokens already: without shift_labels the model would shift them.
            inputs = {"input_ids": self._batch["tokens"], "shift_labels": labels, "use_cache": False}
        elif config.decoder is None:
            inputs = {"input_ids": self._batch["tokens"]}
        else:
            inputs = {
                "input_ids": self._batch["source"],
                "decoder_input_ids": self._batch["target"],
                "use_cache": False,
            }
        self._inputs: dict[str, Any] = {**inputs, "labels": labels}

    def _update(self) -> Tensor:
        self._optimizer.zero_grad()
        with self._arithmetic():
            loss = self._model(**self._inputs).loss
        loss.backward()
        clip_grad_norm_(self._model.parameters(), OPTIMIZER.clip_norm or math.inf)
        self._optimizer.step()
        return loss.detach()


def _fuse(optimizer: torch.optim.AdamW) -> None:
    for group in optimizer.param_groups:
        group["fused"] = True
