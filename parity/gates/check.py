"""The gates for a pair of your own: a function in JAX and a module in PyTorch that should be the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.flatten_util import ravel_pytree
from torch import nn

from parity.differ.answer import Difference
from parity.differ.first_difference import first_difference
from parity.gates.jax_side import JaxSide
from parity.gates.measure import (
    BFLOAT16,
    FLOAT32,
    FLOAT64_BAR,
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
    zero_scales,
)
from parity.gates.projection import Inputs, Tensors, Values, rounded, varied
from parity.gates.pytrees import is_floating
from parity.gates.torch_side import TorchSide, backward, load, tensors_of, tied_names, torch_loss
from parity.gates.weight_map import WeightMap, Weights
from parity.islands import defaults_of

GATES = ("9", "1", "2", "3", "4", "5")
_LOSS = "random projection of all outputs"
"""What is differentiated and trained where the pair has no loss of its own; no output of the pair's."""


def check_parity(
    ours: Callable[..., Any],
    theirs: nn.Module,
    weights: WeightMap,
    inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray],
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
    zero but for rounding are named instead, if there are any.
    """
    require_gates(gates, GATES)
    if not isinstance(theirs, nn.Module):
        raise TypeError(f"theirs is a {type(theirs).__name__}; expected a torch.nn.Module, which holds its weights")
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        pair = OwnPair(ours, theirs, weights, inputs, like)
        runs: dict[str, Callable[[], Measured]] = {
            "9": pair.conversion,
            "1": pair.outputs,
            "2": lambda: pair.gradients(zero_gradients),
            "3": lambda: pair.quality("3 float32 / allowed", "float32", zero_gradients),
            "4": lambda: pair.quality("4 bfloat16 / allowed", "bfloat16", zero_gradients),
            "5": lambda: pair.optimizer(zero_gradients),
        }
        try:
            return run_gates(name, gates, lambda gate: runs[gate]())
        except ParityError as error:
            trained = error.gate == "5" and not all(figure.passed for figure in error.figures)
            if explain and (trained or error.gate in ("1", "2")):
                error.difference = pair.quiet(zero_gradients) if trained else ""
                for module in pair.parting() if trained else [theirs]:
                    error.difference = error.difference or searched(ours, module, weights, inputs, like=like, name=name)
                error.add_note(str(error.difference))
            raise


def searched(
    ours: Callable[..., Any],
    theirs: nn.Module,
    weights: WeightMap,
    inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray],
    *,
    like: Any = None,
    name: str = "pair",
) -> Difference | str:
    """`first_difference`, or why it found none: a search that breaks must not hide the gate that is red."""
    try:
        return first_difference(ours, theirs, weights, inputs, like=like, name=name)
    except Exception as error:
        return f"where they part was not found ({type(error).__name__}: {' '.join(str(error).split())})"


class OwnPair:
    """A JAX function and a PyTorch module with a mapping between their weights."""

    def __init__(
        self,
        ours: Callable[..., Any],
        theirs: nn.Module,
        weights: WeightMap,
        inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray],
        like: Any = None,
    ) -> None:
        # What torch.compile wraps has the names that the user knows, and takes other types without compiling anew.
        self.theirs = getattr(theirs, "_orig_mod", theirs)
        self.inputs = Inputs.read(inputs)
        self.torch = TorchSide(self.theirs, self.inputs)
        try:
            self.map = Weights(weights, self.torch.weights, like=like, optional=self.torch.buffers)
        except ParityError as error:
            tied = "; ".join(f"{other} is another name of {name}" for other, name in tied_names(self.theirs).items())
            raise ParityError(f"{error} ({tied})" if tied else str(error)) from None
        shared = {name for names in self.map.ours_to_theirs.values() for name in names}
        self.weights: Tensors = rounded(
            {name: array for name, array in self.torch.weights.items() if name in shared}, "float64", "float64"
        )
        """What both sides hold; buffers that the mapping leaves out stay the module's."""
        self.frozen = self.weights.keys() - self.torch.trained
        self.jax = JaxSide(ours, self.map.into(self.weights), self.inputs)

    def results(self, dtype: str, held_by: str, seed: int = 0) -> tuple[Values, Values]:
        """(JAX, PyTorch) in `dtype`, on weights and inputs rounded to what `held_by` holds, by the module's names.

        Seeds other than 0 stand for weights a few percent away from the module's.
        """
        inputs = self.inputs.rounded(held_by, dtype)
        weights = rounded(varied(self.weights, seed), held_by, dtype)
        ours = self.jax.run(self.map.flat(weights), inputs, dtype)
        return ours.converted(self.jax.weights, self.map.back), self._theirs(dtype, held_by, seed)

    def _theirs(self, dtype: str, held_by: str, seed: int) -> Values:
        weights = rounded(varied(self.weights, seed), held_by, dtype)
        return self.torch.run(weights, self.inputs.rounded(held_by, dtype), dtype)

    @cached_property
    def exact(self) -> tuple[Values, Values]:
        """(JAX, PyTorch) in float64."""
        return self.results("float64", "float64")

    def conversion(self) -> Measured:
        """Gate 9."""
        return numbers_lost(self.map.held(self.weights), self.map.back(self.map.into(self.weights)))

    def outputs(self) -> Measured:
        """Gate 1."""
        ours, theirs = self.exact
        figure = compared("1 activations", ours.outputs, theirs.outputs)
        return figure.without(self.jax.left_out | self.torch.left_out)

    def gradients(self, zero: Sequence[str]) -> Measured:
        """Gate 2."""
        ours, theirs = self.exact
        here, there = self._trained(ours.gradients), self._trained(theirs.gradients)
        figure = compared("2 gradients", here, there, zero=self._zeros(theirs, zero))
        scale = 1e-11 * global_norm(there)
        frozen = [key for key, p in self.theirs.named_parameters() if key in self.frozen and p.is_floating_point()]
        alone = [key for key in frozen if np.linalg.norm(ours.gradients[key]) > scale]
        return replace(figure, note=f"trained in ours alone: {', '.join(alone)}" if alone else "")

    def _trained(self, tensors: Tensors) -> Tensors:
        shared = {key: array for key, array in tensors.items() if key in self.weights and key not in self.frozen}
        return self.map.held(shared)

    def quality(self, gate: str, dtype: str, zero: Sequence[str]) -> Measured:
        """Gate 3 or 4."""
        self.__dict__.pop("exact", None)  # two copies of all weights that are not needed any more
        samples = []
        for seed in range(9):
            (ours, theirs), exact = self.results(dtype, dtype, seed), self._theirs("float64", dtype, seed)
            here, there, truth = (
                _floating(side.outputs) | self._trained(side.gradients) for side in (ours, theirs, exact)
            )
            scales = {key: float(np.linalg.norm(array)) for key, array in truth.items()} | self._zeros(exact, zero)
            samples.append(Sample(here, there, truth, scales))
        return quality(gate, samples, FLOAT32 if dtype == "float32" else BFLOAT16)

    def optimizer(self, zero: Sequence[str], steps: int = 50) -> Measured:
        """Gate 5: AdamW at 1e-3 with decay of 0.1, clipped to half of the first gradient's norm.

        Gradients in `zero` are taken as zero: AdamW would make steps of full length of their rounding errors.
        """
        try:
            import optax
        except ImportError as error:
            raise ParityError("gate 5 needs optax; install it, or leave gate 5 out") from error

        self.__dict__.pop("exact", None)
        silent = self._silent(zero)
        given = self.inputs.rounded("float64", "float64")
        module = deepcopy(self.theirs).double().eval()
        load(module, self.weights)

        def run(arrays: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            with defaults_of(module):
                loss, _ = torch_loss(given.call(module, arrays=arrays), set(), {})
            return loss, {_LOSS: loss}

        limit = 0.5 * global_norm(backward(module, given.arrays, run)[1])
        tx = optax.adamw(1e-3, weight_decay=0.1)
        moving = {key: p for key, p in module.named_parameters() if key in self.weights and key not in self.frozen}
        theirs = torch.optim.AdamW(list(moving.values()), lr=1e-3, weight_decay=0.1)
        trained = {key: np.full(array.shape, key not in self.frozen) for key, array in self.weights.items()}
        flat = self.map.flat(self.weights)
        params: Any = {path: array for path, array in flat.items() if is_floating(array)}
        moves = self.map.flat(trained)
        heard = self.map.flat({key: where & ~silent.get(key, np.False_) for key, where in trained.items()})

        @jax.jit
        def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
            # All in one vector: a step of it is compiled in no time.
            vector, whole = ravel_pytree(params)
            gradient, _ = ravel_pytree({path: gradients[path] * heard[path] for path in params})
            gradient *= jnp.minimum(1.0, limit / (jnp.linalg.norm(gradient) + 1e-6))  # as clip_grad_norm_ does
            updates, state = tx.update(gradient, state, vector)
            moved = whole(updates)
            return {path: array + moved[path] * moves[path] for path, array in params.items()}, state

        state, losses = tx.init(ravel_pytree(params)[0]), []
        self._parting: list[Tensors] = []
        parted = False
        for _ in range(steps):
            if not parted:
                now = {key: np.array(array) for key, array in tensors_of(module)[0].items()}
                self._parting = [*self._parting[-1:], now]
            ours = self.jax.run(flat | params, given, "float64")
            params, state = step(params, state, ours.gradients)
            their_loss = backward(module, given.arrays, run)[0][_LOSS]
            parted = parted or relative_error(ours.loss, their_loss) > FLOAT64_BAR
            for key, p in moving.items():
                if key in silent and p.grad is not None:
                    p.grad[torch.from_numpy(silent[key]).to(p.device)] = 0
            torch.nn.utils.clip_grad_norm_(moving.values(), limit)
            theirs.step()
            losses.append((ours.loss, their_loss))
        ours_losses, their_losses = map(np.stack, zip(*losses, strict=True))
        parameters, buffers = tensors_of(module)
        there = _floating(self.map.held({key: (buffers | parameters)[key] for key in self.weights}))
        back = _floating(self.map.back(flat | params))
        curve = f"{_LOSS}, step by step"
        return compared("5 optimizer", back | {curve: ours_losses}, there | {curve: their_losses})

    def parting(self) -> Iterator[nn.Module]:
        """The module in the last run of `optimizer`: at the step before the losses part, and where they do."""
        for weights in self._parting:
            module = deepcopy(self.theirs).double()
            load(module, weights)
            yield module

    def quiet(self, zero: Sequence[str]) -> str:
        """Which gradients are zero but for rounding, on both sides, and are not said to be; empty where none are."""
        sides = [self._trained(side.gradients) for side in self.exact]
        scale = global_norm(sides[1])
        sizes = {key: max(float(np.linalg.norm(side[key])) for side in sides) for key in sides[1]}
        said = self._silent(zero)
        found = [key for key, size in sizes.items() if size <= 1e-11 * scale and not said.get(key, np.False_).all()]
        if not found:
            return ""
        return (
            f"zero but for rounding, of which AdamW makes steps of full length: the gradients of {', '.join(found)}; "
            f"name them in zero_gradients, where they have to be zero"
        )

    def _silent(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Where in the module's parameters the gradient is said to be zero, by the module's names or by our paths."""
        silent: dict[str, np.ndarray] = {}
        for name in names:
            if name in self.weights and name not in self.frozen:
                there = {name: np.ones(self.weights[name].shape, bool)}
            elif name in self.map.shapes:
                flat = {path: np.full(shape, path == name) for path, shape in self.map.shapes.items()}
                there = {key: where for key, where in self.map.back(flat).items() if where.any()}
            else:
                trained, ours = sorted(self.weights.keys() - self.frozen), sorted(self.map.shapes)
                raise ParityError(f"zero_gradients names {name!r}, which the module lacks: {trained}; and ours: {ours}")
            silent |= {key: where | silent.get(key, False) for key, where in there.items()}
        return silent

    def _zeros(self, exact: Values, names: Sequence[str]) -> dict[str, float]:
        """The global norm, for the gradients that are said to be zero; raises ParityError where one is not."""
        silent = self._silent(names)
        scales = zero_scales(exact.gradients, silent, silent)
        return {name: scales[name] for name, where in silent.items() if where.all()}


def _floating(tensors: Tensors) -> Tensors:
    return {name: array for name, array in tensors.items() if jnp.issubdtype(array.dtype, jnp.floating)}
