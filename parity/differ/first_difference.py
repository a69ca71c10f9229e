"""Where do a function of JAX and a module of PyTorch part? Nobody has to say which activation is which.

This is the door: it traces both sides (`traced_sides.py`), lets `forward_and_backward.py` search the values, and
`optimizer_step.py` the step. README.md in this folder says in eleven steps how, and which file does what.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
import torch
from torch import nn

from parity.differ.accepted import Accepted
from parity.differ.answer import Difference
from parity.differ.forward_and_backward import located
from parity.differ.optimizer_step import Optimizer, stepped
from parity.differ.torch_values import Widening, evaluating
from parity.differ.traced_sides import Sides, in_double, is_array
from parity.differ.weights import wrong_weights
from parity.gates.bridge import Bridge, Tensors, to_torch
from parity.gates.measure import FLOAT64_BAR, ParityError, failure, reason_of
from parity.gates.projection import Inputs, common_outputs, double, floating, named_outputs, projection
from parity.gates.torch_side import copied, tensors_of, untrained
from parity.gates.weight_map import WeightMap, Weights, paths
from parity.islands import defaults_of

_Found = TypeVar("_Found")
_LARGE = 2 << 30
"""Bytes of weights in float64, above which each is widened where it is used, and not before."""


def first_difference(
    ours: Callable[..., Any],
    theirs: nn.Module,
    weights: WeightMap | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    params: Any = None,
    like: Any = None,
    backward: bool = True,
    optimizer: Optimizer | None = None,
    ignore: Sequence[str] = (),
    bar: float = FLOAT64_BAR,
    name: str = "pair",
) -> Difference:
    """Finds the first place where `ours(params, *inputs)` and `theirs(*inputs)` part: forward, then backward.

    Every value that either side computes is reduced to a fingerprint that layout does not change. Walking back from
    what differs, through values that have no equal on the other side, to values that have one, gives the place: with
    the line and the layer in JAX, the line and the module in PyTorch.

    `weights` says which of the module's weights each of our parameters holds (`like` where these are not nested dicts);
    our parameters are then made of the module's. Given `params` as well, they are compared by it first, by name. Given
    `params` alone, weights are matched by their numbers, and gradients are not compared. Where forward and backward
    agree, one step of `optimizer` (a transformation of optax, a function from parameters to one of PyTorch) is taken on
    both sides. Inputs are arrays, in order or by keyword. All is computed in float64, without dropout; `theirs` stays
    as it was.

    Differences in `ignore` are passed: a line ("port.py:12"), a function, a layer of ours ("layer 3"), the path of a
    module of theirs, or what a kind says ("epsilon"). Theirs goes on with our numbers from there, and the answer names
    them. What differs by no more than `bar` counts as equal.

    Outputs have names as for `check_parity`. Those that only one side has, and those that are no arrays, are not
    compared: the answer names them in `left_out`. Where gradients are compared, it names in `trained_alone` the
    parameters that theirs does not train and that have a gradient in ours.

    Raises ParityError where the two cannot be compared: no weights, outputs without a common name, other shapes; and
    ValueError for a `bar` that is no number above 0.
    """
    if not 0 < bar < math.inf:
        raise ValueError(f"bar is {bar}; expected a number above 0")
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        pair = followed_pair(ours, theirs, weights, inputs, params=params, like=like)
        mapping = pair.mapping
        if mapping and params is not None:
            wrong = wrong_weights(mapping.back(params), mapping.held(pair.tensors), name, bar)
            if wrong:
                return wrong
        accepted = Accepted([ignore] if isinstance(ignore, str) else ignore, bar)
        sides, known = pair.sides(accepted), mapping is not None
        found = followed(lambda: located(sides, backward=backward and known, name=name))
        if not found and optimizer is not None and mapping is not None:
            after = followed(lambda: stepped(sides, mapping.into, optimizer, name))
            found = replace(after, trained_alone=found.trained_alone)
        return replace(found, left_out=tuple(sorted(pair.left_out)))


@dataclass(frozen=True)
class FollowedPair:
    """Both sides of a pair, ready to be run step by step, and what stands for what in them."""

    module: nn.Module
    given: Inputs
    params: Callable[[Callable[[Any], Any]], Any]
    """Ours: those given, or made of the module's; each is converted by a function before the next is made."""
    mapping: Weights | None
    tensors: Tensors
    """The numbers of the module, by name."""
    left_out: set[str]
    losses: tuple[Any, Any]
    """Each side as a function that returns (loss, the outputs that are compared)."""

    def sides(self, accepted: Accepted | None = None, *, wide: bool = True) -> Sides:
        """In float64, or each in its own types."""
        mapping, module = self.mapping, self.module

        def copy() -> nn.Module:
            return _copy(module) if wide else copied(module).eval()

        large = wide and _is_large(module)
        made = partial(self.params, _widened if wide and not large else lambda leaf: leaf)
        back, holds = (None, {}) if mapping is None else (mapping.back, mapping.ours_to_theirs)
        held = dict if mapping is None else mapping.held
        return Sides(
            *self.losses,
            copy,
            made,
            self.given.arrays,
            back,
            holds=holds,
            held=held,
            wide=wide,
            accepted=accepted,
            large=module if large else None,
        )


def _is_large(module: nn.Module) -> bool:
    """Whether its weights are not to lie in memory in float64, all at once."""
    return sum(parameter.numel() * 8 for parameter in module.parameters()) > _LARGE


