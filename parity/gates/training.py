"""Two trainings side by side: the first step and the first quantity that part."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from parity.gates.measure import FLOAT64_BAR, Measured, as_array, assert_parity
from parity.gates.pytrees import paths
from parity.gates.torch_side import tensors_of
from parity.gates.weight_map import WeightMap, Weights

_KEPT = {"exp_avg": "mu", "exp_avg_sq": "nu", "square_avg": "nu", "momentum_buffer": "trace"}
"""What an optimizer of PyTorch keeps for a parameter -> the same of optax."""


def check_training(
    ours: Iterable[Mapping[str, Any]],
    theirs: Iterable[Mapping[str, Any]],
    weights: WeightMap,
    *,
    like: Any = None,
    zero_gradients: Sequence[str] = (),
    bar: float = 10 * FLOAT64_BAR,
) -> list[Measured]:
    """Compares two loops step by step, prints a line for each step, and returns the figures.

    Each side yields a dict after every step, from the same weights on. Ours has "loss", and trees of our parameters:
    "gradient", "parameter", "state" (of optax) and "average" (a moving average of the parameters), those that there
    are. Theirs has "loss", "module" (with its gradients), "optimizer" and "average" (a module or an `AveragedModel`).
    What optax calls mu, nu and trace is held against exp_avg, exp_avg_sq (or square_avg) and momentum_buffer. `weights`
    and `like` are as for `check_parity`. `zero_gradients` names parameters of the module whose gradient is zero in
    exact arithmetic: an optimizer may move them anywhere. float64 is switched on for JAX while our loop runs; `bar` is
    for loops that compute in less.

    Raises ParityError for the first step at which they part: it begins with the first quantity of loss, gradients,
    what the optimizer keeps, parameters and their average that differs; what it does not list agrees until then.
    """
    figures = []
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        for step, (here, there) in enumerate(zip(ours, theirs, strict=False), 1):
            parameters, buffers = tensors_of(there["module"])
            mapping = Weights(weights, parameters | buffers, like=like, optional=buffers)
            blank = {path: np.zeros(shape) for path, shape in mapping.shapes.items()}
            trees: dict[str, dict[str, Any]] = {}
            for quantity, tree in (*here.items(), *_fields(here.get("state"))):
                trees[quantity] = trees.get(quantity, blank) | paths(tree)
            mine, their = {"loss": here["loss"]}, {"loss": there["loss"]}
            for quantity, tensors in _quantities(there).items():
                held = {key: as_array(x) for key, x in tensors.items() if x is not None and key not in zero_gradients}
                if quantity in trees and held:
                    found = mapping.back(trees[quantity])
                    for key, array in mapping.held(held).items():
                        if key in found:
                            mine[f"{quantity} {key}"], their[f"{quantity} {key}"] = found[key], array
            figures.append(assert_parity(f"training, step {step}", mine, their, bar=bar))
    return figures


def _fields(state: Any) -> Iterator[tuple[str, Any]]:
    """What the state of optax has by name, however deep."""
    for field in getattr(state, "_fields", ()):
        yield field, getattr(state, field)
    children = state.values() if isinstance(state, Mapping) else state if isinstance(state, tuple) else ()
    for child in children:
        yield from _fields(child)


def _quantities(theirs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Quantity -> tensors by name, in the order of computation."""
    parameters, average = dict(theirs["module"].named_parameters()), theirs.get("average", theirs["module"])
    found: dict[str, dict[str, Any]] = {"gradient": {}, "mu": {}, "nu": {}, "trace": {}, "parameter": parameters}
    for key, p in parameters.items():
        found["gradient"][key] = p.grad
        for kept, tensor in theirs["optimizer"].state.get(p, {}).items():
            found.setdefault(_KEPT.get(kept, kept), {})[key] = tensor
    return found | {"average": dict(getattr(average, "module", average).named_parameters())}
