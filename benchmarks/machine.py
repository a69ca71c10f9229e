"""What a reader of the figures must know of the machine."""

import os
import platform
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
