"""The PyTorch reference as a side. This file does not import jax, so that it also runs in a process without it."""

import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jax_tformer.config.errors import InputError, reason_of
from parity.gates.measure import ParityError, require_same_names
from parity.gates.torch_side import from_torch, to_torch
from torch_ref import reference
from torch_ref.training import Trainer
from twin.sides import Masks, Setting, Shapes, StepFigures, Tensors, seconds_of, step_figures


class TorchSide:
    """torch_ref's Trainer, on the CPU or on the first CUDA device."""

    def __init__(self, name: str, setting: Setting, compiled: bool = False) -> None:
        """`name` is for messages."""
        # No TF32 for float32 products.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        self.name, self._setting, self._config = name, setting, setting.model
        self._device, self._compiled = torch_device(setting.device), compiled
        self._model: Any = self._build().to(self._device)
        if compiled:
            self._model.compile()
        self._trainer: Any

    def _build(self) -> torch.nn.Module:
        return reference(self._config)

    def in_float64(self) -> torch.nn.Module:
        """Returns a new model like this side's, in float64 and uncompiled."""
        return reference(self._config.with_dtype("float64"))

    def shapes(self) -> Shapes:
        """Returns the shape of every parameter."""
        return {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}

    def start(self, seed: int, weights: Tensors | None) -> None:
        """Resets the training to `weights`, which are required because this side draws none."""
        assert weights is not None
        self._load(weights)
        torch.manual_seed(seed)
        self._trainer = Trainer(self._model, self._setting.optimizer, self._setting.training)

    def _load(self, weights: Tensors) -> None:
        own = self._model.state_dict()
        require_same_names("5", weights, own)
        for name, array in weights.items():
            if tuple(own[name].shape) != array.shape:
                raise ParityError(f"{name}: shapes differ: JAX {list(array.shape)}, PyTorch {list(own[name].shape)}")
            own[name].copy_(to_torch(array.copy()))

    def step(self, batch: Tensors, masks: Masks | None) -> StepFigures:
        """Makes one update with these dropout masks, if any; autocasts parameters wider than the arithmetic."""
        tensors = self._placed(batch)
        kept = None if masks is None else [self._placed(part) for part in masks]
        compute = self._config.compute
        same = compute.dtype == compute.parameter_dtype
        self._wait()
        started = time.perf_counter()
        try:
            with nullcontext() if same else torch.autocast(self._device.type, getattr(torch, compute.dtype)):
                metrics = self._trainer.step(tensors, kept)
        except ValueError as error:
            raise ParityError(f"PyTorch cannot take the step that JAX took: {error}") from error
        except RuntimeError as error:
            if not self._compiled or self._trainer.updates:
                raise
            reason = reason_of(error)[:200]
            raise InputError(f"torch.compile does not work here ({reason}); leave --torch-compile out") from error
        self._wait()
        seconds = time.perf_counter() - started
        return step_figures(self.name, metrics, compute.dtype, seconds)

    def parameters(self) -> Tensors:
        """Returns the current parameters."""
        return {name: from_torch(tensor).copy() for name, tensor in self._model.state_dict().items()}

    def device_memory(self) -> int | None:
        """Returns the peak bytes that PyTorch has allocated on its device; None on a CPU."""
        return device_memory(self._device)

    def product_rate(self, size: int) -> float:
        """Measures one product of square matrices, in floating-point operations per second."""
        matrix = torch.ones(size, size, dtype=getattr(torch, self._config.compute.dtype), device=self._device)

        def multiply() -> None:
            matrix @ matrix
            self._wait()

        return 2 * size**3 / seconds_of(multiply)

    def _placed(self, arrays: Tensors) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.array(array)).to(self._device) for name, array in wide(arrays).items()}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def wide(arrays: Tensors) -> dict[str, np.ndarray]:
    """Returns ids in 64 bits, which torch's embedding and cross-entropy need."""
    return {name: array.astype(np.int64) if array.dtype == np.int32 else array for name, array in arrays.items()}


def torch_device(device: str) -> torch.device:
    """Returns the torch device of "cpu" or "gpu"."""
    return torch.device("cuda" if device == "gpu" else device)


def device_memory(device: torch.device) -> int | None:
    """Returns the peak bytes of torch's allocator on a GPU; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
