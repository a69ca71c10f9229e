"""The gates for a pair of your own: a function in JAX and a module in PyTorch that should be the same."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.flatten_util import ravel_pytree
from torch import nn
from torch.optim.adamw import adamw

from parity.differ.first_difference import first_difference
from parity.gates.jax_side import JaxSide, exactly
from parity.gates.measure import (
    FLOAT64_BAR,
    NARROW,
    SAMPLES,
    Measured,
    ParityError,
    Sample,
    compared,
    global_norm,
    numbers_lost,
    quality,
    relative_error,
    require_gates,
    run_gates,
    searched,
    zero_scales,
)
from parity.gates.projection import Inputs, Values, floating, rounded, varied
from parity.gates.pytrees import Tensors
from parity.gates.torch_side import TorchSide, copied, load, tied_names
from parity.gates.weight_map import WeightMap, Weights

GATES = ("9", "1", "2", "3", "4", "5")
_LOSS = "random projection of all outputs"
"""What is differentiated and trained where the pair has no loss of its own; no output of the pair's."""


def check_parity(
    ours: Callable[..., Any],
    theirs: nn.Module,
    weights: WeightMap,
    inputs: Sequence[np.ndarray] | Tensors,
    *,
    gates: Sequence[str] = ("9", "1", "2", "3", "5"),
    zero_gradients: Sequence[str] = (),
    like: Any = None,
    explain: bool = True,
    name: str = "pair",
) -> list[Measured]:
    """Runs gates on `ours(params, *inputs)` and `theirs(*inputs)`, prints a line each, and returns the figures.

    Both return arrays by the same paths: one alone, or dicts, sequences and dataclasses of arrays, however deep (of
    `(y, {"h": h})` the paths are 0 and 1.h). `inputs` are the arguments in order, or by name in a dict. The weights are
    the module's; `weights` says where each of its parameters lies in `params`: nested dicts, or any pytree of which
    `like` is an example (an `nnx.State`, the variables of Linen, an Equinox module). It may name buffers, too, such as
    running means: weights without a gradient. Buffers that it does not name, and what it lists under LEFT_OUT (a
    pooler, rows of a table that nothing reads), stay the module's own, and are not compared.

    Floating inputs and weights take the type of each gate: float64 for gates 1 (outputs), 2 (gradients of every
    parameter) and 5 (50 steps of AdamW with clipping), float32 for 3, bfloat16 for 4; gate 9 is the weight mapping,
    there and back. Gradients are those of a fixed random projection of all outputs; `zero_gradients` names parameters
    whose gradient is zero in exact arithmetic (a key bias), by the module's names or, where it is part of a fused
    matrix, by our paths.

    `theirs` is copied, as it was before it was compiled, without dropout (`eval`), and stays as it was; float64 is
    switched on for JAX while this runs. Outputs that are whole numbers or truth values must be equal in gate 1, and are
    left out of the others; frozen parameters are left out of gates 2 to 5, and the `note` of gate 2 names those that
    have a gradient in ours. Raises ParityError, which shows both sides, for a red gate and for what cannot be compared:
    names, shapes, dtypes, NaN on one side, a mapping that does not fit; ValueError for gates that do not exist,
    TypeError for arguments of another kind. The tensor that an error begins with is the first that differs, outputs in
    the order of the module's dict and parameters in that of the module; all that differ are listed. Where gate 1, 2 or
    5 is red and `explain` is true, `first_difference` is asked where the two part, for gate 5 with the weights of the
    steps where its losses do: its answer is the error's `difference`, and a note below its message. Gradients that are
    zero but for rounding are named instead, if there are any (for gate 2, if they alone differ).
    """
    require_gates(gates, GATES)
    if not isinstance(theirs, nn.Module):
        raise TypeError(f"theirs is a {type(theirs).__name__}; expected a torch.nn.Module, which holds its weights")
    with exactly():
        pair = OwnPair(ours, theirs, weights, inputs, like, zero_gradients)

        def parted(error: ParityError) -> Any:
            trained = error.gate == "5" and not all(figure.passed for figure in error.figures)
            if not explain or not (trained or error.gate in ("1", "2")):
                return None
            found: Any = pair.quiet() if trained else ""
            for module in pair.parting() if trained else [theirs]:
                search = partial(first_difference, ours, module, weights, inputs, like=like, name=name)
                found = found or searched(search)
            return found or (error.gate == "2" and pair.quiet()) or found

        return run_gates(name, gates, pair.measured, parted)


