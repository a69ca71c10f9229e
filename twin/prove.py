"""`jax-tformer parity`: gates 1, 2 and 9 on the presets, with the JAX and the PyTorch that are installed.

All gates are tests, which only the source tree has: `make parity` runs them there.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_tformer.config.errors import InputError


def main(arguments: Sequence[str]) -> int:
    """Proves the presets that `arguments` name, or all; returns the exit status: 0 all green, 1 something red."""
    try:
        import torch  # training needs no torch, so it may be missing
    except ImportError as error:
        raise InputError("the proof needs PyTorch; in the repository, pip install '.[parity]' adds it") from error
    # What is compared in float64 does not depend on how well it is compiled, and that takes most of the time.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

    import jax

    from twin.cases import CONFIGS

    if set(arguments) & {"-h", "--help"}:
        print(f"usage: jax-tformer parity [PRESET ...]\n\nGates 1, 2 and 9 in float64 on: {', '.join(CONFIGS)}.")
        return 0
    if unknown := [name for name in arguments if name not in CONFIGS]:
        raise InputError(f"there is no preset {unknown[0]!r}; expected some of {', '.join(CONFIGS)}")
    torch.set_num_threads(1)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        red = [name for name in arguments or CONFIGS if not green(name)]
    return 1 if red else 0


def green(name: str) -> bool:
    """Prints the worst figure of each gate on a preset, and whether all are within their bars."""
    from parity.gates.measure import ParityError, numbers_lost
    from twin.cases import CONFIGS, PADDINGS, REGIMES, batch_for, weights_for
    from twin.pair import Pair, identity, where_they_part

    config = CONFIGS[name]
    models = Pair(config, weights_for(config, 0.02))
    found = defaultdict[str, list[Any]](list)
    where = ""
    try:
        for seed, (std, padding) in enumerate((std, padding) for std in REGIMES.values() for padding in PADDINGS):
            weights = weights_for(config, std, seed)
            models.load(weights)
            batch = batch_for(config, padding, seed)
            for figure in (numbers_lost(weights, models.back(models.params)), *identity(models, batch)):
                found[figure.gate].append(figure)
                where = where or ("" if figure.passed else str(where_they_part(models, batch, name)))
    except ParityError as error:
        print(f"{name}: RED: {error}")
        return False
    passed = all(figure.passed for figures in found.values() for figure in figures)
    # NumPy's maximum, which a NaN does not slip through.
    told = (f"gate {gate} {np.max([figure.worst for figure in figures]):.1e}" for gate, figures in found.items())
    print(f"{name}: {'green' if passed else 'RED'}: {', '.join(told)}", flush=True)
    if where:
        print(where, flush=True)
    return passed
