"""Parity: whether a JAX function and a PyTorch module are the same, for anyone's pair.

`match_weights` proposes which of the module's numbers each JAX parameter holds, `check_parity` runs gates on a pair,
`assert_parity` compares tensors that you have already, `first_difference` says where two that differ part, `explain`
whether rounding is all that it is. `check_training` compares two loops step by step, `check_decoding` whole rows with
one token at a time. `record` writes what one side computes to a capsule, by which `judge` judges the other where the
first is not installed.

It knows no model, and needs jax, numpy and einops; torch where torch is compared, and optax for gate 5.

Its rooms: `gates` runs both sides and measures, `differ` finds the first difference, `match` proposes a weight map,
`capsule` records and judges, `report` shows; `plugin` is what pytest loads.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.capsule.judge import judge
    from parity.capsule.record import record
    from parity.differ.answer import Difference
    from parity.differ.first_difference import first_difference
    from parity.differ.rounding import Explanation, explain
    from parity.differ.values import Site
    from parity.gates.check import check_parity
    from parity.gates.decoding import check_decoding
    from parity.gates.measure import Measured, ParityError, assert_parity
    from parity.gates.training import check_training
    from parity.gates.weight_map import LEFT_OUT, Weight, WeightMap
    from parity.match.match_weights import match_weights
    from parity.match.weight_match import WeightMatch

_HOMES = {
    "LEFT_OUT": "gates.weight_map",
    "Difference": "differ.answer",
    "Explanation": "differ.rounding",
    "Measured": "gates.measure",
    "ParityError": "gates.measure",
    "Site": "differ.values",
    "Weight": "gates.weight_map",
    "WeightMap": "gates.weight_map",
    "WeightMatch": "match.weight_match",
    "assert_parity": "gates.measure",
    "check_decoding": "gates.decoding",
    "check_parity": "gates.check",
    "check_training": "gates.training",
    "explain": "differ.rounding",
    "first_difference": "differ.first_difference",
    "judge": "capsule.judge",
    "match_weights": "match.match_weights",
    "record": "capsule.record",
}

__all__ = [
    "LEFT_OUT",
    "Difference",
    "Explanation",
    "Measured",
    "ParityError",
    "Site",
    "Weight",
    "WeightMap",
    "WeightMatch",
    "assert_parity",
    "check_decoding",
    "check_parity",
    "check_training",
    "explain",
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
