"""The proof of our models: the gates of `parity` on the JAX models and the PyTorch reference.

For a pair of your own see `parity`; its `check_parity`, `assert_parity`, `Measured` and `ParityError` are here too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity import Measured, ParityError, assert_parity, check_parity

__all__ = ["Measured", "ParityError", "assert_parity", "check_parity"]


def __getattr__(name: str) -> Any:
    # Lazily: the tests must be able to set JAX up before anything imports it.
    if name not in __all__:
        raise AttributeError(f"module 'parity_tests' has no attribute {name!r}")
    import parity

    return getattr(parity, name)
