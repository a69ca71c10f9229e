"""One step of an optimizer on both sides, from the same weights and the same gradients."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity.differ.answer import Difference
from parity.differ.explanation import Explainer, opaque
from parity.differ.fingerprints import BAR
from parity.differ.jax_values import values_of_jax
from parity.differ.torch_values import values_of_torch
from parity.differ.traced_sides import Sides, is_array
from parity.differ.values import Kind, Values
from parity.differ.weights import error_of
from parity.gates.pair import Tensors, to_torch
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
    ours, theirs = step.run_ours(False), step.run_theirs(False)
    explainer = Explainer(step, ours, theirs, backward=False)
    explainer.want(list(ours.outputs.values()), list(theirs.outputs.values()))
    after = step.by_name(ours), {key: theirs.arrays[theirs.outputs[_STEPPED + key]] for key in step.weights}
    updates = [{key: side[key] - step.weights[key] for key in step.weights if key in side} for side in after]
    errors = {key: error_of(updates[0][key], updates[1][key]) for key in updates[0]}
    # An update is a small difference of large numbers: its last digits are those of the weight.
    digits = {key: 1e-14 * float(np.abs(step.weights[key]).max(initial=0.0)) for key in errors}
    bad = {
        key: error
        for key, error in errors.items()
        if not error <= BAR + digits[key] / (float(np.abs(updates[1][key]).max(initial=0.0)) + 1e-300)
    }
    if not bad:
        return Difference("none", counts=(len(ours.rows), len(theirs.rows)), name=name, opaque=opaque(ours, theirs))
    forced_ours = [number for path, number in ours.outputs.items() if step.holds(path.removeprefix(_STEPPED), bad)]
    forced_theirs = [theirs.outputs[_STEPPED + key] for key in bad]
    how = {key: _how(step, key, updates) for key in bad}
    said = tuple(
        f"the step of {key}: {error:.1e}" + (f" ({how[key]})" if how[key] else "") for key, error in bad.items()
    )
    found = explainer.explain("optimizer", forced_ours, forced_theirs, said, bad, name)
    alike = set(how.values())
    # Each library arranges the formula of a step in its own way: what has no equal may be no difference.
    kind = alike.pop() if len(alike) == 1 else ""
    return replace(found, kind=f"{kind} (so in every weight that differs)" if kind else None, sure=False)


def _how(step: "_Step", key: str, updates: list[Tensors]) -> str:
    """What proportion there is between two steps, or between their difference and the weight."""
    ours, theirs, weight = updates[0][key], updates[1][key], step.weights[key]
    if (factor := _proportion(ours, theirs)) is not None:
        return f"ours is {factor:.9g} times theirs: another learning rate?"
    if (factor := _proportion(ours - theirs, weight)) is not None:
        return f"ours differs by {factor:.6g} times the weight: another decay"
    if (factor := _proportion(ours - theirs, step.gradients[key])) is not None:
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
        self.held_by = sides.held_by
        module = sides.module()
        parameters, buffers = tensors_of(module)
        self._held = {key: array for key, array in (parameters | buffers).items() if array.dtype.kind == "f"}
        self.weights = {key: parameters[key] for key in sides.trained}
        self.gradients = self._gradients()

    def _gradients(self) -> Tensors:
        found = {key: np.zeros_like(array) for key, array in self.weights.items()}

        def taken(key: str, gradient: np.ndarray) -> None:
            found[key] = gradient.copy()

        self._sides.run_theirs(True, taken=taken)
        scale = float(np.sqrt(sum(float(np.square(g).sum()) for g in found.values())))
        return {key: g * (float(np.linalg.norm(g)) > 1e-11 * scale) for key, g in found.items()}

    def run_ours(self, backward: bool, keep: frozenset[int] = frozenset()) -> Values:
        """Ours: `optax.apply_updates` of the first update."""
        import optax

        params = self._into(self._held)
        slopes = {key: self.gradients.get(key, np.zeros_like(array)) for key, array in self._held.items()}
        gradients = self._into(slopes)
        flat, structure = jax.tree.flatten(params)
        tree: Any = structure
        places = [n for n, leaf in enumerate(flat) if is_array(leaf)]
        given = [jnp.asarray(flat[n]) for n in places]
        grads = [jnp.asarray(jax.tree.leaves(gradients)[n]) for n in places]
        names = self._sides.names

        def in_tree(arrays: Any) -> Any:
            # The tree as it is, so that masks by path find their weights; what is no array is left out of it.
            held: dict[int, Any] = dict(zip(places, arrays, strict=True))
            return tree.unflatten([held.get(n) for n in range(len(flat))])

        def step(arrays: Any, grads: Any) -> dict[str, Any]:
            weights = in_tree(arrays)
            updates, _ = self._transformation.update(in_tree(grads), self._transformation.init(weights), weights)
            moved = jax.tree.leaves(optax.apply_updates(weights, updates))
            return {_STEPPED + name: array for name, array in zip(names, moved, strict=True)}

        labels: list[tuple[Kind, str]] = [("parameter", name) for name in names]
        labels += [("input", Sides.gradient(name)) for name in names]
        self._whole = tree
        self._flat, self._places = flat, places
        return values_of_jax(step, lambda: (given, grads), labels, keep=keep)

    def run_theirs(self, backward: bool, keep: frozenset[int] = frozenset()) -> Values:
        """Theirs: `step()`, operation by operation."""
        module = self._sides.module()
        inputs = {}
        for key, parameter in module.named_parameters():
            if key in self.weights:
                parameter.grad = inputs[Sides.gradient(key)] = to_torch(self.gradients[key].copy())
        optimizer = self._make([p for p in module.parameters() if p.requires_grad])
        for group in optimizer.param_groups:
            group["foreach"], group["fused"] = False, None

        def run() -> dict[str, torch.Tensor]:
            optimizer.step()
            return {_STEPPED + key: p for key, p in module.named_parameters() if key in self.weights}

        return values_of_torch(module, run, inputs, keep=keep)

    def by_name(self, ours: Values) -> Tensors:
        """Our weights after the step, by the module's names."""
        assert self._sides.back is not None
        flat = list(self._flat)
        for place, name in zip(self._places, self._sides.names, strict=True):
            flat[place] = ours.arrays[ours.outputs[_STEPPED + name]]
        return self._sides.back(self._whole.unflatten(flat))

    def holds(self, path: str, names: Mapping[str, float]) -> bool:
        """Whether one of these weights of the module lies in our parameter."""
        return any(path == held for name in names for held, _ in self.held_by.get(name, ()))
