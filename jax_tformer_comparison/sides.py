"""What a framework is to the comparison and to the benchmarks: it takes weights, steps on batches, shows its weights.

A side is here, in this process, or alone, in one of its own that holds nothing else.
"""

import importlib
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np

from jax_tformer.errors import TrainingFailed
from jax_tformer_comparison.machine import forget_peak, peak_memory
from parity.measure import ParityError

Tensors = Mapping[str, np.ndarray]
"""Arrays by name: a batch, or parameters under the names of `torch_ref`."""
Masks = Sequence[Tensors]
"""Dropout masks (bool, True = kept) by site, for each part of a batch."""


class StepFigures(NamedTuple):
    """What one side measured in one step."""

    loss: float
    """Mean cross-entropy of the batch before the update, in nats a token."""
    gradient_norm: float
    """Global norm before clipping."""
    tokens: int
    """Tokens read, without padding."""
    seconds: float
    """From a batch that lies on the device to updated parameters and metrics."""


class Side(Protocol):
    """One framework with one model, optimizer and type of arithmetic."""

    name: str
    """As people call it."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter, by the names of `torch_ref`."""

    def start(self, seed: int, weights: Tensors | None) -> None:
        """Step 0 of a training from `weights`, or from fresh ones where it can draw them; what is compiled stays."""

    def step(self, batch: Tensors, masks: Masks | None) -> StepFigures:
        """One update; `masks` are applied where this side does not draw its own."""

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters as they are now, by the names of `torch_ref`, in this side's type."""

    def device_memory(self) -> int | None:
        """The most bytes of device memory in use so far; None where the device is the processor."""

    def product_rate(self, size: int) -> float:
        """Floating-point operations a second in one product of two large square matrices of this side's type."""


class Here:
    """A side in this process."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        """`kind` is "module:name" of what makes the side from `arguments`."""
        module, name = kind.split(":")
        make = getattr(importlib.import_module(module), name)
        if "jax" in sys.modules:
            # JAX's device belongs to the libraries.
            sys.modules["jax"].local_devices()
        forget_peak()
        self._libraries = peak_memory()
        self._side = make(*arguments)
        forget_peak()

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the side's method `name`; `peak_memory`, `forget_peak` and `libraries_memory` are the process's.

        `libraries_memory` is what the process held before the side was made, in bytes.
        """
        if name == "libraries_memory":
            return self._libraries
        of_process = {"peak_memory": peak_memory, "forget_peak": forget_peak}
        return (of_process.get(name) or getattr(self._side, name))(*arguments)

    def close(self) -> None:
        """Forgets the side."""
        del self._side


class SideFailed(RuntimeError):
    """What went wrong in another process, in one line."""


class Alone:
    """A side in a fresh process, which holds nothing else and sleeps between calls."""

    def __init__(self, kind: str, *arguments: Any, environment: Mapping[str, str]) -> None:
        """As `Here`; `environment` holds the variables that the process begins with.

        Returns at once; the first call waits until the side is there.
        """
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, kind, arguments), daemon=True)
        with _begin_with(environment):
            self._process.start()
        theirs.close()
        self._made = False

    def call(self, name: str, *arguments: Any) -> Any:
        """As `Here`. Raises SideFailed for whatever the side raises."""
        if not self._made:
            self._receive()
            self._made = True
        self._connection.send((name, arguments))
        return self._receive()

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()

    def _receive(self) -> Any:
        try:
            failed, result = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(5)
            raise SideFailed(f"the process ended with status {self._process.exitcode}") from error
        if failed:
            raise SideFailed(result)
        return result


def _serve(connection: Connection, kind: str, arguments: tuple[Any, ...]) -> None:
    try:
        side = Here(kind, *arguments)
        connection.send((False, None))
    except Exception as error:
        connection.send((True, one_line(error)))
        return
    while True:
        try:
            name, given = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, side.call(name, *given)))
        except Exception as error:
            connection.send((True, one_line(error)))


def one_line(error: Exception) -> str:
    """Says an error's kind and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


@contextmanager
def _begin_with(environment: Mapping[str, str]) -> Iterator[None]:
    """A process that begins meanwhile has these variables, and leaves Ctrl-C to this one."""
    before, handler = dict(os.environ), signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGINT, handler)


def seconds_of(call: Callable[[], object]) -> float:
    """Times a call: the median of six, after one that does not count."""
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def require_same_names(ours: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    """Raises ParityError, with both lists, where one side has parameters that the other does not know."""
    if ours.keys() != theirs.keys():
        raise ParityError(
            f"only JAX has the parameters {sorted(ours.keys() - theirs.keys())}, "
            f"only PyTorch has {sorted(theirs.keys() - ours.keys())}"
        )


def require_loss_type(side: str, found: str, dtype: str) -> None:
    """Raises ParityError unless a loss is of the type that a training in `dtype` has: float32 at least."""
    expected = "float64" if dtype == "float64" else "float32"
    if found != expected:
        raise ParityError(f"{side} gives the loss in {found}; expected {expected} in a comparison in {dtype}")


def require_same_step(number: int, ours: StepFigures, theirs: StepFigures) -> None:
    """Raises ParityError where the sides read different tokens or only one's loss or gradient is finite.

    Where neither is finite there is nothing left to compare: raises TrainingFailed.
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
