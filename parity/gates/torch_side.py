"""A PyTorch module by itself: its outputs, and the gradients of a fixed random projection of them."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from ml_dtypes import bfloat16
from torch import Tensor, nn

from parity.differ.values import Values as Followed
from parity.gates.measure import ParityError, failure
from parity.gates.projection import Inputs, Values, projected
from parity.gates.pytrees import Tensors
from parity.islands import Float64, defaults_of

T = TypeVar("T")


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module; what it has computed of its weights and keeps, as the old `weight_norm` does, is no leaf."""
    kept = (x for part in module.modules() for x in vars(part).values() if isinstance(x, Tensor) and not x.is_leaf)
    return deepcopy(module, {id(x): x.detach().clone() for x in kept})


class TorchSide:
    """A module without dropout (`eval`), whose weights are its parameters and its buffers."""

    framework = "torch"

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        """The module is copied, and stays as it was."""
        self._module, self._inputs = module, inputs
        parameters, buffers = tensors_of(module)
        self.weights: Tensors = parameters | buffers
        self.buffers = tuple(buffers)
        self.trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        """What has a gradient."""
        self.left_out: set[str] = set()
        """Outputs that are no arrays."""
        self.wide = False
        """Whether casts to float32 within the module are taken out."""
        self._copies: dict[str, nn.Module] = {}

    def exactly(self) -> AbstractContextManager[None]:
        """Nothing to switch on: PyTorch computes in the types that it is given."""
        return nullcontext()

    def run(
        self,
        weights: Tensors,
        dtype: str = "float64",
        held_by: str | None = None,
        known: Tensors | None = None,
        of: Collection[str] | None = None,
    ) -> Values:
        """Forward and backward in `dtype`, on inputs that `held_by` can hold.

        `known` are projections by the outputs' names, `of` the weights whose gradients are wanted: by default all that
        are trained, of none forward alone. Buffers that `weights` leave out stay the module's own.
        """
        if dtype not in self._copies:
            # From the original: a buffer that was computed once would lose its digits on the way through float32.
            self._copies[dtype] = copied(self._module).to(getattr(torch, dtype)).eval()
        module, inputs = self._copies[dtype], self._inputs.rounded(held_by or dtype, dtype)
        load(module, weights)
        wanted = self.trained if of is None else of
        held = {name: x.requires_grad_() for name, x in named_tensors(module).items() if name in wanted}
        if not held and of is None:
            raise ParityError("the module has no parameter that is trained, so that there is nothing to differentiate")
        arrays = to_tensors(inputs.arrays, module)
        try:
            with Float64() if self.wide else defaults_of(module):
                run = partial(backward, held, lambda: self._loss(module, arrays, known or {}))
                found = Values(*untrained(module, run, but=wanted))
            module.zero_grad(set_to_none=True)
            return found
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            given = [list(array.shape) for array in inputs.arrays.values()]
            raise failure("theirs", error, f"inputs {given}") from error

    def followed(self, weights: Tensors) -> Followed:
        """Every value of the way forward, in float64 also where the program casts.

        Buffers that are not saved with the weights count as constants.
        """
        from parity.differ.torch_values import values_of_torch

        module = copied(self._module).double().eval()
        load(module, weights)
        arrays = to_tensors(self._inputs.rounded("float64", "float64").arrays, module)
        constants = frozenset(self.buffers) - module.state_dict().keys()
        with Float64():
            return values_of_torch(module, lambda: self._loss(module, arrays, {})[1], arrays, constants=constants)

    def _loss(
        self, module: nn.Module, arrays: Mapping[str, Tensor], known: Tensors
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(the projection of all outputs, the outputs)."""

        def like(numbers: np.ndarray, output: Tensor) -> Tensor:
            return torch.from_numpy(numbers).to(output)

        return projected(self._inputs.call(module, arrays=arrays), "theirs", Tensor, self.left_out, known, like)


def load(module: nn.Module, weights: Tensors) -> None:
    """Gives the module's parameters and buffers these numbers, by name."""
    held = named_tensors(module)
    with torch.no_grad():
        for name, array in weights.items():
            held[name].copy_(to_torch(array))


def untrained(module: nn.Module, run: Callable[[], T], but: Collection[str] = ()) -> T:
    """What `run` returns while no weight is trained `but` these: nothing is kept for a way back, while a module that
    differentiates what it computes, as a penalty of gradients does, still can. Where it does so by its own weights, as
    one that learns to learn, it runs once more, and they stay trained."""
    trained = [p for name, p in module.named_parameters() if p.requires_grad and name not in but]
    with torch.enable_grad():
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            return run()
        except RuntimeError as error:
            if not trained or "does not require grad" not in str(error):
                raise
        finally:
            for parameter in trained:
                parameter.requires_grad_()
        return run()


def backward(
    held: Mapping[str, Tensor], run: Callable[[], tuple[Tensor, Mapping[str, Tensor]]]
) -> tuple[Tensors, Tensors, np.ndarray]:
    """(outputs, gradients of the tensors that are `held`, loss) of `run`, which returns (loss, outputs by name)."""
    with torch.enable_grad():
        loss, outputs = run()
    if held:
        loss.backward()
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in held.items()}
    for tensor in held.values():
        tensor.grad = None  # lets go of the gradients, so that whoever holds them keeps them
    return from_tensors(outputs), from_tensors(gradients), from_torch(loss)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters and its buffers, by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def tensors_of(module: nn.Module) -> tuple[Tensors, Tensors]:
    """The module's parameters and its buffers, by name, as NumPy arrays of their types."""
    return from_tensors(dict(module.named_parameters())), from_tensors(dict(module.named_buffers()))


def tied_names(module: nn.Module) -> dict[str, str]:
    """Other names of parameters that the module has in several places -> the name that `tensors_of` gives them."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def to_torch(array: np.ndarray) -> Tensor:
    """A tensor with these bits: NumPy's bfloat16 and PyTorch's are strangers to each other."""
    array = np.asarray(array)  # a sum or a product of arrays without axes is a number to NumPy, and no array
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_tensors(arrays: Tensors, module: nn.Module) -> dict[str, Tensor]:
    """Tensors by name, where the module is."""
    device = next(module.parameters()).device
    return {name: to_torch(array).to(device) for name, array in arrays.items()}


def from_torch(tensor: Tensor) -> np.ndarray:
    """The inverse of `to_torch`, from any device."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()


def from_tensors(tensors: Mapping[str, Tensor]) -> Tensors:
    """Arrays by name."""
    return {name: from_torch(tensor) for name, tensor in tensors.items()}
