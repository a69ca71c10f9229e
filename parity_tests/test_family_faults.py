"""Gates 1 and 2 see the faults of what single families have."""

from functools import lru_cache

import pytest

from parity.gates.measure import compared
from parity_tests.family_faults import CODE, CONFIGS, CROSSED, GEMMA, NEOX
from torch_ref import reference
from twin.bridge import Pair
from twin.cases import batch_for, weights_for


@lru_cache(maxsize=3)
def ours(config):
    pair = Pair(config, weights_for(config, 0.2), "float64", optimised=False)
    batch = batch_for(config, "right")
    return pair, batch, pair.run_jax(batch)


def gates(mine, theirs):
    return [
        compared("1 activations", mine.activations, theirs.activations),
        compared("2 gradients", mine.gradients, theirs.gradients),
    ]


@pytest.mark.parametrize("config", [GEMMA, NEOX, CROSSED], ids=["gemma", "neox", "crossed"])
def test_without_a_fault_both_gates_are_green(config):
    pair, batch, mine = ours(config)
    assert all(measured.passed for measured in gates(mine, pair.run_torch(batch)))


@pytest.mark.parametrize(("config", "fault"), CONFIGS, ids=lambda value: getattr(value, "name", ""))
def test_faults_of_configs(config, fault, report, monkeypatch):
    pair, batch, mine = ours(config)
    model = reference(fault.of(pair.config)).eval()
    model.load_state_dict(pair.module.state_dict())
    monkeypatch.setattr(pair, "module", model)
    report(fault.name, "reference", gates(mine, pair.run_torch(batch)))


@pytest.mark.parametrize(("config", "fault"), CODE, ids=lambda value: getattr(value, "name", ""))
def test_faults_of_code(config, fault, report):
    pair, batch, mine = ours(config)
    with fault.plant():
        theirs = pair.run_torch(batch)
    report(fault.name, "reference", gates(mine, theirs))
