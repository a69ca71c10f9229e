"""The gates of parity: what "the same" means between the JAX models and the PyTorch reference, and its proof.

For a pair of your own: `check_parity` runs the gates on a JAX function and a PyTorch module, `assert_parity` compares
tensors that you have already.
"""

from importlib import import_module
from typing import Any

_HOMES = {"check_parity": "gates", "ParityError": "measure", "Measured": "measure", "assert_parity": "measure"}

__all__ = ["Measured", "ParityError", "assert_parity", "check_parity"]


def __getattr__(name: str) -> Any:
    # Lazily: the tests must be able to set JAX up before anything imports it.
    if name not in _HOMES:
        raise AttributeError(f"module 'parity_tests' has no attribute {name!r}")
    return getattr(import_module(f"parity_tests.{_HOMES[name]}"), name)
