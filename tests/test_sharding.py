"""Which device holds what; tests/test_processes.py trains on eight of them."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jax_tformer import ARCHITECTURES, LoraConfig, transformer
from jax_tformer.config.experiment import MeshConfig
from jax_tformer.model.parameters import AXES, axes_of
from jax_tformer.training import processes
from jax_tformer.training.sharding import describe_shards, make_mesh, parameter_shardings
from parity.gates.pytrees import paths
from tests import small_models
from tests.refusals import refused


@pytest.fixture
def eight_devices(monkeypatch):
    """A mesh is its shape."""
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(jax, "devices", lambda: list(range(8)))
    monkeypatch.setattr(jax, "make_mesh", lambda shape, names, axis_types, devices: (*shape, len(devices)))


@pytest.mark.parametrize(
    "asked, rows, shape",
    [
        ({}, 16, (8, 1, 1, 1)),
        ({}, 12, (6, 1, 1, 1)),
        ({}, 11, (1, 1, 1, 1)),
        ({"tensor": 4}, 16, (2, 1, 1, 4)),
        ({"context": 4}, 16, (2, 1, 4, 1)),
    ],
)
def test_the_data_axis_takes_what_divides_the_batch(asked, rows, shape, eight_devices):
    assert make_mesh(MeshConfig(**asked), rows) == (*shape, math.prod(shape))


@pytest.mark.parametrize(
    "asked, rows, message",
    [
        ({"data": 9}, 18, "data 9 x fsdp 1 x context 1 x tensor 1 = 9 devices, but there are 8"),
        ({"fsdp": 3, "tensor": 4}, 12, "= 12 devices, but there are 8"),
        ({"data": 4, "fsdp": 2}, 12, "12 rows .* does not divide over 8 devices .* multiple of 8"),
    ],
)
def test_meshes_that_cannot_be(asked, rows, message, eight_devices):
    with refused(message):
        make_mesh(MeshConfig(**asked), rows)


MESH = jax.sharding.AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
VASWANI = ARCHITECTURES["vaswani-base"]
CONFIGS = ARCHITECTURES | {
    "adapters": replace(ARCHITECTURES["gpt2"], lora=LoraConfig(targets=("all",))),
    "relative positions": replace(VASWANI, decoder=replace(VASWANI.decoder, positions="relative")),
}


def test_every_logical_name_is_in_use_and_nothing_large_is_left_whole():
    """A parameter that the table forgets would be copied to every device."""
    used = set()
    for name, config in CONFIGS.items():
        shapes = transformer(config).shapes
        shardings = paths(parameter_shardings(MESH, shapes))
        for full, leaf in paths(shapes).items():
            used |= {suffix for suffix in AXES if f".{full}".endswith(f".{suffix}")}
            assert len(axes_of(full).replace("->", "").split()) == leaf.ndim - (".blocks." in f".{full}")
            matrix = full.endswith(("kernel", "tokens.embedding")) and "head.dense" not in full
            assert not matrix or any(shardings[full].spec), f"{name}: {full} {leaf.shape} is whole on every device"
    assert used >= {name for name in AXES if not name.startswith(("gate.", "query_norm", "key_norm", "classifier"))}


def test_what_devices_hold_and_exchange_is_said():
    shapes = transformer(ARCHITECTURES["gpt2"].with_vocab_size(50_257)).shapes
    placed = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, parameter_shardings(MESH, shapes))
    program = "%a = f32[2] all-reduce(%x)\n%b = f32[4] all-gather-start(%y)\n%c = f32[4] all-reduce(%z)"
    first, *others = describe_shards(MESH, placed, placed, program)
    said = r"mesh data 1 x fsdp 2 x tensor 2: each device holds ([\d.]+) MiB of the state; a step exchanges (.*)"
    held, exchanged = re.fullmatch(said, first).groups()
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes)) * 4 / 2**20
    assert size / 4 < float(held) < size / 2, "the token table is split over one axis, all else over two"
    assert exchanged == "1 all-gather, 2 all-reduce"
    [whole] = others
    assert whole.endswith(", because the mesh does not divide them: embedding.tokens.embedding (V is 50257)")
    assert describe_shards(jax.make_mesh((1,), ("data",)), placed, placed, program) == []


def test_a_mesh_that_leaves_a_process_without_a_device_is_refused(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 3)
    devices = [SimpleNamespace(process_index=number) for number in (0, 0, 2)]
    with refused("data 3, which leaves process 1 of 3 without a device; expected one of each"):
        processes.require_device_each(devices, "the mesh is data 3")
    processes.require_device_each([*devices, SimpleNamespace(process_index=1)], "the mesh is data 4")


@pytest.mark.parametrize("names", [("batch",), ("data",), ("data", "fsdp")])
def test_users_may_have_meshes_of_their_own(names):
    net = transformer(small_models.GPT)
    params, tokens = net.init(jax.random.key(0)), jax.numpy.ones((2, 4), int)
    mesh = jax.make_mesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
    expected = net.apply(params, tokens)
    everywhere = jax.shard_map(net.apply, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    with jax.set_mesh(mesh):
        found = [jax.jit(function)(params, tokens) for function in (net.apply, everywhere)]
    for logits in found:
        np.testing.assert_allclose(logits, expected, atol=1e-5)
