"""How the programs set up JAX, in one place, before anything is traced."""

import contextlib
import glob
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax

from jax_tformer.config import TransformerConfig
from jax_tformer.errors import InputError
from jax_tformer.paths import bound_cache, cache_folder
from jax_tformer.run.allocator import keep_freed_memory
from jax_tformer.terminal import one_line

_CACHE_WARNING = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '([^']+)': (.*)", re.DOTALL
)


def set_up_jax(config: TransformerConfig) -> None:
    """Switches on the persistent compilation cache, and float64 where the config asks for it.

    Raises InputError if there is no device to compute on.
    """
    # First of all: JAX's threads keep the memory that they already have as it is.
    keep_freed_memory()
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_folder())
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # JAX's own bound reads the whole folder for every program that is added, and adds none beside older ones.
        bound_cache(cache_folder())
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if not isinstance(warnings.showwarning, _CacheWarnings):
        warnings.showwarning = _CacheWarnings(folder)
        # The same line of JAX warns of each of them: all have to be seen.
        warnings.filterwarnings("always", message=_CACHE_WARNING.pattern)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if "float64" in (config.compute.dtype, config.compute.parameter_dtype):
        jax.config.update("jax_enable_x64", True)
    _require_device()


class _CacheWarnings:
    """Shows warnings as before, but for those of a compiled program in the cache that cannot be read or written.

    JAX warns of each at every start, and leaves it as it is. Here it is removed, so that JAX writes it anew, and a
    single line says so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._before, self._told = folder, warnings.showwarning, set[bool]()

    def __call__(self, message: Warning | str, *where: Any, **more: Any) -> None:
        found = _CACHE_WARNING.match(str(message))
        if found is None:
            self._before(message, *where, **more)
            return
        what, program, reason = found.groups()
        removed = 0
        # The warning does not say which of those with this name it is; the others are compiled when they are needed.
        for entry in self._folder.glob(f"{glob.escape(program)}-*-cache"):
            with contextlib.suppress(OSError):
                entry.unlink()
                removed += 1
        # A folder that cannot be had is told as one that cannot be read.
        damaged = what == "reading" and removed > 0
        if damaged not in self._told and sys.stderr is not None:
            self._told.add(damaged)
            replaced = "compiled programs in the cache were damaged; they are compiled anew"
            lost = f"compiled programs cannot be kept in {one_line(str(self._folder))}: {one_line(reason)}"
            print(replaced if damaged else lost, file=sys.stderr)


def _require_device() -> None:
    """Raises InputError if JAX has no device of the kind that JAX_PLATFORMS asks for."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX only asserts that it found one where nothing at all answers to the name.
        reason = " ".join(str(error).partition("(set JAX_PLATFORMS=")[0].split())
        if "not in the list of known backends" in reason:
            # This says it of another name than was asked for, and nothing more.
            reason = ""
        wanted = os.environ.get("JAX_PLATFORMS")
        asked = f"JAX_PLATFORMS is {wanted!r}" if wanted else "JAX was asked for any device"
        raise InputError(
            f"{asked}, and there is no such device here{f' ({reason})' if reason else ''}; "
            "set JAX_PLATFORMS=cpu or unset it, or install JAX for the device: jax[cuda13], with an older "
            "driver jax[cuda12], jax[tpu]"
        ) from error
