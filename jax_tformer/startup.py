"""How the programs set up JAX, in one place, before anything is traced."""

import os

import jax

from jax_tformer.allocator import keep_freed_memory
from jax_tformer.config import TransformerConfig
from jax_tformer.errors import InputError
from jax_tformer.paths import bound_cache, cache_folder


def set_up_jax(config: TransformerConfig) -> None:
    """Switches on the persistent compilation cache, and float64 where the config asks for it.

    Raises InputError if there is no device to compute on.
    """
    # First of all: JAX's threads keep the memory that they already have as it is.
    keep_freed_memory()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # JAX's own bound reads the whole folder for every program that is added, and adds none beside older ones.
        bound_cache(cache_folder())
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if "float64" in (config.compute.dtype, config.compute.parameter_dtype):
        jax.config.update("jax_enable_x64", True)
    _require_device()


def _require_device() -> None:
    """Raises InputError if JAX has no device of the kind that JAX_PLATFORMS asks for."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX only asserts that it found one where nothing at all answers to the name.
        reason = " ".join(str(error).split())
        wanted = os.environ.get("JAX_PLATFORMS")
        asked = f"JAX_PLATFORMS is {wanted!r}" if wanted else "JAX was asked for any device"
        raise InputError(
            f"{asked}, and there is no such device here{f' ({reason})' if reason else ''}; "
            "set JAX_PLATFORMS=cpu or unset it, or install JAX for the device: jax[cuda12], jax[tpu]"
        ) from error
