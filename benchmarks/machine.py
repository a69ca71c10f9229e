"""What a reader of the figures must know of the machine."""

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine(device: str) -> dict[str, Any]:
    """For JSON; torch and JAX use as many threads as there are cores."""
    return {
        "device": device,
        "processor": _processor_field("model name") or platform.machine(),
        "vendor": _processor_field("vendor_id") or "",
        "cores": cores(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


class OtherWork:
    """How much of the processors others take from now on; PyTorch, whose threads wait for each other, suffers most."""

    def __init__(self) -> None:
        self._before = self._now()

    def share(self) -> float | None:
        """The fraction of all processors' time that others used since: neither this process nor those it has ended.

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
        every, idle = (seconds / os.sysconf("SC_CLK_TCK") for seconds in (sum(ticks), sum(ticks[3:5])))
        uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return every, every - idle, sum(use.ru_utime + use.ru_stime for use in uses)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _processor_field(name: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)
