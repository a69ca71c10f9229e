"""Which device holds what; tests/test_processes.py trains on eight of them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jax_tformer.config import LoraConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import MeshConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.model.parameters import AXES, axes_of
from jax_tformer.training import processes
from jax_tformer.training.sharding import describe_shards, make_mesh, parameter_shardings


@pytest.mark.parametrize(
    ("asked", "rows", "outcome"),
    [
        ({}, 16, (8, 1, 1, 1)),
        ({}, 12, (6, 1, 1, 1)),
        ({}, 11, (1, 1, 1, 1)),
        ({"tensor": 4}, 16, (2, 1, 1, 4)),
        ({"context": 4}, 16, (2, 1, 4, 1)),
        ({"data": 9}, 18, "data 9 x fsdp 1 x context 1 x tensor 1 = 9 devices, but there are 8"),
        ({"fsdp": 3, "tensor": 4}, 12, "= 12 devices, but there are 8"),
        ({"data": 4, "fsdp": 2}, 12, "12 rows .* does not divide over 8 devices .* multiple of 8"),
    ],
)
def test_the_mesh_on_eight_devices(asked, rows, outcome, monkeypatch):
    """Without a number, the data axis takes what divides the batch."""
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(jax, "devices", lambda: list(range(8)))
    monkeypatch.setattr(jax, "make_mesh", lambda shape, names, axis_types, devices: (shape, len(devices)))
    if isinstance(outcome, str):
        with pytest.raises(InputError, match=outcome):
            make_mesh(MeshConfig(**asked), rows)
    else:
        assert make_mesh(MeshConfig(**asked), rows) == (outcome, math.prod(outcome))


def test_every_logical_name_is_in_use_and_nothing_large_is_left_whole():
    """A parameter that the table forgets would be copied to every device."""
    mesh = jax.sharding.AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    used = set()
    vaswani = ARCHITECTURES["vaswani-base"]
    relative = vaswani.decoder and replace(vaswani.decoder, positions="relative")
    others = {
        "adapters": replace(ARCHITECTURES["gpt2"], lora=LoraConfig(targets=("all",))),
        "relative positions": replace(vaswani, decoder=relative),
    }
    for name, config in (ARCHITECTURES | others).items():
        shapes = transformer(config).shapes
        shardings = parameter_shardings(mesh, shapes)  # type: ignore[arg-type]
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True
        ):
            full = jax.tree_util.keystr(path, simple=True, separator=".")
            used |= {suffix for suffix in AXES if f".{full}".endswith(f".{suffix}")}
            assert len(axes_of(full).replace("->", "").split()) == leaf.ndim - (".blocks." in f".{full}")
            matrix = full.endswith(("kernel", "tokens.embedding")) and "head.dense" not in full
            assert not matrix or any(sharding.spec), f"{name}: {full} {leaf.shape} is whole on every device"
    assert used >= {name for name in AXES if not name.startswith(("gate.", "query_norm", "key_norm", "classifier"))}


def test_what_devices_hold_and_exchange_is_said():
    mesh = jax.sharding.AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    gpt2 = ARCHITECTURES["gpt2"].with_vocab_size(50_257)
    shapes = transformer(gpt2).shapes
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        parameter_shardings(mesh, shapes),  # type: ignore[arg-type]
    )
    program = "%a = f32[2] all-reduce(%x)\n%b = f32[4] all-gather-start(%y)\n%c = f32[4] all-reduce(%z)"
    told = describe_shards(mesh, abstract, abstract, program)  # type: ignore[arg-type]
    held = sum(leaf.size for leaf in jax.tree.leaves(shapes)) * 4 / 2**20
    assert told[0].startswith("mesh data 1 x fsdp 2 x tensor 2: each device holds ")
    assert held / 4 < float(told[0].split()[12]) < held / 2, "the token table is split over one axis, all else over two"
    assert told[0].endswith("MiB of the state; a step exchanges 1 all-gather, 2 all-reduce")
    assert told[1:] == [
        "whole on every device, because the mesh does not divide them: embedding.tokens.embedding (V is 50257)"
    ]
    assert describe_shards(jax.make_mesh((1,), ("data",)), abstract, abstract, program) == []


def test_a_mesh_that_leaves_a_process_without_a_device_is_refused(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 3)
    devices = [SimpleNamespace(process_index=number) for number in (0, 0, 2)]
    with pytest.raises(InputError, match="data 3, which leaves process 1 of 3 without a device; expected one of each"):
        processes.require_device_each(devices, "the mesh is data 3")
    processes.require_device_each([*devices, SimpleNamespace(process_index=1)], "the mesh is data 4")
