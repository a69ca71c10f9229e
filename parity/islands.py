"""Float64 all the way: some modules cast to float32 inside, whatever their type (norms, softmax, rotations)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def defaults_of(module: nn.Module) -> Iterator[None]:
    """What a module in float64 makes without naming a type, as a mask of the lowest number, is of float64 as well."""
    before = torch.get_default_dtype()
    if any(parameter.dtype == torch.float64 for parameter in module.parameters()):
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Float64(TorchFunctionMode):
    """Turns float32 into float64 while it is on, wherever a dtype is named and where the default one is meant.

    Models built while it is on make their constants (frequencies of rotations) in float64 too. With `every`, types of
    still fewer digits are widened as well.
    """

    def __init__(self, every: bool = False) -> None:
        super().__init__()
        self._narrow = (torch.float32, torch.bfloat16, torch.float16)[: 3 if every else 1]

    def __enter__(self) -> "Float64":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        torch.set_default_dtype(self._default)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call with float64 in the place of float32."""
        if func is Tensor.float:
            func = Tensor.double
        wide = {name: self._widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._widened, args), **wide)

    def _widened(self, value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in self._narrow else value
