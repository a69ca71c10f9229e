"""The two sides of a pair, to be run step by step: forward, backward, and one step of an optimizer."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from parity.differ.accepted import Accepted
from parity.differ.jax_values import values_of_jax
from parity.differ.torch_values import SeveralPassesError, evaluating, values_of_torch
from parity.differ.values import GRADIENT, Kind, Site, Values, hand_back
from parity.differ.weights import inverted
from parity.gates.bridge import Tensors, to_torch
from parity.gates.measure import ParityError
from parity.gates.projection import double
from parity.gates.pytrees import paths, replaced
from parity.gates.torch_side import untrained
from parity.islands import Float64

Outputs = Mapping[str, Any]


class Sides:
    """A function of JAX and a module of PyTorch, in float64, with what stands for what in their weights.

    `ours(params, inputs)` and `theirs(module, inputs)` return (loss, outputs by name); `back` turns a tree like
    `params` into tensors by the module's names, or is None where nobody has said which weight is which.

    Weights lie in memory only while their side runs, so that a large model need not lie there twice.
    """

    def __init__(
        self,
        ours: Callable[[Any, dict[str, Any]], tuple[Any, Outputs]],
        theirs: Callable[[Any, dict[str, Any]], tuple[Any, Outputs]],
        module: Callable[[], nn.Module],
        params: Callable[[], Any],
        inputs: Tensors,
        back: Callable[[Any], Tensors] | None,
        *,
        holds: Mapping[str, Sequence[Sequence[str]]] = {},
        held: Callable[[Tensors], Tensors] = dict,
        wide: bool = True,
        accepted: Accepted | None = None,
        large: nn.Module | None = None,
    ) -> None:
        """`module` makes a copy in float64, `params` a tree, for every run anew.

        `holds` are the module's weights in each layer by our paths, where that is known; `held` makes zero of those of
        its numbers that are not compared. Unless `wide`, everything keeps the type that it has. A `large` module is not
        copied for the way forward: each of its weights, and of ours, is widened where it is used.
        """
        self.large = large
        self.wide, self.sketched = wide, False
        self.held, self.accepted = held, accepted or Accepted()
        self.ours, self.theirs, self.back = ours, theirs, back
        self.widen: Collection[tuple[str, int]] | None = None
        """Not None: what casts to fewer digits than those of float64 is computed in float64 nevertheless, but for casts
        in these lines of ours."""
        self.islands: dict[str, dict[Site, bool]] = {}
        """Of each side: where such digits begin, and whether somebody's program asks there for them and no more."""
        self.module, self._params = module, params
        self._at_once = False
        """Whether gradients can be let go only after the way back."""
        self.inputs = {name: double(np.asarray(array)) if wide else np.asarray(array) for name, array in inputs.items()}
        parameters = dict((large or module()).named_parameters())
        self.trained = [name for name, p in parameters.items() if p.requires_grad]
        self.frozen = parameters.keys() - set(self.trained)
        given = params()
        self._shapes = {path: tuple(leaf.shape) for path, leaf in paths(given).items() if is_array(leaf)}
        self.names = [*self._shapes]
        self._rest = jax.tree.map(lambda leaf: 0.0 if is_array(leaf) else leaf, given)
        """The tree of our parameters, without its arrays."""
        self.held_by = inverted(holds)

    def params(self, arrays: Sequence[Any], *, whole: bool = True) -> Any:
        """The tree of our parameters, holding `arrays` in the place of its own; what is no array only if `whole`."""
        held = dict(zip(self.names, arrays, strict=True))
        return replaced(self._rest, held if whole else dict.fromkeys(paths(self._rest)) | held)

    def arrays(self, backward: bool = False) -> list[Any]:
        """Our parameters that are arrays, in the types in which they are run, or as they are if that takes too much."""
        leaves = [leaf for leaf in jax.tree.leaves(self._params()) if is_array(leaf)]
        if self.large is not None and not backward:
            return [
                np.asarray(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.asarray(leaf) for leaf in leaves
            ]
        return [in_double(leaf) if self.wide else jnp.asarray(leaf) for leaf in leaves]

    def returned(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What each side returns when it runs as a whole, by name; ours is compiled."""
        compiled = jax.jit(lambda arrays, inputs: dict(self.ours(self.params(arrays), inputs)[1]))
        ours = compiled(self.arrays(), {name: jnp.asarray(array) for name, array in self.inputs.items()})
        hand_back()
        module, given = self.module(), self.inputs.items()
        _, theirs = untrained(module, lambda: self.theirs(module, {name: to_torch(x.copy()) for name, x in given}))
        return (
            {name: np.asarray(array).astype(np.float64) for name, array in ours.items()},
            {name: tensor.detach().double().cpu().numpy() for name, tensor in theirs.items()},
        )

    def run_ours(self, backward: bool, keep: frozenset[int] = frozenset()) -> Values:
        """Our values."""

        def forward(arrays: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
            loss, outputs = self.ours(self.params(arrays), inputs)
            return loss, dict(outputs)

        def both(arrays: Any, inputs: Any) -> dict[str, Any]:
            if not backward:
                return forward(arrays, inputs)[1]
            # Whole numbers have gradients of a type of their own, which holds nothing.
            differentiated = jax.value_and_grad(forward, has_aux=True, allow_int=True)
            (_, outputs), gradients = differentiated(arrays, inputs)
            named = zip(self.names, gradients, strict=True)
            floating = {GRADIENT + name: g for name, g in named if jnp.issubdtype(g.dtype, jnp.floating)}
            return {**outputs, **floating}

        inputs = {name: jnp.asarray(array) for name, array in sorted(self.inputs.items())}
        labels: list[tuple[Kind, str]] = [("parameter", name) for name in self.names]
        labels += [("input", name) for name in inputs]

        def arguments() -> tuple[list[Any], dict[str, jax.Array]]:
            return self.arrays(backward), inputs

        hand_back()
        values = values_of_jax(
            both,
            arguments,
            labels,
            keep=keep,
            widen=self.widen,
            digits=self.accepted.digits,
            sketched=self.sketched,
            backward=backward,
        )
        values.again = lambda keep: self.run_ours(backward, keep)
        return self._noted(values)

    def run_theirs(
        self,
        backward: bool,
        keep: frozenset[int] = frozenset(),
        *,
        taken: Callable[[str, np.ndarray], None] = lambda name, gradient: None,
    ) -> Values:
        """Their values. Each gradient is given to `taken`, with the weight's name, and let go; the last call counts."""
        try:
            values = self._run_theirs(backward, keep, taken)
        except SeveralPassesError:
            # A part of the module runs backward by itself: its weights get more than one gradient.
            self._at_once = True
            values = self._run_theirs(backward, keep, taken)
        values.again = lambda keep: self.run_theirs(backward, keep)
        return self._noted(values)

    def _noted(self, values: Values) -> Values:
        live = values.live() if values.islands and self.widen is None else ()
        noted = {
            replace(values.site(n), shape=(), layer=()): asks and values.only_rounds(n)
            for n, asks in values.islands.items()
            if n in live
        }
        self.islands[values.side] = self.islands.get(values.side, {}) | noted
        return values

    def _run_theirs(self, backward: bool, keep: frozenset[int], taken: Callable[[str, np.ndarray], None]) -> Values:
        if self.large is None or backward:
            return self._run_copy(self.module(), backward, keep, taken)
        with evaluating(self.large) as module:
            return untrained(module, lambda: self._run_copy(module, backward, keep, taken, widening=True))

    def _run_copy(
        self,
        module: nn.Module,
        backward: bool,
        keep: frozenset[int],
        taken: Callable[[str, np.ndarray], None],
        widening: bool = False,
    ) -> Values:
        hand_back()
        inputs = {name: to_torch(array.copy()) for name, array in self.inputs.items()}
        if backward:
            module.zero_grad(set_to_none=True)

        def run() -> dict[str, torch.Tensor]:
            loss, outputs = self.theirs(module, inputs)
            if backward:
                if not loss.requires_grad:
                    raise ParityError(
                        "no gradient reaches a weight of theirs; backward=False compares what is returned alone"
                    )
                loss.backward()
            return dict(outputs)

        named = [*module.named_parameters(), *module.named_buffers()]
        # No weight, and what is made of it a table: a buffer that is not saved, or what ours does not hold.
        saved = self.held_by or dict.fromkeys(module.state_dict(keep_vars=True))
        constants = frozenset(name for name, _ in named if name not in saved)
        wanted = taken if backward else None
        with nullcontext() if self.widen is None else Float64(every=widening):
            return values_of_torch(
                module,
                run,
                inputs,
                constants=constants,
                keep=keep,
                taken=wanted,
                at_once=self._at_once,
                sketched=self.sketched,
                put=self.accepted.put,
                digits=self.accepted.digits,
                widening=widening,
            )

    def gradients(self, ours: Values) -> Tensors:
        """Ours by the module's names, zero where none arrived. They are taken out of the arrays of `ours`."""
        assert self.back is not None
        numbers = [ours.outputs.get(GRADIENT + name) for name in self._shapes]
        # Weights that are added share a gradient.
        taken = {number: ours.arrays.pop(number) for number in {*numbers} if number is not None}
        shapes = self._shapes.values()
        return self.back(
            self.params([np.zeros(shape) if n is None else taken[n] for n, shape in zip(numbers, shapes, strict=True)])
        )


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a tree of parameters holds numbers: not a function, and not a key of random numbers."""
    dtype = getattr(leaf, "dtype", None)
    return hasattr(leaf, "shape") and isinstance(dtype, np.dtype) and dtype.kind in "fiubV"


def in_double(leaf: Any) -> jax.Array:
    """A leaf of a tree of parameters as an array of JAX, in float64 what is floating."""
    same = isinstance(leaf, jax.Array) and (leaf.dtype == np.float64 or not jnp.issubdtype(leaf.dtype, jnp.floating))
    return leaf if same else jnp.asarray(double(np.asarray(leaf)))
