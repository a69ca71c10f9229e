"""Sets up a program: the C library's allocator, JAX, compiler options, and its memory. Importing this is cheap.

Every setting was measured, or says that it was not; docs/benchmarks.md has the figures.
"""

import contextlib
import ctypes
import glob
import os
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_tformer.config.errors import InputError
from jax_tformer.files import bound_cache, cache_folder
from jax_tformer.terminal import one_line

if TYPE_CHECKING:
    import jax

    from jax_tformer.config import TransformerConfig

Options = dict[str, bool | int | str]

_MALLOC_OPTIONS = {"M_TRIM_THRESHOLD": -1, "M_MMAP_MAX": -4, "M_ARENA_MAX": -8}
"""glibc's numbers of them (malloc.h)."""
_SMALL_STEP = 1 << 27
"""Bytes of temporary buffers."""
_CACHE_WARNING = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '([^']+)': (.*)", re.DOTALL
)

_CPU_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

OPTIONS: dict[str, Options] = {
    # Overlaps the exchange of gradients between devices with computation. On one GPU it changes nothing.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True}
}
"""JAX's name of the platform -> compiler options. On GPUs, XLA uses command buffers by default."""
FLOAT64: dict[str, Options] = {
    # XLA's YNN fusions may read uninitialised memory (docs/known-issues.md), and float64 is for proofs. In float32 they
    # stay on: without them a step takes 4 to 9 % longer. jax 0.12 has the option too.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}
}
"""Additional options for float64."""


def set_malloc(**options: int) -> None:
    """Sets options of glibc's malloc; does nothing with another C library, or if the user's variables tune malloc."""
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not tuned:
        for name, value in options.items():
            mallopt(_MALLOC_OPTIONS[name], value)


def keep_freed_memory(step: "jax.stages.Compiled") -> None:
    """Makes malloc keep what a small training step on a CPU frees for the next step.

    XLA allocates the temporary buffers of a step anew each time, and the first access to each page is a fault, which
    takes a fifth to a third of a small step's processor time. Not for larger steps, whose peak of memory would more
    than double. It needs `set_malloc(M_ARENA_MAX=1)` at the start of the program, before threads have heaps of their
    own.
    """
    import jax

    needs = step.memory_analysis()
    if jax.default_backend() == "cpu" and needs is not None and needs.temp_size_in_bytes < _SMALL_STEP:
        set_malloc(M_MMAP_MAX=0, M_TRIM_THRESHOLD=2**31 - 1)


def compiler_options(dtype: str = "float32", *, once: bool = False) -> Options:
    """Returns the options for JAX's default platform and `dtype`; `once` is for programs that run a single time."""
    import jax

    platform = jax.default_backend()
    exact = FLOAT64.get(platform, {}) if dtype == "float64" else {}
    if not once:
        return OPTIONS.get(platform, {}) | exact
    # Halves the time to compile an initialisation, with the same bits and speed.
    return exact if platform != "cpu" else {"xla_backend_optimization_level": 1, **fusion_emitters(False), **exact}


def fusion_emitters(on: bool) -> Options:
    """Returns the option that turns XLA's fusion emitters for CPUs on or off, if this version has it."""
    import jax

    return {"xla_cpu_use_fusion_emitters": on} if jax.__version_info__ < (0, 11) else {}


def set_up_jax(config: "TransformerConfig") -> None:
    """Caches compiled programs on disk, and enables float64 if the config needs it.

    Raises InputError if there is no device to compute on.
    """
    import jax

    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        folder = str(cache_folder())
        # JAX's own bound reads the whole folder for every new program, and adds none to entries written without it.
        bound_cache(cache_folder())
        jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if not isinstance(warnings.showwarning, _CacheWarnings):
        warnings.showwarning = _CacheWarnings(Path(folder))
        # Python would show only the first, since all come from the same line of JAX.
        warnings.filterwarnings("always", message=_CACHE_WARNING.pattern)
    if "float64" in (config.compute.dtype, config.compute.parameter_dtype):
        jax.config.update("jax_enable_x64", True)
    _give_threads()
    _require_device()


def require_memory(asked: int, what: str, mend: str, device: "jax.Device | None" = None) -> None:
    """Raises InputError if `what` takes more bytes (`asked`) than there are on `device`; None: on this machine.

    Without this check it would fail after minutes, or the system would kill the process without a message.
    """
    if device is None or device.platform == "cpu":
        limit = host_memory()
        where = "here"
    else:
        limit = (device.memory_stats() or {}).get("bytes_limit", asked)
        where = "on each device"
    if asked > limit:
        raise InputError(
            f"{what} take {asked / 2**30:,.1f} GiB, and there are {limit / 2**30:,.1f} GiB {where}; {mend}"
        )


def host_memory() -> int:
    """Returns the bytes of memory of the machine, or of the container if those are fewer."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return machine


class _CacheWarnings:
    """Replaces warnings about unreadable or unwritable programs in the cache by a single line; shows others unchanged.

    JAX would leave a damaged file and warn at every start. This removes it, so that JAX writes it anew.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = warnings.showwarning
        self._told = set[bool]()

    def __call__(self, message: Warning | str, *where: Any, **more: Any) -> None:
        found = _CACHE_WARNING.match(str(message))
        if found is None:
            self._before(message, *where, **more)
            return
        what, program, reason = found.groups()
        told = f"cannot be kept in {one_line(str(self._folder))}: {one_line(reason)}"
        damaged = False
        # Several files may have this name, so all are removed; they are compiled again when they are needed.
        for entry in self._folder.glob(f"{glob.escape(program)}-*-cache"):
            with contextlib.suppress(OSError):
                entry.unlink()
                if what == "reading":
                    told = "in the cache were damaged; they are compiled anew"
                    damaged = True
        if damaged not in self._told and sys.stderr is not None:
            self._told.add(damaged)
            print(f"compiled programs {told}", file=sys.stderr)


def _give_threads() -> None:
    """Gives several CPU devices of one process the threads to wait for each other in (docs/known-issues.md)."""
    import jax

    asked = _CPU_DEVICES.findall(os.environ.get("XLA_FLAGS", ""))
    devices = max(jax.config.values["jax_num_cpu_devices"], *map(int, asked), 1)
    if devices > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(4 * devices, os.cpu_count() or 1)))


def _require_device() -> None:
    """Raises InputError if JAX has no device of the kind that JAX_PLATFORMS asks for."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX raises AssertionError if it knows no platform of this name.
        reason = " ".join(str(error).partition("(set JAX_PLATFORMS=")[0].split())
        # For an unknown backend, JAX's message may name another one than was asked for.
        told = f" ({reason})" if reason and "not in the list of known backends" not in reason else ""
        wanted = os.environ.get("JAX_PLATFORMS")
        asked = f"JAX_PLATFORMS is {wanted!r}" if wanted else "JAX was asked for any device"
        raise InputError(
            f"{asked}, and there is no such device here{told}; "
            "set JAX_PLATFORMS=cpu or unset it, or install JAX for the device: jax[cuda13], jax[cuda12] for an "
            "older driver, or jax[tpu]"
        ) from error
