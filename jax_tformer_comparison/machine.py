"""The device that both frameworks of a comparison use, its memory, and what other work takes of the processors."""

import os
import resource
import sys
from pathlib import Path
from typing import Literal

from jax_tformer.errors import InputError


def common_device() -> Literal["cpu", "cuda"]:
    """torch's name of the kind of device that both frameworks will use: JAX's default one.

    Raises InputError where PyTorch cannot use it: figures from two kinds of devices are no comparison.
    """
    import jax
    import torch

    backend = jax.default_backend()
    if backend == "cpu":
        return "cpu"
    if backend == "gpu" and torch.cuda.is_available():
        return "cuda"
    raise InputError(
        f"JAX runs on {backend} and this PyTorch ({torch.__version__}) cannot; install a PyTorch that can, or set "
        "JAX_PLATFORMS=cpu to compare on the processor"
    )


def full_precision() -> None:
    """Products in the precision of their type, in both frameworks: no TF32 and no bfloat16 passes for float32."""
    from jax_tformer_comparison import jax_side, torch_side

    jax_side.full_precision()
    torch_side.full_precision()


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
