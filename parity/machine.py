"""What figures are measured on, as reports and capsules say it: the processor, and what is installed."""

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those packages that are installed, by name."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def count_cores() -> int:
    """Counts the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jax_device() -> str:
    """Names JAX's default device: "cpu", or the kind and the name of an accelerator, which this occupies."""
    import jax

    device = jax.local_devices()[0]
    return "cpu" if device.platform == "cpu" else f"{device.platform}: {device.device_kind}"


def describe_processor() -> dict[str, str]:
    """Returns what Linux says about the first processor, by its names; elsewhere its "model name" alone."""
    found = {"model name": platform.processor() or platform.machine()}
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
        pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
        found |= {name.strip(): value.strip() for name, value in pairs}
    return found
