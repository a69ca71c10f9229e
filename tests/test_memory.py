"""What "auto" becomes, and what no memory holds."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jax_tformer import startup, transformer
from jax_tformer.config.experiment import MeshConfig
from jax_tformer.training import prepare
from jax_tformer.training.sharding import make_mesh
from jax_tformer.training.step import batch_loss
from tests import small_models
from tests.refusals import refused

STACK = dataclasses.replace(small_models.STACK, num_layers=4, num_heads=4, feedforward_width=64)
CONFIG = dataclasses.replace(small_models.GPT, decoder=STACK)
ROWS = np.zeros((8, 32), np.int32)
BATCH = {"tokens": ROWS, "labels": ROWS}
PART = jax.eval_shape(lambda: BATCH)


def with_remat(remat, unroll=1):
    return CONFIG.with_compute(remat=remat, unroll=unroll)


def kept(remat):
    return prepare.kept_bytes(transformer(with_remat(remat)), PART)


def test_less_is_kept_the_more_is_computed_again():
    # Of every layer "full" keeps its input, "dots" also queries, keys, values, attention, projections and activations.
    token = 4 * ROWS.size * STACK.num_layers
    assert kept("full") >= token * 16
    assert kept("dots") - kept("full") == pytest.approx(token * (5 * 16 + 64), rel=0.05)
    assert kept("none") > 1.5 * kept("dots")


@pytest.mark.parametrize(
    "layers, unroll, by_turns, apart",
    [
        (4, 1, False, {False}),
        (4, 2, False, {False}),
        (4, 3, False, {True}),
        (4, 4, False, {True}),
        (4, 1, True, {True}),
        (7, 1, True, {False, True}),
    ],
)
def test_the_compiler_does_not_merge_what_is_computed_again(layers, unroll, by_turns, apart):
    """It would, on a GPU, where layers are in no loop: unrolled ones, those left over, and those after whole turns."""
    windows = {"window": 5, "window_layers": (True, False, False)} if by_turns else {}
    stack = dataclasses.replace(STACK, num_layers=layers, **windows)
    net = transformer(dataclasses.replace(with_remat("full", unroll), decoder=stack))
    program = jax.make_jaxpr(lambda params, batch: batch_loss(net, params, batch)[0])(net.shapes, dict(PART))
    assert set(re.findall(r"prevent_cse=(\w+)", str(program))) == {str(each) for each in apart}


def test_remat_follows_from_the_memory():
    weights = 16 * sum(leaf.size for leaf in jax.tree.leaves(transformer(CONFIG).shapes))
    none, dots = weights + kept("none"), weights + kept("dots")
    for needed, expected in ((1.01 * none, "none"), (0.99 * none, "dots"), (0.99 * dots, "full")):
        assert prepare.choose_remat(CONFIG, PART, int(needed / 0.8), 1, 1) == expected
    # Over two devices by rows and two by weights, half of each is enough.
    assert prepare.choose_remat(CONFIG, PART, int(1.01 * none / 2 / 0.8), 2, 2) == "none"


def test_what_auto_becomes_on_a_processor():
    mesh = make_mesh(MeshConfig(data=1), 8)
    fitted = prepare.fit_to_devices(CONFIG, BATCH, mesh, 2)
    assert fitted == with_remat("dots")
    assert prepare.describe_compute(fitted, mesh, 32) == "float32, attention 'blocks', remat 'dots'"
    assert prepare.fit_to_devices(with_remat("full", None), BATCH, mesh, 1) == with_remat("full")


@pytest.mark.parametrize("fsdp, asked, unroll", [(1, None, 4), (1, 2, 2), (8, None, 1)])
def test_layers_are_unrolled_on_gpus_without_fsdp(fsdp, asked, unroll):
    mesh = SimpleNamespace(local_devices=[SimpleNamespace(platform="gpu")], shape={"fsdp": fsdp})
    assert prepare.fit_to_devices(with_remat("full", asked), BATCH, mesh, 1) == with_remat("full", unroll)


def test_a_state_that_no_memory_holds_is_refused_before_anything_is_compiled(monkeypatch):
    assert 2**28 < startup.host_memory() < 2**50
    mesh = make_mesh(MeshConfig(), 1)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = {"w": jax.ShapeDtypeStruct((2**20, 2**10), "float32", sharding=whole)}
    monkeypatch.setattr(startup, "host_memory", lambda: 4 * 2**30)
    prepare.require_room(state, mesh)
    monkeypatch.setattr(startup, "host_memory", lambda: 4 * 2**30 - 1)
    with refused(r"take 4\.0 GiB, and there are 4\.0 GiB here; make the model smaller"):
        prepare.require_room(state, mesh)
