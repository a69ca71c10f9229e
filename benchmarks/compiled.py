"""A training step for chips that are not here: `python -m benchmarks.compiled h100|v5e EXPERIMENT [--FIELD VALUE ...]`.

Fields are those of train.py: `--mesh.fsdp 8 --model.compute.remat dots --model.vocab-size 50257`. It needs `pip install
'jax[cuda13]'`, or `libtpu` for v5e. No kernels are tried: the program is not quite the one that runs in the end, but
its memory and what it exchanges are known.
"""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jax_tformer.cli.train import train_options
from jax_tformer.config.errors import InputError, reason_of, require
from jax_tformer.config.experiment import ExperimentConfig, PairData
from jax_tformer.functional import transformer
from jax_tformer.model import fast
from jax_tformer.training import prepare
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.sharding import abstract_batch, describe_shards

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 19 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""What XLA asks about a GPU."""
_CHIPS: dict[str, tuple[str, Callable[[int], topologies.TopologyDescription]]] = {
    "h100": ("gpu", lambda n: topologies.get_topology_desc("", "cuda", target_config=_H100, topology=f"1x1x{n}")),
    "v5e": ("tpu", lambda n: topologies.get_topology_desc(f"v5e:2x{max(2, -(-n // 2))}", "tpu")),
}
"""A chip's name -> JAX's name of its platform, and so many of them."""


def main(arguments: Sequence[str]) -> int:
    """Prints the seconds to compile, the memory of each chip, and what the program exchanges."""
    try:
        require(arguments[:1] and arguments[0] in _CHIPS, f"the first word must be a chip: {', '.join(_CHIPS)}")
        experiment = train_options(arguments[1:]).experiment
        require(experiment.model.vocab_size is not None, "expected --model.vocab-size: no tokenizer is loaded")
        platform, chips = _CHIPS[arguments[0]]
        began = time.perf_counter()
        with ExitStack() as instead:
            # What is asked of the devices that run this.
            for owner, name, answer in (
                (jax, "default_backend", platform),
                (fast, "capability", 9.0),
                (fused_attention_stablehlo, "check_cudnn_version", 91900),
                (fused_attention_stablehlo, "check_compute_capability", True),
                (prepare, "require_room", None),
            ):
                instead.enter_context(patch.object(owner, name, lambda *_, answer=answer: answer))
            mesh, prepared = _prepare(experiment, chips)
            compiled = prepared.step.compile()
    except InputError as error:
        print(f"python -m benchmarks.compiled: error: {error}", file=sys.stderr)
        return 2
    needs = compiled.memory_analysis()
    assert needs is not None
    program = compiled.as_text() or ""
    temporary = f"{needs.temp_size_in_bytes / 2**30:.2f} GiB a chip beside the state and the batch"
    kernels = Counter(re.findall(r"__cudnn\$\w+", program)).items()
    print(f"compiled in {time.perf_counter() - began:.1f} s; {temporary}")
    for line in describe_shards(mesh, prepared.abstract, prepared.abstract.params, program):
        print(line)
    print("kernels:", *(f"{count} {name}" for name, count in kernels))
    return 0


def _prepare(
    experiment: ExperimentConfig, chips: Callable[[int], topologies.TopologyDescription]
) -> tuple[Mesh, prepare.Prepared]:
    training, mesh = experiment.training, vars(experiment.mesh)
    shape = {name: mesh[name] or 1 for name in ("data", "fsdp", "context", "tensor")}
    count = math.prod(shape.values())
    try:
        topology = chips(count)
    except RuntimeError as error:
        # Among them NotImplementedError.
        raise InputError(f"this JAX compiles for no such chip ({reason_of(error)}); install one that does") from error
    devices: np.ndarray = np.array(topology.devices[:count]).reshape(*shape.values())
    on = Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    batch = abstract_batch(on, largest_batch(experiment))
    tx, model = optimizer(experiment.optimizer, training.steps), experiment.model
    if model.compute.remat == "auto":
        # A chip that is not here says nothing about its memory.
        model = model.with_compute(remat="dots")
    model = prepare.fit_to_devices(model, batch, on, training.accumulation)
    return on, prepare.prepare(transformer(model), tx, on, training, batch)


def largest_batch(experiment: ExperimentConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the largest batch, of pairs with their padding."""
    data, size = experiment.data, experiment.training.batch_size
    if isinstance(data, PairData):
        rows = data.tokens_per_batch // data.source_length // size * size if data.tokens_per_batch else size
        lengths = dict.fromkeys(("source", "source_mask"), data.source_length)
        lengths |= dict.fromkeys(("target", "target_mask", "labels"), data.target_length)
    else:
        rows, lengths = size, dict.fromkeys(("tokens", "labels"), data.context_length)
    types = {name: jnp.bool_ if name.endswith("mask") else jnp.int32 for name in lengths}
    return {name: jax.ShapeDtypeStruct((rows, length), types[name]) for name, length in lengths.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
