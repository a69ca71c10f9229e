"""Measuring side by side: sides in processes of their own, asked by turns; medians and spreads."""

import ctypes
import gc
import importlib
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from jax_tformer.run import startup
from jax_tformer_comparison.machine import cores, peak_memory

_TORCH_ALONE = ("benchmarks.hugging_face:HuggingFace", "benchmarks.reference:Reference")


class Spread(NamedTuple):
    """Of several measurements of one thing."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: list[float]) -> "Spread":
        """Of one number at least."""
        return cls(statistics.median(numbers), min(numbers), max(numbers))


class SideFailed(RuntimeError):
    """What went wrong in another process, in one line."""


class Here:
    """A side in this process."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        """`kind` is "module:Class", and `arguments` are the class's."""
        self._side = _make(kind, arguments)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the side's method `name`."""
        return getattr(self._side, name)(*arguments)

    def peak_memory(self) -> int:
        """The most bytes that the process has held."""
        return peak_memory()

    def close(self) -> None:
        """Forgets the side."""
        del self._side


class Alone:
    """A side in a fresh process, which holds nothing else and sleeps between calls."""

    def __init__(self, kind: str, *arguments: Any, environment: Mapping[str, str]) -> None:
        """`kind` is "module:Class", imported and made over there; `environment` is set before.

        Returns at once; the first call waits until the side is there.
        """
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, kind, arguments), daemon=True)
        with _environment(environment):
            self._process.start()
        theirs.close()
        self._made = False

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the side's method `name`. Raises SideFailed for whatever it raises."""
        if not self._made:
            self._receive()
            self._made = True
        self._connection.send((name, arguments))
        return self._receive()

    def peak_memory(self) -> int:
        """The most bytes that the process has held since the side was made, libraries included."""
        return self.call("peak_memory")

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


def by_turns(
    names: list[str], rounds: int, measure: Callable[[str], Any], *, seconds: float = math.inf
) -> dict[str, list[Any]]:
    """What `measure` gives for each name in turn, A B A B, so that a slow minute of the machine strikes all alike.

    After `seconds` no round begins but the first two: a busy machine must not take hours.
    """
    found: dict[str, list[Any]] = {name: [] for name in names}
    began = time.perf_counter()
    for turn in range(rounds):
        if turn >= 2 and time.perf_counter() - began > seconds:
            break
        for name in names:
            found[name].append(measure(name))
    return found


def side_environment(kind: str, device: str) -> dict[str, str]:
    """Before a side's process imports anything: full float32, no caches of compiled programs, all cores.

    On the processor all sides alike have the allocator that train.py has, which makes PyTorch faster too.
    """
    general = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": str(cores()),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    if device == "cpu":
        return general | startup.allocator_settings() | {"JAX_PLATFORMS": "cpu"}
    # Products of float32 numbers in float32, as PyTorch computes them; and no more memory than is needed.
    precise = {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return general | precise | {"JAX_PLATFORMS": "cpu" if kind in _TORCH_ALONE else "cuda,cpu"}


def _serve(connection: Connection, kind: str, arguments: tuple[Any, ...]) -> None:
    try:
        side = _make(kind, arguments)
        forget_peak()
        connection.send((False, None))
    except Exception as error:
        connection.send((True, _line(error)))
        return
    while True:
        try:
            name, given = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            connection.send((False, peak_memory() if name == "peak_memory" else getattr(side, name)(*given)))
        except Exception as error:
            connection.send((True, _line(error)))


def _make(kind: str, arguments: tuple[Any, ...]) -> Any:
    module, name = kind.split(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def forget_peak() -> None:
    """Hands back what loading the weights took, so that the peak is that of decoding. Linux only; else it stays in."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return


def _line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
