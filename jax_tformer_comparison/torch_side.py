"""The PyTorch reference as a side of the comparison. No jax in here: it also runs in a process without it."""

import time
from typing import Literal

import ml_dtypes  # noqa: F401 (NumPy knows bfloat16 from here on)
import numpy as np
import torch
from torch import Tensor

from jax_tformer.errors import InputError
from jax_tformer.experiment import ExperimentConfig
from jax_tformer_comparison.sides import Masks, StepFigures, Tensors, require_loss_type
from parity_tests.measure import ParityError
from torch_ref import reference
from torch_ref.training import Trainer


def full_precision() -> None:
    """Products in the precision of their type: no TF32 for float32."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


class TorchSide:
    """torch_ref's Trainer, on the processor or on the first CUDA device."""

    def __init__(self, name: str, experiment: ExperimentConfig, device: Literal["cpu", "cuda"], compiled: bool) -> None:
        """`experiment.model` has its vocabulary size, and the type that this side computes in."""
        self.name = name
        self._experiment, self._device = experiment, torch.device(device)
        self._dtype: str = experiment.model.compute.parameter_dtype
        self._model = reference(experiment.model).to(self._device)
        self._compiled = compiled
        if compiled:
            self._model.compile()
        self._trainer: Trainer

    def start(self, seed: int, weights: Tensors | None) -> None:
        """Step 0 from `weights`; PyTorch draws none, so they must be given."""
        if weights is None:
            raise ValueError("the PyTorch side starts from given weights only")
        own = self._model.state_dict()
        if weights.keys() != own.keys():
            raise ParityError(
                f"only JAX has the parameters {sorted(weights.keys() - own.keys())}, "
                f"only PyTorch has {sorted(own.keys() - weights.keys())}"
            )
        for name, array in weights.items():
            if tuple(own[name].shape) != array.shape:
                raise ParityError(f"{name}: shapes differ: JAX {list(array.shape)}, PyTorch {list(own[name].shape)}")
            if own[name].dtype != getattr(torch, self._dtype):
                raise ParityError(f"{name}: PyTorch holds {own[name].dtype}, expected {self._dtype}")
        with torch.no_grad():
            for name, array in weights.items():
                own[name].copy_(torch.from_numpy(_known(array)))
        torch.manual_seed(seed)
        self._trainer = Trainer(self._model, self._experiment.optimizer, self._experiment.training)

    def step(self, batch: Tensors, masks: Masks | None) -> StepFigures:
        """One update with these dropout masks, where there are any."""
        tensors = self._placed(batch)
        kept = None if masks is None else [self._placed(part) for part in masks]
        self._wait()
        started = time.perf_counter()
        try:
            metrics = self._trainer.step(tensors, kept)
        except ValueError as error:
            raise ParityError(f"PyTorch cannot take the step that JAX took: {error}") from error
        except RuntimeError as error:
            if not self._compiled or self._trainer.updates:
                raise
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"torch.compile does not work here ({reason}); leave --torch-compile out") from error
        self._wait()
        seconds = time.perf_counter() - started
        require_loss_type(self.name, str(metrics.loss.dtype).removeprefix("torch."), self._dtype)
        return StepFigures(float(metrics.loss), float(metrics.gradient_norm), int(metrics.tokens), seconds)

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters as they are now."""
        arrays = {}
        for name, tensor in self._model.state_dict().items():
            known = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            arrays[name] = known.cpu().numpy().astype(np.dtype(str(tensor.dtype).removeprefix("torch.")))
        return arrays

    def device_memory(self) -> int | None:
        """The most bytes that PyTorch has had allocated on its device."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def _placed(self, arrays: Tensors) -> dict[str, Tensor]:
        # torch's embedding and cross-entropy want 64-bit ids.
        wide = {name: array.astype(np.int64) if array.dtype == np.int32 else array for name, array in arrays.items()}
        return {name: torch.from_numpy(np.array(array)).to(self._device) for name, array in wide.items()}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _known(array: np.ndarray) -> np.ndarray:
    # float32 holds every bfloat16 exactly, and torch takes no bfloat16 from NumPy.
    return np.array(array if array.dtype in (np.float32, np.float64) else array.astype(np.float32))
