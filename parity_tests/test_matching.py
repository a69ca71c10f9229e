"""`match_weights` finds the maps of presets and of Hugging Face models by itself, and claims no more than it ran."""

from typing import Any

import numpy as np
import pytest

from jax_tformer.config import TransformerConfig
from jax_tformer.model.functional import transformer
from jax_tformer.weights.names import from_reference
from parity import Weight, WeightMatch, match_weights
from parity.trees import paths
from parity.weight_maps import Weights
from parity_tests.cases import CONFIGS, weights_for
from torch_ref import reference


def double(config: TransformerConfig) -> TransformerConfig:
    return config.with_dtype("float64")


def held(match: WeightMatch, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters by path, made of the module's arrays by the rows of the match."""
    tensors = {row.ours: row.theirs if isinstance(row.theirs, Weight) else Weight(row.theirs) for row in match.rows}
    named = {name for row in tensors.values() for name in arrays if _stands_for(row.name, name)}
    return Weights(match.weights, {name: arrays[name] for name in named}).flat(arrays)


def _stands_for(template: str, name: str) -> bool:
    before, layered, after = template.partition("{layer}")
    middle = name.removeprefix(before).removesuffix(after)
    return name == template or bool(layered and name == f"{before}{middle}{after}" and middle.isdigit())


def assert_same(found: dict[str, np.ndarray], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], np.asarray(array), err_msg=path)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_enough_for_every_preset(name: str) -> None:
    config = double(CONFIGS[name])
    net, arrays = transformer(config), weights_for(config, 0.2)
    match = match_weights(net.shapes, reference(config))
    assert_same(held(match, arrays), paths(from_reference(arrays, net.shapes)))
    assert not match.unsure
    assert not match.unmatched_ours
    assert not match.unmatched_theirs
    assert not match.verified
    assert {row.confidence for row in match.rows} == {"likely"}
