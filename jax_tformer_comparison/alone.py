"""Memory, and speed once more, of each framework alone.

`python -m jax_tformer_comparison.alone SIDE FOLDER` is one such process.

In the process that compares, both share the memory and the caches. So each trains for a few steps in a process of its
own, which imports only its own framework and gets experiment, weights and batches as files. On a processor both get
the allocator that train.py has (jax_tformer/run/startup.py).
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jax_tformer.experiment import ExperimentConfig
from jax_tformer.files import from_dict, read_json, to_dict, write_json
from jax_tformer.run import startup
from jax_tformer_comparison.machine import peak_memory
from jax_tformer_comparison.sides import Side, Tensors

STEPS = 12
"""The first, which also compiles, and those that are timed."""
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Alone:
    """What one framework needed when it was alone; bytes, seconds."""

    peak_memory: int
    """Of the process: interpreter, libraries, compiler, parameters, optimizer, activations."""
    memory_before: int
    """Of the same process when the libraries were imported and nothing was built yet."""
    device_memory: int | None
    """The most on the accelerator; None where there is none."""
    step_seconds: float
    """Median, without the first step."""
    product_rate: float
    """Floating-point operations a second in one large square matrix product of the comparison's type."""


def measure_alone(
    experiment: ExperimentConfig,
    weights: Tensors,
    batches: Iterable[Tensors],
    device: Literal["cpu", "cuda"],
    compiled: bool,
) -> dict[str, Alone | str]:
    """By "jax" and "torch": what it needed on the first of `batches`, or in one line why that could not be measured."""
    with tempfile.TemporaryDirectory(prefix="comparison-") as name:
        folder = Path(name)
        # As float32, because NumPy's files know no bfloat16, which float32 holds exactly.
        known = (np.float32, np.float64)
        files = {name: x if x.dtype in known else x.astype(np.float32) for name, x in weights.items()}
        np.savez(folder / "weights.npz", **files)  # type: ignore[arg-type]
        count = 0
        for count, batch in enumerate(islice(batches, STEPS), 1):
            np.savez(folder / f"batch{count}.npz", **batch)  # type: ignore[arg-type]
        write_json(folder / "experiment.json", to_dict(experiment))
        write_json(folder / "plan.json", {"device": device, "compiled": compiled, "batches": count})
        return {side: _run(side, folder, device) for side in ("jax", "torch")}


def _run(side: str, folder: Path, device: str) -> Alone | str:
    settings = startup.allocator_settings() if device == "cpu" else {}
    process = subprocess.run(
        [sys.executable, "-m", "jax_tformer_comparison.alone", side, str(folder)],
        cwd=_ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [""])[-1]
        return f"the process ended with status {process.returncode}: {last}"
    return Alone(**json.loads(process.stdout.splitlines()[-1]))


def _main(side: str, folder: Path) -> None:
    experiment = from_dict(ExperimentConfig, read_json(folder / "experiment.json"), where="experiment.json")
    plan = read_json(folder / "plan.json")
    make, rate = _jax(experiment) if side == "jax" else _torch(experiment, plan)
    before = peak_memory()
    trained = make()
    weights = dict(np.load(folder / "weights.npz"))
    trained.start(experiment.training.seed, weights)
    seconds = []
    for number in range(1, plan["batches"] + 1):
        seconds.append(trained.step(dict(np.load(folder / f"batch{number}.npz")), None).seconds)
    alone = Alone(
        peak_memory=peak_memory(),
        memory_before=before,
        device_memory=trained.device_memory(),
        step_seconds=statistics.median(seconds[1:] or seconds),
        product_rate=rate(1024 if plan["device"] == "cpu" else 8192),
    )
    print(json.dumps(asdict(alone)))


def _jax(experiment: ExperimentConfig) -> tuple[Callable[[], Side], Callable[[int], float]]:
    import jax
    import jax.numpy as jnp

    from jax_tformer.run.startup import set_up_jax
    from jax_tformer_comparison.jax_side import JaxSide, full_precision

    set_up_jax(experiment.model)
    full_precision()

    def rate(size: int) -> float:
        matrix = jax.device_put(jnp.ones((size, size), experiment.model.compute.dtype))
        multiply = jax.jit(lambda x: x @ x)
        return _rate(size, lambda: jax.block_until_ready(multiply(matrix)))

    return lambda: JaxSide(experiment), rate


def _torch(experiment: ExperimentConfig, plan: dict[str, Any]) -> tuple[Callable[[], Side], Callable[[int], float]]:
    import torch

    from jax_tformer_comparison.torch_side import TorchSide, full_precision

    full_precision()

    def rate(size: int) -> float:
        matrix = torch.ones(size, size, dtype=getattr(torch, experiment.model.compute.dtype), device=plan["device"])

        def multiply() -> None:
            matrix @ matrix
            if plan["device"] == "cuda":
                torch.cuda.synchronize()

        return _rate(size, multiply)

    return lambda: TorchSide("PyTorch", experiment, plan["device"], plan["compiled"]), rate


def _rate(size: int, multiply: Callable[[], object]) -> float:
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds[1:])


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
