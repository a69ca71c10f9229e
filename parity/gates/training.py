"""Two trainings side by side: the first step and the first quantity that part."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from parity.gates.measure import FLOAT64_BAR, Measured, as_array, assert_parity
from parity.gates.pytrees import paths
from parity.gates.torch_side import tensors_of
from parity.gates.weight_map import WeightMap, Weights

_KEPT = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}
"""What optax keeps for a parameter -> the same of PyTorch."""


def check_training(
    ours: Iterable[Mapping[str, Any]],
    theirs: Iterable[Mapping[str, Any]],
    weights: WeightMap,
    *,
    zero_gradients: Sequence[str] = (),
    bar: float = 10 * FLOAT64_BAR,
) -> list[Measured]:
    """Compares two loops step by step, prints a line for each step, and returns the figures.

    Each side yields a dict after every step, from the same weights on. Ours has "loss", and trees of our parameters:
    "gradient", "parameter", "state" (of optax) and "average" (a moving average of the parameters), those that there
    are. Theirs has "loss", "module" (with its gradients), "optimizer" and "average" (a module or an `AveragedModel`).
    What optax calls mu, nu and trace is held against exp_avg, exp_avg_sq and momentum_buffer. `weights`
    is as for `check_parity`. `zero_gradients` names parameters of the module whose gradient is zero in
    exact arithmetic: an optimizer may move them anywhere. float64 is switched on for JAX while our loop runs; `bar` is
    for loops that compute in less.

    Raises ParityError for the first step at which they part: it begins with the first quantity of loss, gradients,
    what the optimizer keeps, parameters and their average that differs; what it does not list agrees until then.
    """
    from optax.tree_utils import tree_get_all_with_path

    figures = []
    with jax.enable_x64(True):
        for step, (here, there) in enumerate(zip(ours, theirs, strict=False), 1):
            parameters, buffers = tensors_of(there["module"])
            mapping = Weights(weights, parameters | buffers, optional=buffers)
            blank = {path: np.zeros(shape) for path, shape in mapping.shapes.items()}
            average = there.get("average", there["module"])
            averages = dict(getattr(average, "module", average).named_parameters())
            mine, their = {"loss": here["loss"]}, {"loss": there["loss"]}
            for quantity in ("gradient", *_KEPT, "parameter", "average"):
                leaves = paths(here.get(quantity))
                for _, tree in tree_get_all_with_path(here.get("state"), quantity):
                    leaves |= paths(tree)
                found = mapping.back(blank | leaves) if leaves else {}
                tensors = {}
                for key, p in there["module"].named_parameters():
                    kept = there["optimizer"].state.get(p, {})
                    row = {"gradient": p.grad, "parameter": p, "average": averages[key]}
                    tensor = row.get(quantity, kept.get(_KEPT.get(quantity)))
                    if key in found and key not in zero_gradients and tensor is not None:
                        tensors[key] = as_array(tensor)
                for key, array in mapping.held(tensors).items():
                    mine[f"{quantity} {key}"], their[f"{quantity} {key}"] = found[key], array
            figures.append(assert_parity(f"training, step {step}", mine, their, bar=bar))
    return figures
