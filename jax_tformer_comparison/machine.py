"""The machine that figures are measured on: its name, its memory, and what other work takes of its processors.

Gates, comparison and benchmarks all describe their machine by this. It imports neither framework: a process that
measures the one must not hold the other.
"""

import ctypes
import gc
import os
import platform
import resource
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from jax_tformer.errors import InputError

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers")


@dataclass(frozen=True)
class Machine:
    """What a reader of figures must know of the machine."""

    device: str
    """What computed: "cpu", or the kind and the name of an accelerator."""
    processor: str
    """The name of the model."""
    vendor: str
    """As the processor itself says it, "AuthenticAMD" or "GenuineIntel"; empty where it does not."""
    cores: int
    """That this process may use."""
    system: str
    versions: dict[str, str]

    def __str__(self) -> str:
        """What stands below figures: the processor, and the accelerator where one computed."""
        cores = f"{self.cores} core{'s' if self.cores != 1 else ''}"
        processor = f"{cores} of {self.processor}" + (f" ({self.vendor})" if self.vendor else "")
        return processor if self.device == "cpu" else f"{self.device}, beside {processor}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def describe_machine(device: str) -> Machine:
    """Describes this machine, computing on `device`, with the versions of Python and of PACKAGES."""
    fields = _processor_fields()
    return Machine(
        device=device,
        processor=fields.get("model name") or platform.processor() or platform.machine(),
        vendor=fields.get("vendor_id", ""),
        cores=cores(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    )


def jax_device() -> str:
    """Names JAX's default device, for `describe_machine`. It takes the device: not while others need it."""
    import jax

    device = jax.local_devices()[0]
    return "cpu" if device.platform == "cpu" else f"{device.platform}: {device.device_kind}"


def cores() -> int:
    """Counts the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _processor_fields() -> dict[str, str]:
    """What Linux says of the first processor; empty on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def common_device() -> Literal["cpu", "gpu"]:
    """Names the kind of device that both frameworks use: JAX's default one.

    Raises InputError where PyTorch cannot use it: figures from two kinds of devices are no comparison.
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
"""From this share of the processors' time on, other work spoils the measured times."""


def quiet(share: float | None) -> bool:
    """Whether so little other work ran that a ratio of times may be shown; not where that is unknown."""
    return share is not None and share <= DISTURBED


class Neighbours:
    """How much of the processors other work takes from now on: times are worth little where that is much."""

    def __init__(self) -> None:
        self._before = self._now()

    def share(self) -> float | None:
        """The fraction of all processors' time that others have used since: not this process, nor those it has ended.

        None where that cannot be told: on other systems than Linux, and within the first second.
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
    """The most bytes of memory that this process has held at once: everything, libraries and compiler included."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    # Not ru_maxrss: on Linux a child begins with its parent's, even across exec.
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Hands back memory that nothing uses, so that the peak from here on is that of what follows.

    Elsewhere than on Linux, nothing is handed back. JAX's allocator on an accelerator keeps its own peak.
    """
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        pass
    if torch := free_torch_memory():
        torch.cuda.reset_peak_memory_stats()


def free_torch_memory() -> Any:
    """Hands back what PyTorch keeps of a GPU's memory for later. Returns torch where it uses a GPU, else None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    torch.cuda.empty_cache()
    return torch
