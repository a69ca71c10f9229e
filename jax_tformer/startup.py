"""How the programs set up JAX, in one place, before anything is traced."""

import os
from pathlib import Path

import jax

from jax_tformer.allocator import keep_freed_memory
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
