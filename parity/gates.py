"""The gates for a pair of your own: a function in JAX and a module in PyTorch that should be the same."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from parity.jax_side import called, jax_loss
from parity.measure import BFLOAT16, FLOAT32, Measured, ParityError, Sample, compared, quality, worst, zero_scales
from parity.pairs import Bridge, Dtype, Result, Tensors, from_torch
from parity.projection import Inputs, rounded
from parity.torch_side import torch_loss
from parity.weight_maps import WeightMap, nested, paths

GATES = ("9", "1", "2", "3", "4", "5")
_LOSS = "random projection of all outputs"
"""What is differentiated and trained where the pair has no loss of its own; no output of the pair's."""


def check_parity(
    ours: Callable[..., Any],
    theirs: nn.Module,
    weights: WeightMap,
    inputs: Sequence[np.ndarray],
    *,
    gates: Sequence[str] = ("9", "1", "2", "3", "5"),
    zero_gradients: Sequence[str] = (),
    name: str = "pair",
) -> list[Measured]:
    """Runs gates on `ours(params, *inputs)` and `theirs(*inputs)`, prints a line each, and returns the figures.

    Both return an array or a dict of arrays by the same names. The weights are the module's; `weights` says where each
    of its parameters lies in `params`, a nested dict. Floating inputs and weights take the type of each gate: float64
    for gates 1 (outputs), 2 (gradients of every parameter) and 5 (50 steps of AdamW with clipping), float32 for 3,
    bfloat16 for 4; gate 9 is the weight mapping, there and back. Gradients are those of a fixed random projection of
    all outputs; `zero_gradients` names parameters whose gradient is zero in exact arithmetic (a key bias).

    `theirs` is copied, without dropout (`eval`), and stays as it was; float64 is switched on for JAX while this runs.
    Outputs that are whole numbers or truth values must be equal in gate 1, and are left out of the others; frozen
    parameters are left out of gates 2 to 5. Raises ParityError, which shows both sides, for a red gate and for what
    cannot be compared: names, shapes, dtypes, NaN on one side, a mapping that does not fit; ValueError for gates that
    do not exist, TypeError for arguments of another kind. The tensor that an error begins with is the first that
    differs, outputs in the order of the module's dict and parameters in that of the module; all that differ are listed.
    """
    if isinstance(gates, str) or not gates or (unknown := set(gates) - set(GATES)):
        given = gates if isinstance(gates, str) or not gates else sorted(unknown)
        raise ValueError(f"there is no gate {given!r} for a pair of your own; expected a list of some of {list(GATES)}")
    if not isinstance(theirs, nn.Module):
        raise TypeError(f"theirs is a {type(theirs).__name__}; expected a torch.nn.Module, which holds its weights")
    if isinstance(inputs, np.ndarray | jax.Array | torch.Tensor):
        raise TypeError("inputs is one array; expected a list of the arguments of both sides: [x]")
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        pair = OwnPair(ours, theirs, weights, inputs)
        runs: dict[str, Callable[[], Measured]] = {
            "9": pair.conversion,
            "1": pair.outputs,
            "2": lambda: pair.gradients(zero_gradients),
            "3": lambda: pair.quality("3 float32 / allowed", "float32", zero_gradients),
            "4": lambda: pair.quality("4 bfloat16 / allowed", "bfloat16", zero_gradients),
            "5": lambda: pair.optimizer(zero_gradients),
        }
        figures = []
        for gate in gates:
            try:
                figures.append(runs[gate]().require())
            except ParityError as error:
                raise ParityError(f"{name}: {error}") from None
        return figures


