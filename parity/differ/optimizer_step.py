"""One step of an optimizer on both sides, from the same weights and the same gradients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity.differ.answer import Difference
from parity.differ.element_order import error_of
from parity.differ.explanation import counted, explain_stage
from parity.differ.fingerprints import BAR
from parity.differ.jax_values import values_of_jax
from parity.differ.torch_values import values_of_torch
from parity.differ.traced_sides import Sides, is_array
from parity.differ.values import GRADIENT, Kind, Values
from parity.gates.bridge import Tensors, to_torch
from parity.gates.torch_side import tensors_of

Optimizer = tuple[Any, Callable[[Any], torch.optim.Optimizer]]
"""(a transformation of optax, a function from a module's parameters to an optimizer of PyTorch)."""
_STEPPED = "after the step: "


def stepped(sides: Sides, into: Callable[[Tensors], Any], optimizer: Optimizer, name: str) -> Difference:
    """Where the first step of two optimizers parts; both get the gradients of the module.

    A weight whose gradient is zero in exact arithmetic gets zero: an adaptive optimizer would make steps of full length
    of its rounding errors.
    """
    step = _Step(sides, into, optimizer)
    ours, theirs = step.run_ours(), step.run_theirs()
    arrays = [ours.output(_STEPPED + name) for name in sides.names]
    assert sides.back is not None
    mine = sides.back(sides.params(arrays))
    errors, said, kinds = {}, [], set()
    for key in [key for key in step.weights if key in mine]:
        weight = step.weights[key]
        update, expected = mine[key] - weight, theirs.output(_STEPPED + key) - weight
        error = error_of(update, expected)
        # An update is a small difference of large numbers: its last digits are those of the weight.
        digits = 1e-14 * float(np.abs(weight).max(initial=0.0))
        if not error <= BAR + digits / (float(np.abs(expected).max(initial=0.0)) + 1e-300):
            errors[key] = error
            kinds.add(how := _how(update, expected, weight, step.gradients[key]))
            said.append(f"the step of {key}: {error:.1e}" + (f" ({how})" if how else ""))
    if not errors:
        return Difference("none", name=name, **counted(ours, theirs))
    holders = {path for key in errors for path, _ in sides.held_by.get(key, ())}
    forced = [ours.outputs[_STEPPED + path] for path in sides.names if path in holders]
    bad = forced, [theirs.outputs[_STEPPED + key] for key in errors]
    found = explain_stage((ours, theirs), bad, "optimizer", errors, tuple(said), sides.held_by, name, sides.accepted)
    # Each library arranges the formula of a step in its own way: what has no equal may be no difference.
    kind = kinds.pop() if len(kinds) == 1 else ""
    return replace(found, kind=f"{kind} (so in every weight that differs)" if kind else None, sure=False)


def _how(ours: np.ndarray, theirs: np.ndarray, weight: np.ndarray, gradient: np.ndarray) -> str:
    """What proportion there is between two steps, or between their difference and the weight."""
    if (factor := _proportion(ours, theirs)) is not None:
        return f"ours is {factor:.9g} times theirs: another learning rate?"
    if (factor := _proportion(ours - theirs, weight)) is not None:
        return f"ours differs by {factor:.6g} times the weight: another decay"
    if (factor := _proportion(ours - theirs, gradient)) is not None:
        return f"ours differs by {factor:.6g} times the gradient"
    return ""


def _proportion(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    scale = float(np.square(theirs).sum())
    if scale == 0 or ours.size < 3:
        return None
    factor = float((ours * theirs).sum()) / scale
    rest = float(np.abs(ours - factor * theirs).max())
    return factor if factor and rest < 1e-6 * float(np.abs(ours).max()) else None


class _Step:
    """Both optimizers, to be run step by step like the sides of a pair."""

    def __init__(self, sides: Sides, into: Callable[[Tensors], Any], optimizer: Optimizer) -> None:
        self._sides, self._into, (self._transformation, self._make) = sides, into, optimizer
        parameters, buffers = tensors_of(sides.module())
        self._held = {key: array for key, array in (parameters | buffers).items() if array.dtype.kind == "f"}
        self.weights = {key: parameters[key] for key in sides.trained}
        found = {key: np.zeros_like(array) for key, array in self.weights.items()}
        sides.run_theirs(True, taken=lambda key, gradient: found.update({key: gradient.copy()}))
        scale = float(np.sqrt(sum(float(np.square(g).sum()) for g in found.values())))
        self.gradients = {key: g * (float(np.linalg.norm(g)) > 1e-11 * scale) for key, g in found.items()}

    def run_ours(self, keep: frozenset[int] = frozenset()) -> Values:
        """Ours: `optax.apply_updates` of the first update."""
        import optax

        sides = self._sides

        def step(arrays: Any, slopes: Any) -> dict[str, Any]:
            # The tree as it is, so that masks by path find their weights; what is no array is left out of it.
            weights, gradients = (sides.params(leaves, whole=False) for leaves in (arrays, slopes))
            updates, _ = self._transformation.update(gradients, self._transformation.init(weights), weights)
            moved = jax.tree.leaves(optax.apply_updates(weights, updates))
            return {_STEPPED + name: array for name, array in zip(sides.names, moved, strict=True)}

        slopes = {key: self.gradients.get(key, np.zeros_like(array)) for key, array in self._held.items()}
        trees = [jax.tree.leaves(self._into(tensors)) for tensors in (self._held, slopes)]
        given = [[jnp.asarray(leaf) for leaf in leaves if is_array(leaf)] for leaves in trees]
        labels: list[tuple[Kind, str]] = [("parameter", name) for name in sides.names]
        labels += [("input", GRADIENT + name) for name in sides.names]
        values = values_of_jax(step, lambda: given, labels, keep=keep)
        values.again = self.run_ours
        return values

    def run_theirs(self, keep: frozenset[int] = frozenset()) -> Values:
        """Theirs: `step()`, operation by operation."""
        module = self._sides.module()
        inputs = {}
        for key, parameter in module.named_parameters():
            if key in self.weights:
                parameter.grad = inputs[GRADIENT + key] = to_torch(self.gradients[key].copy())
        optimizer = self._make([p for p in module.parameters() if p.requires_grad])
        for group in optimizer.param_groups:
            group["foreach"], group["fused"] = False, None

        def run() -> dict[str, torch.Tensor]:
            optimizer.step()
            return {_STEPPED + key: p for key, p in module.named_parameters() if key in self.weights}

        values = values_of_torch(module, run, inputs, keep=keep)
        values.again = self.run_theirs
        return values
