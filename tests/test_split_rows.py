"""Rows that are split over devices along their positions: the numbers of one device, and a part of its memory."""

import json

import numpy as np
import pytest

from jax_tformer.model.masks import Mask
from tests.several_processes import ROOT, run_alone
from tests.split_rows import CASES


def on_eight_devices(asked):
    output, _ = run_alone([ROOT / "tests" / "split_rows.py", asked], 8)
    return json.loads(output)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("window", "bfloat16") else pytest.mark.deep) for name in CASES],
)
def test_losses_and_gradients_are_those_of_whole_rows(name):
    # In bfloat16, whole rows too differ by 0.042 from float32.
    assert np.max(on_eight_devices(name)) < (0.05 if name == "bfloat16" else 1e-12)


@pytest.mark.parametrize(
    "figures, most_memory, most_work",
    [
        # What stays are the gathered keys and values of one layer, the parameters and their gradients. Every device
        # runs one program. Were what the causal mask hides computed, it would be twice as much.
        ("figures", 1.35, 1.2),
        # With FSDP, where parameters are split as well.
        ("figures-parts", 1.35, 1.1),
        # In each part of a batch; with data alone, each device has all parameters and their gradients.
        ("figures-accumulated", 1.75, 1.1),
    ],
)
def test_activations_and_work_fall_with_the_number_of_devices(figures, most_memory, most_work):
    (whole, operations), *others = on_eight_devices(figures)
    for devices, (held, done) in zip((2, 4, 8), others, strict=True):
        assert held < most_memory * whole / devices, (devices, held, whole)
        assert done < most_work * operations / devices, (devices, done, operations)


def test_decoding_leaves_the_parameters_where_they_are():
    parameters, temporary = on_eight_devices("decoding")
    assert temporary < parameters / 4


@pytest.mark.parametrize("causal, window", [(True, None), (True, 5), (False, 5)])
def test_a_block_of_a_stripe_is_multiplied_with_few_keys(causal, window):
    assert len(Mask(causal, window, stripe=(0, 4)).spanned(range(3), 24)) < 24