class OwnPair:
    """A JAX function and a PyTorch module with a mapping between their weights."""

    def __init__(
        self,
        ours: Callable[..., Any],
        theirs: nn.Module,
        weights: WeightMap,
        inputs: Sequence[np.ndarray] | Tensors,
        like: Any = None,
        zero_gradients: Sequence[str] = (),
    ) -> None:
        # What torch.compile wraps has the names that the user knows, and takes other types without compiling anew.
        self.theirs = getattr(theirs, "_orig_mod", theirs)
        given = Inputs.read(inputs)
        self.torch = TorchSide(self.theirs, given)
        try:
            self.map = Weights(weights, self.torch.weights, like=like, optional=self.torch.buffers)
        except ParityError as error:
            tied = "; ".join(f"{other} is another name of {name}" for other, name in tied_names(self.theirs).items())
            raise ParityError(f"{error} ({tied})" if tied else str(error)) from None
        shared = {name for layers in self.map.ours_to_theirs.values() for names in layers for name in names}
        held = {name: array for name, array in self.torch.weights.items() if name in shared}
        self.weights = rounded(held, "float64", "float64")
        """What both sides hold; buffers that the mapping leaves out stay the module's."""
        self.trained = [name for name in self.weights if name in self.torch.trained]
        self.zero_gradients = zero_gradients
        self.jax = JaxSide(ours, self.map.into(self.weights), given)

    def measured(self, gate: str) -> Measured:
        """The figure of one gate."""
        if gate in "345":
            self.__dict__.pop("exact", None)  # two copies of all weights that are not needed any more
        if gate in NARROW:
            return self.quality(gate)
        figures = {"9": self.conversion, "1": self.outputs, "2": self.gradients, "5": self.optimizer}
        return figures[gate]()

    @cached_property
    def exact(self) -> tuple[Values, Values]:
        """(JAX, PyTorch) in float64."""
        return self._ours(self.weights), self.torch.run(self.weights)

    def _ours(self, weights: Tensors, dtype: str = "float64") -> Values:
        """JAX, on weights and with gradients by the module's names."""
        return self.jax.run(self.map.flat(weights), dtype).converted(self.jax.weights, self.map.tensors)

    def conversion(self) -> Measured:
        """Gate 9."""
        return numbers_lost(self.map.held(self.weights), self.map.back(self.map.into(self.weights)))

    def outputs(self) -> Measured:
        """Gate 1."""
        ours, theirs = self.exact
        figure = compared("1 activations", ours.outputs, theirs.outputs)
        return figure.without(self.jax.left_out | self.torch.left_out)

    def gradients(self) -> Measured:
        """Gate 2."""
        ours, theirs = self.exact
        here, there = self._trained(ours.gradients), self._trained(theirs.gradients)
        figure = compared("2 gradients", here, there, zero=self._zeros(theirs))
        scale = 1e-11 * global_norm(there)
        alone = [
            key
            for key, parameter in self.theirs.named_parameters()
            if key in self.weights and parameter.is_floating_point() and key not in self.trained
            if np.linalg.norm(ours.gradients[key]) > scale
        ]
        return replace(figure, note=f"trained in ours alone: {', '.join(alone)}" if alone else "")

    def _trained(self, tensors: Tensors) -> Tensors:
        return self.map.held({key: tensors[key] for key in self.trained})

    def quality(self, gate: str) -> Measured:
        """Gate 3 or 4."""
        samples, (dtype, allowed) = [], NARROW[gate]
        for seed in range(SAMPLES):
            weights = rounded(varied(self.weights, seed), dtype, dtype)
            exact = self.torch.run(weights, "float64", dtype)
            here, there, truth = (
                floating(side.outputs) | self._trained(side.gradients)
                for side in (self._ours(weights, dtype), self.torch.run(weights, dtype), exact)
            )
            scales = {key: float(np.linalg.norm(array)) for key, array in truth.items()} | self._zeros(exact)
            samples.append(Sample(here, there, truth, scales))
        return quality(f"{gate} {dtype} / allowed", samples, allowed)

    def optimizer(self, steps: int = 50) -> Measured:
        """Gate 5: AdamW at 1e-3 with decay of 0.1, clipped to half of the first gradient's norm.

        Gradients that are said to be zero are taken as zero: AdamW would make steps of full length of their rounding
        errors. On either side all that is trained is one vector, of which a step is compiled in no time.
        """
        try:
            import optax
        except ImportError as error:
            raise ParityError("gate 5 needs optax; install it, or leave gate 5 out") from error

        ours, tensors = ravel_pytree({key: self.weights[key] for key in self.trained})
        heard = ~ravel_pytree(self.silent)[0]
        theirs, mean, square = (torch.from_numpy(np.array(start)) for start in (ours, 0 * ours, 0 * ours))
        count = torch.zeros(())
        optimizer = optax.adamw(1e-3, weight_decay=0.1)
        state = optimizer.init(ours)

        def weights(vector: Any) -> Tensors:
            return self.weights | {key: np.asarray(array) for key, array in tensors(vector).items()}

        def gradient(values: Values) -> jax.Array:
            return ravel_pytree({key: values.gradients[key] for key in self.trained})[0] * heard

        @jax.jit
        def step(vector: jax.Array, state: Any, gradient: jax.Array, limit: float) -> tuple[jax.Array, Any]:
            gradient *= jnp.minimum(1.0, limit / (jnp.linalg.norm(gradient) + 1e-6))  # as clip_grad_norm_ does
            updates, state = optimizer.update(gradient, state, vector)
            return vector + updates, state

        losses: list[tuple[Any, Any]] = []
        self._parting: list[Tensors] = []
        limit, parted = 0.0, False
        for _ in range(steps):
            now = weights(theirs.numpy())
            here, there = self._ours(weights(ours)), self.torch.run(now)
            losses.append((here.loss, there.loss))
            if not parted:
                self._parting = [*self._parting[-1:], now]
            parted = parted or relative_error(here.loss, there.loss) > FLOAT64_BAR
            limit = limit or 0.5 * global_norm(there.gradients)
            ours, state = step(ours, state, gradient(here), limit)
            theirs.grad = torch.from_numpy(np.array(gradient(there)))
            torch.nn.utils.clip_grad_norm_([theirs], limit)
            # The class would import the compiler of PyTorch, which takes longer than the steps of a small pair.
            adamw(
                [theirs],
                [theirs.grad],
                [mean],
                [square],
                [],
                [count],
                lr=1e-3,
                weight_decay=0.1,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
        ours_losses, their_losses = map(np.stack, zip(*losses, strict=True))
        expected = floating(self.map.held(weights(theirs.numpy())))
        found = floating(self.map.tensors(self.map.flat(weights(ours))))
        curve = f"{_LOSS}, step by step"
        return compared("5 optimizer", found | {curve: ours_losses}, expected | {curve: their_losses})

    def parting(self) -> Iterator[nn.Module]:
        """The module in the last run of `optimizer`: at the step before the losses part, and where they do."""
        for weights in self._parting:
            module = copied(self.theirs).double()
            load(module, weights)
            yield module

    def quiet(self) -> str:
        """Which gradients are zero but for rounding, on both sides, and are not said to be; empty where none are."""
        sides = [self._trained(side.gradients) for side in self.exact]
        scale = 1e-11 * global_norm(sides[1])
        found = [
            key
            for key in sides[1]
            if max(float(np.linalg.norm(side[key])) for side in sides) <= scale and not self.silent[key].all()
        ]
        if not found:
            return ""
        return (
            f"zero but for rounding, of which AdamW makes steps of full length: the gradients of {', '.join(found)}; "
            "name them in zero_gradients, where they have to be zero"
        )

    @cached_property
    def silent(self) -> Tensors:
        """Where in what is trained the gradient is said to be zero, by the module's names or by our paths."""
        silent = {key: np.zeros(self.weights[key].shape, bool) for key in self.trained}
        for name in self.zero_gradients:
            if name in silent:
                silent[name][...] = True
            elif name in self.map.shapes:
                flat = {path: np.full(shape, path == name) for path, shape in self.map.shapes.items()}
                for key, where in self.map.tensors(flat).items():
                    if key in silent:
                        silent[key] |= where
            else:
                trained, ours = sorted(self.trained), sorted(self.map.shapes)
                raise ParityError(f"zero_gradients names {name!r}, which the module lacks: {trained}; and ours: {ours}")
        return silent

    def _zeros(self, exact: Values) -> dict[str, float]:
        """The global norm, for the gradients that are said to be zero; raises ParityError where one is not."""
        where = {key: places for key, places in self.silent.items() if places.any()}
        scales = zero_scales(exact.gradients, where, where)
        return {key: scales[key] for key, places in where.items() if places.all()}
