"""Parity: whether a JAX function and a PyTorch module are the same, for anyone's pair.

`match_weights` proposes which of the module's numbers each JAX parameter holds, `check_parity` runs gates on a pair,
`assert_parity` compares tensors that you have already, `first_difference` says where two that differ part. `record`
writes what one side computes to a capsule, by which `judge` judges the other where the first is not installed.

It knows no model, and needs jax, numpy and einops; torch where torch is compared, and optax for gate 5.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.answer import Difference
    from parity.capsule import record
    from parity.difference import first_difference
    from parity.gates import check_parity
    from parity.matching import match_weights
    from parity.measure import Measured, ParityError, assert_parity
    from parity.trial import judge
    from parity.values import Site
    from parity.weight_maps import LEFT_OUT, Weight, WeightMap
    from parity.weight_match import WeightMatch

_HOMES = {
    "LEFT_OUT": "weight_maps",
    "Difference": "answer",
    "Measured": "measure",
    "ParityError": "measure",
    "Site": "values",
    "Weight": "weight_maps",
    "WeightMap": "weight_maps",
    "WeightMatch": "weight_match",
    "assert_parity": "measure",
    "check_parity": "gates",
    "first_difference": "difference",
    "judge": "trial",
    "match_weights": "matching",
    "record": "capsule",
}

__all__ = [
    "LEFT_OUT",
    "Difference",
    "Measured",
    "ParityError",
    "Site",
    "Weight",
    "WeightMap",
    "WeightMatch",
    "assert_parity",
    "check_parity",
    "first_difference",
    "judge",
    "match_weights",
    "record",
]


def __getattr__(name: str) -> Any:
    # Lazily: whoever sets JAX up does so before anything imports it, and most of this needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'parity' has no attribute {name!r}")
    return getattr(import_module(f"parity.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
