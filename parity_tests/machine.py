"""Where figures were measured: gates, comparisons and benchmarks all describe their machine by this."""

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
    """This machine, computing on `device`, and the versions of Python and of PACKAGES."""
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
    """JAX's default device, for `describe_machine`. It takes the device: not while other processes need it."""
    import jax

    device = jax.local_devices()[0]
    return "cpu" if device.platform == "cpu" else f"{device.platform}: {device.device_kind}"


def cores() -> int:
    """Processors that this process may use."""
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
