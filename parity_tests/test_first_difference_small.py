"""`first_difference` on pairs of a few lines each, for what the small GPT of test_first_difference.py has not."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parity import WeightMap, first_difference

NUMBERS = np.random.default_rng(1).standard_normal((5, 4))
LINEAR: WeightMap = {"kernel": ("linear.weight", "o i -> i o"), "bias": "linear.bias"}


@pytest.fixture(autouse=True)
def as_others_write_jax() -> Iterator[None]:
    """Ports lean on broadcasting, which our own code does without."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(
    "theirs", [F.silu, F.mish, lambda x: 1 - torch.sigmoid(x)], ids=["silu", "mish", "1 - sigmoid"]
)
def test_a_step_within_an_activation_is_not_taken_for_it(theirs: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Theirs(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](theirs(self[0](x)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    weights: WeightMap = {
        f"{name}.{ours}": (f"{name}.{kind}", axes)
        for name in "01"
        for ours, kind, axes in (("kernel", "weight", "o i -> i o"), ("bias", "bias", "o -> o"))
    }

    def other(p: Any, x: jax.Array) -> jax.Array:
        h = jax.nn.gelu(x @ p["0"]["kernel"] + p["0"]["bias"], approximate=True)
        return h @ p["1"]["kernel"] + p["1"]["bias"]

    found = first_difference(other, Theirs(nn.Linear(4, 8), nn.Linear(8, 3)), weights, [NUMBERS])
    allowed = ("another activation: GELU (tanh) in ours, SiLU in theirs",) if theirs is F.silu else (None,)
    assert found.kind in allowed


def test_experts_in_one_product_and_one_by_one() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.experts = nn.ModuleList(nn.Linear(4, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = [torch.tanh(expert(x)) for expert in self.experts]
            return hidden[0] - 2 * hidden[1] + hidden[2]

    weights = {"kernel": ("experts.{layer}.weight", "o i -> i o"), "bias": "experts.{layer}.bias"}

    def batched(p: Any, x: jax.Array, power: int = 1) -> jax.Array:
        hidden = jnp.tanh(jnp.einsum("td,edh->eth", x, p["kernel"]) + p["bias"][:, None])
        hidden = hidden**power
        return hidden[0] - 2 * hidden[1] + hidden[2]

    assert not first_difference(batched, Theirs(), weights, [NUMBERS])
    found = first_difference(partial(batched, power=3), Theirs(), weights, [NUMBERS])
    assert found.ours is not None
    assert found.ours.source == "hidden = hidden**power"
    assert found.kind is None


def test_a_mask_of_a_large_negative_number_hides_nothing() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.linear(x)
            return (scores + torch.arange(6) % 2 * -1e9).softmax(-1)

    def ours(p: Any, x: jax.Array) -> jax.Array:
        scores = x @ p["kernel"] + p["bias"][::-1]
        return jax.nn.softmax(jnp.where(jnp.arange(6) % 2 == 1, -1e9, scores))

    found = first_difference(
        ours, Theirs(), {"kernel": ("linear.weight", "o i -> i o"), "bias": "linear.bias"}, [NUMBERS]
    )
    assert found.ours is not None
    assert found.ours.source == 'scores = x @ p["kernel"] + p["bias"][::-1]'


def test_what_is_not_compared_is_said() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.linear(x), "ids": self.linear(x).argmax(-1), "z": x}

    weights = {"kernel": ("linear.weight", "o i -> i o"), "bias": "linear.bias"}
    found = first_difference(lambda p, x: {"y": x @ p["kernel"] + p["bias"]}, Two(), weights, [NUMBERS])
    assert not found
    assert str(found).endswith("the same (not compared: z)")


def test_parts_in_another_order_are_named_where_they_are_put_together() -> None:
    """A table of cosines and sines, as of positions: what differs first is no sine, but their order."""

    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            angles = torch.arange(5, dtype=torch.float64)[:, None] / 10 ** torch.arange(3, dtype=torch.float64)
            table = torch.cat([angles.sin(), angles.cos()], -1)
            return torch.tanh(self.linear(x) + table)

    def ours(p: Any, x: jax.Array) -> jax.Array:
        angles = jnp.arange(5)[:, None] / 10.0 ** jnp.arange(3)
        table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        return jnp.tanh(x @ p["kernel"] + p["bias"] + table)

    found = first_difference(ours, Theirs(), LINEAR, [NUMBERS])
    assert (found.stage, found.sure, found.parameters) == ("forward", True, ())
    assert found.kind == "the same numbers in another order: along axis 1 places 0 to 5 are in another order"
    assert found.ours is not None
    assert found.theirs is not None
    assert found.ours.source == "table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)"
    assert found.theirs.source == "table = torch.cat([angles.sin(), angles.cos()], -1)"


def test_code_that_reads_the_weight_of_another_layer_is_no_difference_of_weights() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def ours(p: Any, x: jax.Array, last: int = 1) -> jax.Array:
        for layer in range(3):
            x = jnp.tanh(x @ p["kernel"][min(layer, last)] + p["bias"][layer])
        return x

    weights: WeightMap = {"kernel": ("layers.{layer}.weight", "o i -> i o"), "bias": "layers.{layer}.bias"}
    assert not first_difference(partial(ours, last=2), Theirs(), weights, [NUMBERS])
    found = first_difference(ours, Theirs(), weights, [NUMBERS])
    # The map is right, so that the answer is a line and not a weight.
    assert (found.stage, found.sure, found.parameters) == ("forward", True, ())
    assert found.kind == "ours reads layers.1.weight, as kernel, where theirs reads layers.2.weight"
    assert found.ours is not None
    assert "min(layer, last)" in found.ours.source
    assert found.theirs is not None
    assert found.theirs.module == "layers.2"
