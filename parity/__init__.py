"""Parity: whether a JAX function and a PyTorch module are the same, for anyone's pair.

`check_parity` runs the gates on a pair, `assert_parity` compares tensors that you have already.

It knows no model, and needs jax, numpy and einops; torch where torch is compared, and optax for gate 5.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.gates import check_parity
    from parity.measure import Measured, ParityError, assert_parity
    from parity.weight_maps import Weight, WeightMap

_HOMES = {
    "Measured": "measure",
    "ParityError": "measure",
    "Weight": "weight_maps",
    "WeightMap": "weight_maps",
    "assert_parity": "measure",
    "check_parity": "gates",
}

__all__ = ["Measured", "ParityError", "Weight", "WeightMap", "assert_parity", "check_parity"]


def __getattr__(name: str) -> Any:
    # Lazily: whoever sets JAX up does so before anything imports it, and most of this needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'parity' has no attribute {name!r}")
    return getattr(import_module(f"parity.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
