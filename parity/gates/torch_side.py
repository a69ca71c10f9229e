"""A PyTorch module by itself: its outputs, and the gradients of a fixed random projection of them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from ml_dtypes import bfloat16
from torch import Tensor, nn

from parity.differ.values import Values as Followed
from parity.gates.measure import ParityError, failure
from parity.gates.projection import Inputs, Tensors, Values, known_or_made, named_outputs
from parity.islands import defaults_of


def torch_loss(output: Any, left_out: set[str], known: Mapping[str, np.ndarray]) -> tuple[Tensor, dict[str, Any]]:
    """(the projection of all floating outputs, the outputs by name); raises what `named_outputs` raises."""
    outputs = named_outputs(output, "theirs", Tensor, left_out, floating=False)
    terms = [
        (tensor * torch.from_numpy(known_or_made(name, tuple(tensor.shape), known)).to(tensor)).sum()
        for name, tensor in outputs.items()
        if tensor.is_floating_point()
    ]
    return sum(terms[1:], terms[0]), outputs


class TorchSide:
    """A module without dropout (`eval`), whose weights are its parameters and its buffers."""

    framework = "torch"

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        """The module is copied, and stays as it was. Raises ParityError for one without trained parameters."""
        self._module, self._inputs = module, inputs
        parameters, buffers = tensors_of(module)
        self.weights: Tensors = parameters | buffers
        self.buffers = tuple(buffers)
        self.trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        """What has a gradient."""
        self.left_out: set[str] = set()
        """Outputs that are no arrays."""
        self._copies: dict[str, nn.Module] = {}
        if not self.trained:
            raise ParityError("the module has no parameter that is trained, so that there is nothing to differentiate")

    def exactly(self) -> AbstractContextManager[None]:
        """Nothing to switch on: PyTorch computes in the types that it is given."""
        return nullcontext()

    def run(self, weights: Tensors, inputs: Inputs, dtype: str, known: Tensors | None = None) -> Values:
        """Forward and backward in `dtype`, on inputs of that type and on weights that it can hold.

        `known` are projections by the outputs' names. Buffers that `weights` leave out stay the module's own.
        """
        if dtype not in self._copies:
            # From the original: a buffer that was computed once would lose its digits on the way through float32.
            self._copies[dtype] = deepcopy(self._module).to(getattr(torch, dtype)).eval()
        module = self._copies[dtype]
        load(module, weights)
        call = self._inputs.call
        try:
            with defaults_of(module):
                outputs, gradients = backward(
                    module,
                    inputs.arrays,
                    lambda arrays: torch_loss(call(module, arrays=arrays), self.left_out, known or {}),
                )
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise failure(
                "theirs", error, f"inputs {[list(array.shape) for array in inputs.arrays.values()]}"
            ) from error
        return Values(outputs, {name: gradients[name] for name in gradients if name in self.trained})

    def followed(self, weights: Tensors, inputs: Inputs) -> Followed:
        """Every value of the way forward, in float64 also where the program casts.

        Buffers that are not saved with the weights count as constants.
        """
        from parity.differ.torch_values import values_of_torch
        from parity.islands import Float64

        module = deepcopy(self._module).double().eval()
        load(module, weights)
        arrays = {name: to_torch(array) for name, array in inputs.arrays.items()}
        constants = frozenset(self.buffers) - module.state_dict().keys()

        def run() -> Mapping[str, Tensor]:
            return torch_loss(self._inputs.call(module, arrays=arrays), self.left_out, {})[1]

        with Float64():
            return values_of_torch(module, run, arrays, constants=constants)


def load(module: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Gives the module's parameters and buffers these numbers, by name."""
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, array in weights.items():
            held[name].copy_(to_torch(array))


def backward(
    module: nn.Module, arrays: Tensors, run: Callable[[dict[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
) -> tuple[Tensors, Tensors]:
    """(outputs, gradients of all parameters) of `run`, which returns (loss, outputs by name) of the arrays."""
    module.zero_grad()  # lets go of the gradients before, so that who holds them keeps them
    device = next(module.parameters()).device
    loss, outputs = run({name: to_torch(array).to(device) for name, array in arrays.items()})
    loss.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}
    return (
        {name: from_torch(tensor) for name, tensor in outputs.items()},
        {name: from_torch(tensor) for name, tensor in gradients.items()},
    )


def tensors_of(module: nn.Module) -> tuple[Tensors, Tensors]:
    """The module's parameters and its buffers, by name, as NumPy arrays of their types."""
    parameters = {name: from_torch(parameter) for name, parameter in module.named_parameters()}
    return parameters, {name: from_torch(buffer) for name, buffer in module.named_buffers()}


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


def from_torch(tensor: Tensor) -> np.ndarray:
    """The inverse of `to_torch`, from any device."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()