class OwnPair:
    """A JAX function and a PyTorch module with a mapping between their weights."""

    def __init__(
        self, ours: Callable[..., Any], theirs: nn.Module, weights: WeightMap, inputs: Sequence[np.ndarray]
    ) -> None:
        self.ours, self.theirs = ours, theirs
        self.rows = {path: row if isinstance(row, tuple) else (row, "... -> ...") for path, row in weights.items()}
        parameters = dict(theirs.named_parameters())
        self.weights: Tensors = {key: from_torch(p).astype(np.float64) for key, p in parameters.items()}
        self.frozen = {key for key, p in parameters.items() if not p.requires_grad}
        if not self.weights:
            raise ParityError("the module has no parameters, so that there is nothing to share")
        named = [key for key, _ in self.rows.values()]
        absent, unmapped = sorted(set(named) - self.weights.keys()), sorted(self.weights.keys() - set(named))
        doubled = sorted({key for key in named if named.count(key) > 1})
        if absent or unmapped or doubled:
            raise ParityError(
                f"the weight mapping does not fit the module: it names {absent}, which the module lacks, "
                f"{doubled} more than once, and misses {unmapped}"
            )
        for path, (key, axes) in self.rows.items():
            try:
                before, after = axes.split(" -> ")
                back = einops.rearrange(einops.rearrange(self.weights[key], axes), f"{after} -> {before}")
                fits = back.shape == self.weights[key].shape
            except (ValueError, einops.EinopsError):
                fits = False
            if not fits:
                raise ParityError(
                    f"the weight mapping does not fit: {path} is to be {key}, of shape "
                    f"{list(self.weights[key].shape)}, by {axes!r}; expected a pattern like "
                    "'o i -> i o' that can be undone"
                )
        self.inputs = {str(index): np.asarray(array) for index, array in enumerate(inputs)}

    def into(self, weights: Tensors) -> Any:
        """The module's weights as our parameters."""
        flat = {path: einops.rearrange(weights[key], axes) for path, (key, axes) in self.rows.items()}
        return nested(flat)

    def back(self, params: Any) -> Tensors:
        """Our parameters (or their gradients) as the module's weights."""
        flat = paths(params)
        weights = {}
        for path, (key, axes) in self.rows.items():
            before, after = axes.split(" -> ")
            weights[key] = einops.rearrange(np.asarray(flat[path]), f"{after} -> {before}")
        return weights

    def results(self, dtype: Dtype, held_by: Dtype, seed: int = 0) -> tuple[Result, Result]:
        """(JAX, PyTorch) in `dtype`, on weights and inputs rounded to what `held_by` holds.

        Seeds other than 0 stand for weights a few percent away from the module's.
        """
        bridge, batch = self.bridge(dtype), rounded(self.inputs, held_by, dtype)
        rng, step = np.random.default_rng(seed), 0.05 if seed else 0.0
        weights = {key: array * (1 + step * rng.standard_normal(array.shape)) for key, array in self.weights.items()}
        bridge.load(rounded(weights, held_by, dtype))
        results = bridge.run_jax(batch), bridge.run_torch(batch)
        for result in results:
            del result.activations[_LOSS]
        return results

    @cache  # noqa: B019 (lives as long as one call of check_parity)
    def bridge(self, dtype: Dtype) -> Bridge:
        """Both sides in `dtype`."""
        return Bridge(
            lambda params, batch: _with_loss(jax_loss(self._call(params, batch))),
            lambda module, batch: _with_loss(torch_loss(module(*batch.values()))),
            deepcopy(self.theirs).to(getattr(torch, dtype)).eval(),
            into=self.into,
            back=self.back,
            dtype=dtype,
        )

    def _call(self, params: Any, batch: Mapping[str, jax.Array]) -> Any:
        return called(self.ours, params, Inputs(self.inputs, by_name=False), batch)

    def conversion(self) -> Measured:
        """Gate 9."""
        there_and_back = self.back(self.into(self.weights))
        lost = {key: float((array != there_and_back[key]).sum()) for key, array in self.weights.items()}
        return worst("9 numbers lost", lost, 0.0)

    def outputs(self) -> Measured:
        """Gate 1."""
        ours, theirs = self.results("float64", "float64")
        return compared("1 activations", ours.activations, theirs.activations)

    def gradients(self, zero: Sequence[str]) -> Measured:
        """Gate 2."""
        ours, theirs = self.results("float64", "float64")
        return compared(
            "2 gradients",
            self._trained(ours.gradients),
            self._trained(theirs.gradients),
            zero=zero_scales(theirs.gradients, zero),
        )

    def _trained(self, tensors: Tensors) -> Tensors:
        return {key: array for key, array in tensors.items() if key not in self.frozen}

    def quality(self, gate: str, dtype: Dtype, zero: Sequence[str]) -> Measured:
        """Gate 3 or 4."""
        samples = []
        for seed in range(9):
            (ours, theirs), (_, exact) = self.results(dtype, dtype, seed), self.results("float64", dtype, seed)
            here, there, truth = (
                _floating(side.activations) | self._trained(side.gradients) for side in (ours, theirs, exact)
            )
            scales = {key: float(np.linalg.norm(array)) for key, array in truth.items()} | zero_scales(
                exact.gradients, zero
            )
            samples.append(Sample(here, there, truth, scales))
        return quality(gate, samples, FLOAT32 if dtype == "float32" else BFLOAT16)

    def optimizer(self, zero: Sequence[str], steps: int = 50) -> Measured:
        """Gate 5: AdamW at 1e-3 with decay of 0.1, clipped to half of the first gradient's norm.

        Parameters in `zero` are left as they are: AdamW would make steps of full length of their rounding errors.
        """
        try:
            import optax
        except ImportError as error:
            raise ParityError("gate 5 needs optax; install it, or leave gate 5 out") from error

        still = {*zero, *self.frozen}
        bridge, batch = self.bridge("float64"), rounded(self.inputs, "float64", "float64")
        bridge.load(self.weights)
        first = bridge.run_torch(batch).gradients
        limit = 0.5 * float(np.sqrt(sum(np.square(gradient).sum() for gradient in first.values())))
        tx = optax.adamw(1e-3, weight_decay=0.1)
        moving = [p for key, p in bridge.module.named_parameters() if key not in still]
        theirs = torch.optim.AdamW(moving, lr=1e-3, weight_decay=0.1)
        kept = {path: key not in still for path, (key, _) in self.rows.items()}
        mask = nested(kept)

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
            (loss, _), gradients = jax.value_and_grad(bridge.ours, has_aux=True)(params, batch)
            gradients = jax.tree.map(lambda gradient, keep: gradient * keep, gradients, mask)
            updates, state = tx.update(_clipped(gradients, limit), state, params)
            updates = jax.tree.map(lambda update, keep: update * keep, updates, mask)
            return optax.apply_updates(params, updates), state, loss

        params, state, losses = bridge.params, tx.init(bridge.params), []
        for _ in range(steps):
            params, state, loss = step(params, state, batch)
            torch_loss = bridge.run_torch(batch).activations[_LOSS]
            torch.nn.utils.clip_grad_norm_(moving, limit)
            theirs.step()
            losses.append((np.asarray(loss), torch_loss))
        ours_losses, their_losses = map(np.stack, zip(*losses, strict=True))
        module = {key: from_torch(p) for key, p in bridge.module.named_parameters()}
        curve = f"{_LOSS}, step by step"
        return compared("5 optimizer", self.back(params) | {curve: ours_losses}, module | {curve: their_losses})


def _clipped(gradients: Any, limit: float) -> Any:
    """Scaled by min(1, limit / (norm + 1e-6)), the form of torch.nn.utils.clip_grad_norm_."""
    norm = jnp.sqrt(sum(jnp.square(gradient).sum() for gradient in jax.tree.leaves(gradients)))
    factor = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree.map(lambda gradient: gradient * factor, gradients)


def _floating(tensors: Tensors) -> Tensors:
    return {name: array for name, array in tensors.items() if jnp.issubdtype(array.dtype, jnp.floating)}


def _with_loss(projected: tuple[Any, dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """The projection among the outputs, so that gate 5 can follow it."""
    loss, outputs = projected
    return loss, outputs | {_LOSS: loss}
