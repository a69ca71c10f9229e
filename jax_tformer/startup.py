"""How the programs set up JAX, in one place, before anything is traced."""

import ctypes
import os
from pathlib import Path

import jax

from jax_tformer.config import TransformerConfig


def cache_folder() -> Path:
    """Where compiled programs are kept between runs: $XDG_CACHE_HOME/jax-tformer, or ~/.cache/jax-tformer."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jax-tformer"


def set_up_jax(config: TransformerConfig) -> None:
    """Switches on the persistent compilation cache, and float64 where the config asks for it."""
    # First of all: JAX's threads keep the memory that they already have as it is.
    keep_freed_memory()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if "float64" in (config.compute.dtype, config.compute.parameter_dtype):
        jax.config.update("jax_enable_x64", True)


def keep_freed_memory() -> None:
    """Tells glibc to keep what a step frees instead of handing it back and taking it again at the next step.

    XLA on CPU takes its temporary buffers anew in every step; the page faults of that cost 15 to 30% of a small
    model's step. Memory on an accelerator is not concerned. Where the C library is another one, nothing happens.
    """
    mmap_max, trim_threshold, arena_max = -4, -1, -8  # the numbers of M_MMAP_MAX ... in malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(arena_max, 1)
