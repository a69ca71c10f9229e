"""Training on 8 virtual devices gives what one device gives."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jax_tformer.config import LoraConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import MeshConfig
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.model.parameters import AXES, axes_of
from jax_tformer.training.sharding import make_mesh, parameter_shardings

PROGRAM = """
import json, sys
import jax, numpy as np
from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.experiment import MeshConfig, OptimizerConfig
from jax_tformer.functional import transformer
from jax_tformer.training.sharding import make_mesh, place_batch
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import init_state, state_shardings, train_step

mesh = make_mesh(MeshConfig(**json.loads(sys.argv[1])), 8)
stack = StackConfig(num_layers=2, num_heads=4, feedforward_width=32, norm_placement="pre", final_norm=True)
net = transformer(TransformerConfig(vocab_size=24, d_model=16, encoder=stack, decoder=stack))
tx = optimizer(OptimizerConfig(warmup_steps=2), 10)
new = lambda: init_state(net, tx, jax.random.key(0))
shardings = state_shardings(mesh, tx, jax.eval_shape(new))
state = jax.jit(new, out_shardings=shardings)()
step = jax.jit(train_step(net, tx, accumulation=2), donate_argnums=0, out_shardings=(shardings, None))
rng, losses = np.random.default_rng(0), []
for _ in range(6):
    ids = lambda length: rng.integers(0, 24, (16, length)).astype(np.int32)
    batch = {"source": ids(7), "target": ids(5), "labels": ids(5)}
    batch |= {"source_mask": np.ones((16, 7), bool), "target_mask": np.ones((16, 5), bool)}
    state, metrics = step(state, place_batch(mesh, batch))
    losses.append(float(metrics.loss))
kernel = state.params["decoder"]["blocks"]["feedforward"]["up"]["kernel"]
print(json.dumps({"losses": losses, "devices": len(kernel.sharding.device_set), "spec": str(kernel.sharding.spec),
    "share": kernel.addressable_shards[0].data.size / kernel.size}))
"""


def run(devices, **mesh):
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(mesh)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_eight_devices_train_as_one_does():
    one = run(1)
    eight = run(8, data=2, fsdp=2, tensor=2)
    assert eight["devices"] == 8
    assert eight["share"] == 1 / 4, "the feed-forward kernel is split over fsdp and tensor"
    assert one["losses"][0] != one["losses"][-1]
    assert max(abs(a - b) / b for a, b in zip(eight["losses"], one["losses"], strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("asked", "rows", "outcome"),
    [
        ({}, 16, (8, 1, 1)),
        ({}, 12, (6, 1, 1)),
        ({}, 11, (1, 1, 1)),
        ({"tensor": 4}, 16, (2, 1, 4)),
        ({"data": 9}, 18, "data 9 x fsdp 1 x tensor 1 = 9 devices, but there are 8"),
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
