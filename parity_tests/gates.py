"""The gates for a pair of your own: a function in JAX and a module in PyTorch that should be the same."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import traverse_util
from torch import nn

from jax_tformer.config import Dtype
from jax_tformer.nn.arrays import Params
from jax_tformer.training.optimizer import clip_by_global_norm
from parity_tests.bridge import Bridge, Result, Tensors, from_torch
from parity_tests.measure import BFLOAT16, FLOAT32, Measured, ParityError, Sample, compared, quality, worst

WeightMap = Mapping[str, str | tuple[str, str]]
"""Path in our parameters -> name of the module's parameter, with the einops pattern from its axes to ours if they
differ: `{"up.kernel": ("up.weight", "o i -> i o"), "up.bias": "up.bias"}`."""
GATES = ("9", "1", "2", "3", "4", "5")


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

    `theirs` is copied and stays as it was; float64 is switched on for JAX while this runs. Raises ParityError, which
    shows both sides, for a red gate and for what cannot be compared: names, shapes, dtypes, NaN on one side; ValueError
    for gates that do not exist.
    """
    if unknown := set(gates) - set(GATES):
        raise ValueError(f"there is no gate {sorted(unknown)} for a pair of your own; expected some of {list(GATES)}")
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        pair = OwnPair(ours, theirs, weights, inputs)
        runs = {
            "9": pair.conversion,
            "1": pair.outputs,
            "2": lambda: pair.gradients(zero_gradients),
            "3": lambda: pair.quality("3 float32 / allowed", "float32", zero_gradients),
            "4": lambda: pair.quality("4 bfloat16 / allowed", "bfloat16", zero_gradients),
            "5": pair.optimizer,
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
        self.weights: Tensors = {key: from_torch(p).astype(np.float64) for key, p in theirs.named_parameters()}
        named = [key for key, _ in self.rows.values()]
        absent, unmapped = sorted(set(named) - self.weights.keys()), sorted(self.weights.keys() - set(named))
        doubled = sorted({key for key in named if named.count(key) > 1})
        if absent or unmapped or doubled:
            raise ParityError(
                f"the weight mapping does not fit the module: it names {absent}, which the module lacks, "
                f"{doubled} more than once, and misses {unmapped}"
            )
        self.inputs = {str(index): np.asarray(array) for index, array in enumerate(inputs)}

    def into(self, weights: Tensors) -> Params:
        """The module's weights as our parameters."""
        flat = {path: einops.rearrange(weights[key], axes) for path, (key, axes) in self.rows.items()}
        return traverse_util.unflatten_dict(flat, sep=".")

    def back(self, params: Params) -> Tensors:
        """Our parameters (or their gradients) as the module's weights."""
        flat = traverse_util.flatten_dict(params, sep=".")
        weights = {}
        for path, (key, axes) in self.rows.items():
            before, after = axes.split(" -> ")
            weights[key] = einops.rearrange(np.asarray(flat[path]), f"{after} -> {before}")
        return weights

    def results(self, dtype: Dtype, held_by: Dtype, seed: int = 0) -> tuple[Result, Result]:
        """(JAX, PyTorch) in `dtype`, on weights and inputs rounded to what `held_by` holds.

        Seeds other than 0 stand for weights a few percent away from the module's.
        """
        bridge, batch = self.bridge(dtype), _rounded(self.inputs, held_by, dtype)
        rng, step = np.random.default_rng(seed), 0.05 if seed else 0.0
        weights = {key: array * (1 + step * rng.standard_normal(array.shape)) for key, array in self.weights.items()}
        bridge.load(_rounded(weights, held_by, dtype))
        return bridge.run_jax(batch), bridge.run_torch(batch)

    @cache  # noqa: B019 (lives as long as one call of check_parity)
    def bridge(self, dtype: Dtype) -> Bridge:
        """Both sides in `dtype`."""
        return Bridge(
            lambda params, batch: _jax_loss(self.ours(params, *batch.values())),
            lambda module, batch: _torch_loss(module(*batch.values())),
            deepcopy(self.theirs).to(getattr(torch, dtype)),
            into=self.into,
            back=self.back,
            dtype=dtype,
            optimised=False,
        )

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
        return compared("2 gradients", ours.gradients, theirs.gradients, zero=_global_norm(theirs, zero))

    def quality(self, gate: str, dtype: Dtype, zero: Sequence[str]) -> Measured:
        """Gate 3 or 4."""
        samples = []
        for seed in range(9):
            (ours, theirs), (_, exact) = self.results(dtype, dtype, seed), self.results("float64", dtype, seed)
            truth = exact.activations | exact.gradients
            scales = {key: float(np.linalg.norm(array)) for key, array in truth.items()} | _global_norm(exact, zero)
            narrow = (result.activations | result.gradients for result in (ours, theirs))
            samples.append(Sample(*narrow, truth, scales))
        return quality(gate, samples, FLOAT32 if dtype == "float32" else BFLOAT16)

    def optimizer(self, steps: int = 50) -> Measured:
        """Gate 5: AdamW at 1e-3 with decay of 0.1, clipped to half of the first gradient's norm."""
        bridge, batch = self.bridge("float64"), _rounded(self.inputs, "float64", "float64")
        bridge.load(self.weights)
        first = bridge.run_torch(batch).gradients
        limit = 0.5 * float(np.sqrt(sum(np.square(gradient).sum() for gradient in first.values())))
        tx = optax.chain(clip_by_global_norm(limit), optax.adamw(1e-3, weight_decay=0.1))
        theirs = torch.optim.AdamW(bridge.module.parameters(), lr=1e-3, weight_decay=0.1)

        @jax.jit
        def step(params: Params, state: optax.OptState, batch: Any) -> tuple[Params, optax.OptState, jax.Array]:
            (loss, _), gradients = jax.value_and_grad(bridge.ours, has_aux=True)(params, batch)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        params, state, losses = bridge.params, tx.init(bridge.params), []
        for _ in range(steps):
            params, state, loss = step(params, state, batch)
            torch_loss = bridge.run_torch(batch).activations["loss"]
            torch.nn.utils.clip_grad_norm_(bridge.module.parameters(), limit)
            theirs.step()
            losses.append((np.asarray(loss), torch_loss))
        ours_losses, their_losses = map(np.stack, zip(*losses, strict=True))
        module = {key: from_torch(p) for key, p in bridge.module.named_parameters()}
        return compared(
            "5 optimizer",
            {"loss of each step": ours_losses} | self.back(params),
            {"loss of each step": their_losses} | module,
        )


def _rounded(arrays: Tensors, held_by: Dtype, dtype: Dtype) -> Tensors:
    return {
        key: array.astype(jnp.dtype(held_by)).astype(jnp.dtype(dtype))
        if jnp.issubdtype(array.dtype, jnp.floating)
        else array
        for key, array in arrays.items()
    }


def _named(output: Any) -> dict[str, Any]:
    return dict(output) if isinstance(output, Mapping) else {"output": output}


def _projection(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The same numbers for the same name and shape, whatever the framework."""
    return np.random.default_rng([len(name), *name.encode()]).standard_normal(shape).astype(np.float32)


def _jax_loss(output: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    outputs = {name: jnp.asarray(array) for name, array in _named(output).items()}
    terms = [(array * _projection(name, array.shape).astype(array.dtype)).sum() for name, array in outputs.items()]
    loss = sum(terms[1:], terms[0])
    return loss, outputs | {"loss": loss}


def _torch_loss(output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    outputs = _named(output)
    terms = [
        (tensor * torch.from_numpy(_projection(name, tuple(tensor.shape))).to(tensor.dtype)).sum()
        for name, tensor in outputs.items()
    ]
    loss = sum(terms[1:], terms[0])
    return loss, outputs | {"loss": loss}


def _global_norm(result: Result, names: Sequence[str]) -> dict[str, float]:
    return dict.fromkeys(names, float(np.sqrt(sum(np.square(g).sum() for g in result.gradients.values()))))