@contextmanager
def _tried(module: nn.Module) -> Iterator[nn.Module]:
    if not _is_large(module):
        yield _copy(module)
        return
    with evaluating(module), Widening():  # type: ignore[no-untyped-call]
        yield module


def _shape(leaf: Any) -> Any:
    if not is_array(leaf):
        return leaf
    floating = "float" in str(leaf.dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), np.dtype(np.float64) if floating else leaf.dtype)


def _widened(leaf: Any) -> Any:
    return in_double(leaf) if is_array(leaf) else leaf


def followed_pair(
    ours: Callable[..., Any],
    theirs: nn.Module,
    weights: WeightMap | None,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    params: Any,
    like: Any,
    held_by: str | None = None,
) -> FollowedPair:
    """What `first_difference` was given, checked, with the outputs that both sides have; raises as it does.

    Floating inputs are rounded to what the type `held_by` can hold, if it is given.
    """
    module = getattr(theirs, "_orig_mod", theirs)
    if not isinstance(module, nn.Module):
        raise TypeError(f"theirs is a {type(theirs).__name__}; expected a torch.nn.Module, which holds its weights")
    if weights is None and params is None:
        raise ParityError("neither weights nor params are given; expected a weight map, our parameters, or both")
    given, left_out = Inputs.read(inputs), set[str]()
    given = given if held_by is None else given.rounded(held_by, held_by)
    parameters, buffers = followed(lambda: tensors_of(module))
    tensors = parameters | buffers
    mapping = None
    if weights is not None:
        mapping = Weights(weights, tensors, like=params if like is None else like, optional=buffers)

    def made(convert: Callable[[Any], Any]) -> Any:
        if params is None and mapping is not None:
            return mapping.tree(mapping.flat(tensors, convert))
        return jax.tree.map(convert, params)

    def run_ours(params: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return named_outputs(given.call(ours, params, arrays=inputs), "ours", jax.Array, left_out)

    def run_theirs(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
        with defaults_of(module):
            return named_outputs(given.call(module, arrays=inputs), "theirs", torch.Tensor, left_out)

    with _tried(module) as tried:
        returned = _outputs(run_ours, run_theirs, tried, made(_shape), given.arrays)
    del tried
    names = common_outputs(*returned, left_out)
    mine, their = ({name: both[side] for name, both in names.items()} for side in (0, 1))
    losses = _with_loss(run_ours, mine), _with_loss(run_theirs, their)
    return FollowedPair(module, given, made, mapping, tensors, left_out, losses)


def followed(look: Callable[[], _Found]) -> _Found:
    """`look()`; raises ParityError, in a sentence, for a program that cannot be run step by step."""
    try:
        return look()
    except ParityError:
        raise
    except Exception as error:
        raise ParityError(f"a side could not be followed step by step ({reason_of(error)})") from error


def _with_loss(run: Callable[..., dict[str, Any]], names: Mapping[str, str]) -> Any:
    """`run` with the fixed random projection of the outputs that are compared as its loss."""

    def with_loss(weights: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
        found = run(weights, inputs)
        outputs = {name: found[key] for name, key in names.items()}
        loss: Any = 0.0
        for name, value in floating(outputs).items():
            weight: Any = projection(name, tuple(value.shape)).astype(np.float64)
            loss = loss + (value * (torch.from_numpy(weight) if isinstance(value, torch.Tensor) else weight)).sum()
        return loss, outputs

    return with_loss


def difference_of(
    bridge: Bridge, batch: Tensors, *, optimizer: Optimizer | None = None, name: str = "pair"
) -> Difference:
    """The same for a pair that gates are run on: with its loss, and the weights that it holds."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        sides = Sides(
            bridge.ours,
            bridge.theirs,
            lambda: copied(bridge.module).double(),
            lambda: bridge.params,
            batch,
            bridge.back,
            holds=bridge.holds,
        )
        found = located(sides, backward=True, name=name)
        return found if found or optimizer is None else stepped(sides, bridge.into, optimizer, name)


def _copy(module: nn.Module) -> nn.Module:
    """In float64, without dropout."""
    try:
        return copied(module).double().eval()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ParityError(
            f"theirs cannot be copied in float64 ({reason_of(error)}); expected a plain module"
        ) from error


def _outputs(
    ours: Callable[..., dict[str, Any]],
    theirs: Callable[..., dict[str, Any]],
    module: nn.Module,
    params: Any,
    inputs: Tensors,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each side returns, of ours only the shapes; raises ParityError, which shows those given, where one fails."""
    given = {key: double(array) for key, array in inputs.items()}
    shapes = [list(array.shape) for array in given.values()]
    leaves, tree = jax.tree.leaves(params), jax.tree.structure(params)
    abstract = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}

    def returned(held: Mapping[int, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
        return ours(jax.tree.unflatten(tree, [held.get(n, leaf) for n, leaf in enumerate(leaves)]), arrays)

    own = {path: list(getattr(leaf, "shape", ())) for path, leaf in paths(params).items()}
    side, shown = "ours", f"params {own} and "
    try:
        here = jax.eval_shape(returned, abstract, given)
        side, shown = "theirs", ""
        there = untrained(module, lambda: theirs(module, {k: to_torch(array.copy()) for k, array in given.items()}))
    except ParityError:
        raise
    except Exception as error:
        raise failure(side, error, f"{shown}inputs {shapes}") from error
    return here, there
