"""Describes the machine that figures are measured on: its name, its memory, and how busy other work keeps it.

Gates, comparison and benchmarks all use this. It imports no framework by itself, because a process that measures one
must not hold the other.
"""

import ctypes
import gc
import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jax_tformer.config.errors import InputError
from parity.machine import count_cores, describe_processor, versions_of

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers")


@dataclass(frozen=True)
class Machine:
    """What a reader of figures must know about the machine."""

    device: str
    """The device that computed: "cpu", or the kind and the name of an accelerator."""
    processor: str
    """The CPU's model name."""
    vendor: str
    """The vendor by the CPU's own name, "AuthenticAMD" or "GenuineIntel"; empty if unknown."""
    cores: int
    """How many cores this process may use."""
    system: str
    versions: dict[str, str]
    generation: str = ""
    """Tells processors of one name apart, "family 25, model 17"; empty if unknown."""

    def __str__(self) -> str:
        """The line below figures: the CPU, and the accelerator if one computed."""
        cores = f"{self.cores} core{'s' if self.cores != 1 else ''}"
        processor = f"{cores} of {self.processor}" + (f" ({self.vendor})" if self.vendor else "")
        return processor if self.device == "cpu" else f"{self.device}, beside {processor}"


def describe_machine(device: str) -> Machine:
    """Describes this machine, computing on `device`, with the versions of Python and of PACKAGES."""
    fields = describe_processor()
    return Machine(
        device=device,
        processor=fields["model name"],
        vendor=fields.get("vendor_id", ""),
        cores=count_cores(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        versions=versions_of(PACKAGES),
        generation=", ".join(
            f"{word} {fields[name]}" for word, name in (("family", "cpu family"), ("model", "model")) if name in fields
        ),
    )


def common_device() -> Literal["cpu", "gpu"]:
    """Names the kind of device that both frameworks use, which is JAX's default.

    Raises InputError if PyTorch cannot use it, because figures from two kinds of devices are not comparable.
    """
    import jax
    import torch

    backend = jax.default_backend()
    if backend == "cpu":
        return "cpu"
    if backend == "gpu" and torch.cuda.is_available():
        return "gpu"
    raise InputError(
        f"JAX runs on {backend} and this PyTorch ({torch.__version__}) cannot; install a PyTorch that can, or set "
        "JAX_PLATFORMS=cpu to compare on the processor"
    )


DISTURBED = 0.1
"""If other work takes more than this fraction of the CPUs' time, measured times are not reliable."""


def quiet(share: float | None) -> bool:
    """Whether so little other work ran that times may be compared; False if that is unknown."""
    return share is not None and share <= DISTURBED


class Neighbours:
    """Measures how much of the CPUs' time other work takes from now on."""

    def __init__(self) -> None:
        self._before = self._now()

    def share(self) -> float | None:
        """Returns the fraction of all CPUs' time that other processes have used since; ended children are not others.

        Returns None if that is unknown: on systems other than Linux, and within the first second.
        """
        now = self._now()
        if now is None or self._before is None:
            return None
        every, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        return min(max((busy - own) / every, 0.0), 1.0) if every > 1 else None

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        try:
            ticks = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        second = os.sysconf("SC_CLK_TCK")
        every, idle = sum(ticks) / second, sum(ticks[3:5]) / second
        uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return every, every - idle, sum(use.ru_utime + use.ru_stime for use in uses)


def peak_memory() -> int:
    """Returns the peak bytes of memory of this process, libraries and compiler included."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    # On Linux a child starts with its parent's ru_maxrss, even across exec.
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Frees unused memory and resets the peak, on Linux only; JAX's allocator on an accelerator keeps its own peak."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        pass
    if torch := free_torch_memory():
        torch.cuda.reset_peak_memory_stats()


def free_torch_memory() -> Any:
    """Frees the GPU memory that PyTorch has cached. Returns torch if it uses a GPU, otherwise None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    torch.cuda.empty_cache()
    return torch
