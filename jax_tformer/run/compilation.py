"""How training is compiled: the compiler's options by platform, in one place, and compilation beside other work.

Every option here is there because it was measured, or says that it was not; docs/benchmarks.md has the figures.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

OPTIONS: dict[str, dict[str, bool | int | str]] = {
    # The products of XNNPACK wait for one another's threads: a step of a small model (0.8 million parameters, 12 x 64
    # tokens) takes 1.6 times as long with them; steps of 10 million parameters and more take the same time.
    "cpu": {"xla_cpu_use_xnnpack": False},
    # Overlaps the exchange of gradients with computation, where there are several devices. Not measured yet.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "tpu": {},
}
"""By JAX's name of the platform. Command buffers are on in XLA as it comes, for GPUs."""

EMITTERS = ("xla_cpu_use_fusion_emitters",) if jax.__version_info__ < (0, 11) else ()
"""An option that later compilers no longer know, and whose name they refuse."""

RUN_ONCE: dict[str, dict[str, bool | int | str]] = {
    # Halves the time to compile an initialisation, which computes the same bits as fast.
    "cpu": {"xla_backend_optimization_level": 1, **dict.fromkeys(EMITTERS, False)},
}
"""For what is computed once, as the initialisation is."""


FLOAT64: dict[str, dict[str, bool | int | str]] = {
    # XLA's YNN fusions were seen to read memory that nobody wrote (docs/known-issues.md), and float64 is for proofs.
    # In float32 they are kept: without them a step takes 4 to 9 % longer. jax 0.12 knows the option too.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
}
"""For what is computed in float64, besides."""


def compiler_options(dtype: str = "float32", *, once: bool = False) -> dict[str, bool | int | str]:
    """For the platform that JAX computes on by default, in this type; `once`: of what is computed a single time."""
    platform = jax.default_backend()
    exact = FLOAT64.get(platform, {}) if dtype == "float64" else {}
    return (RUN_ONCE if once else OPTIONS).get(platform, {}) | exact


def compile_beside(lowered: jax.stages.Lowered) -> "Future[Callable[..., Any]]":
    """Compiles what has been traced and lowered (`jax.jit(...).lower(...)`), in a thread.

    XLA compiles without Python's lock, so that the main thread goes on: `result()` gives the compiled function, or
    raises what compiling it raised.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
    future: Future[Callable[..., Any]] = pool.submit(lowered.compile)
    pool.shutdown(wait=False)
    return future
