"""What the sides have alike, `JaxSide` and `TorchSide`: each takes weights, steps on batches, and returns its weights.

A side runs in this process (Here), or alone in a process of its own (Alone).
"""

import importlib
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import TrainingFailed, reason_of
from jax_tformer.config.experiment import OptimizerConfig, TrainingConfig
from parity.gates.measure import ParityError
from twin.machine import forget_peak, peak_memory

Tensors = Mapping[str, np.ndarray]
"""Arrays by name: a batch, or parameters by the names of `torch_ref`."""
Shapes = dict[str, tuple[int, ...]]
"""Of parameters, by the names of `torch_ref`."""
Masks = Sequence[Tensors]
"""Dropout masks (bool, True = kept) by site, for each part of a batch."""


class Setting(NamedTuple):
    """What a side trains, and where."""

    model: TransformerConfig
    """With a vocab_size, and the types of this side."""
    optimizer: OptimizerConfig
    training: TrainingConfig
    device: str
    """"cpu" or "gpu"."""


class StepFigures(NamedTuple):
    """The figures of one step of one side."""

    loss: float
    """Mean cross-entropy of the batch before the update, in nats per token."""
    gradient_norm: float
    """Global norm before clipping."""
    tokens: int
    """Tokens read, without padding."""
    seconds: float
    """Time from a batch on the device to updated parameters and metrics."""


class Here:
    """A side in this process."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        """Makes the side: `kind` is the "module:name" of a callable for `arguments`."""
        module, name = kind.split(":")
        make = getattr(importlib.import_module(module), name)
        if "jax" in sys.modules:
            # Counts JAX's device as part of the libraries.
            sys.modules["jax"].local_devices()
        forget_peak()
        self._libraries = peak_memory()
        self._side = make(*arguments)
        forget_peak()

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the side's method `name`; or returns the `peak_memory` of the process, or that of its libraries.

        The latter is `libraries_memory`: what the process held before the side was made. Both are in bytes.
        """
        if name == "libraries_memory":
            return self._libraries
        return peak_memory() if name == "peak_memory" else getattr(self._side, name)(*arguments)

    def close(self) -> None:
        """Drops the side."""
        del self._side


HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Makes malloc of glibc 2.35 and later ask for pages of 2 MB, with which a training step has few page faults."""


class SideFailed(RuntimeError):
    """An error from another process, in one line."""


class Alone:
    """A side in a new process, which holds nothing else and sleeps between calls."""

    def __init__(self, kind: str, *arguments: Any, environment: Mapping[str, str]) -> None:
        """Starts making the side, as `Here` does, in a process with the additional variables of `environment`.

        Returns at once; the first call waits until the side is ready.
        """
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        # The new process gets these variables, and ignores Ctrl-C.
        before, handler = dict(os.environ), signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ.update(environment)
        try:
            self._made = self._process.submit(_make, kind, arguments)
        finally:
            os.environ.clear()
            os.environ.update(before)
            signal.signal(signal.SIGINT, handler)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls as `Here` does; raises SideFailed for any error of the side."""
        try:
            self._made.result()
            return self._process.submit(_call, name, arguments).result()
        except Exception as error:
            raise SideFailed(f"{type(error).__name__}: {reason_of(error)}"[:200]) from error

    def close(self) -> None:
        """Ends the process, once it has answered."""
        self._process.shutdown()


_HERE: list[Here] = []
"""The side of this process, if `Alone` has started it."""


def _make(kind: str, arguments: tuple[Any, ...]) -> None:
    _HERE.append(Here(kind, *arguments))


def _call(name: str, arguments: tuple[Any, ...]) -> Any:
    return _HERE[0].call(name, *arguments)


def seconds_of(call: Callable[[], object]) -> float:
    """Times a call in seconds: the median of six, after a warm-up."""
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def step_figures(side: str, metrics: Any, dtype: str, seconds: float) -> StepFigures:
    """What a side says of a step in `dtype`; raises ParityError unless its loss is float64 or, if narrower, float32."""
    found, expected = str(metrics.loss.dtype).removeprefix("torch."), "float64" if dtype == "float64" else "float32"
    if found != expected:
        raise ParityError(f"{side} gives the loss in {found}; expected {expected} in a comparison in {dtype}")
    return StepFigures(float(metrics.loss), float(metrics.gradient_norm), int(metrics.tokens), seconds)


def require_same_step(number: int, ours: StepFigures, theirs: StepFigures) -> None:
    """Raises ParityError if the sides read different numbers of tokens, or if only one's loss or gradient is finite.

    Raises TrainingFailed if neither is finite.
    """
    if ours.tokens != theirs.tokens:
        raise ParityError(f"step {number}: JAX read {ours.tokens} tokens, PyTorch {theirs.tokens}")
    for what, a, b in (
        ("loss", ours.loss, theirs.loss),
        ("gradient norm", ours.gradient_norm, theirs.gradient_norm),
    ):
        if math.isfinite(a) != math.isfinite(b):
            raise ParityError(f"the {what} of step {number} is {a} in JAX and {b} in PyTorch")
        if not math.isfinite(a):
            raise TrainingFailed(
                f"the {what} of step {number} is {a} in JAX and {b} in PyTorch; try a lower --optimizer.learning-rate "
                "or a longer --optimizer.warmup-steps"
            )
