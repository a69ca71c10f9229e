"""A program of eight devices: splits rows over some of them, and prints as JSON what its argument asks for.

"figures", "figures-gpt2" for a model of GPT-2's size, and others of batches in parts: for 1, 2, 4 and 8 devices, the
bytes of temporary buffers and the operations of a compiled step, on each device. "decoding": the bytes of all
parameters, and of temporary buffers where they are split over eight devices and tokens are chosen. Otherwise the name
of one of `CASES`: for each mesh the largest relative differences of the loss and of the gradients from one device's.
"""

import json
import sys
from dataclasses import replace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_tformer import ComputeConfig, DecodingConfig, DropoutConfig, LoraConfig, transformer
from jax_tformer.config.experiment import MeshConfig, OptimizerConfig, TrainingConfig
from jax_tformer.decoding import generate
from jax_tformer.startup import compiler_options
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.prepare import prepare
from jax_tformer.training.sharding import BATCH, make_mesh, parameter_shardings, place_batch
from jax_tformer.training.step import batch_loss
from tests.train_together import BOTH, MODELS, STACK, draw_batch

ROWS, LENGTH, SOURCE = 4, 24, 16
RELATIVE = replace(STACK, positions="relative")
TURNED = replace(STACK, positions="rotary", key_value_heads=2, window=5, window_layers=(True, False), score_cap=5.0)
DROPS = DropoutConfig(attention=0.1, residual=0.1, feedforward=0.1, embedding=0.1, final=0.1)
CASES = {
    **{name: MODELS[name] for name in ("encoder-decoder", "decoder", "encoder")},
    "relative": replace(BOTH, encoder=RELATIVE, decoder=RELATIVE),
    "window": replace(BOTH, encoder=None, decoder=TURNED),
    "window of an encoder": replace(BOTH, encoder=TURNED, decoder=None),
    "dropout": replace(BOTH, dropout=DROPS),
    "bfloat16": replace(MODELS["decoder"], compute=ComputeConfig(dtype="bfloat16")),
    "adapters": replace(MODELS["adapters"], lora=LoraConfig(rank=4, targets=("all",), dropout=0.1)),
}
MESHES = [
    {"data": 1, "context": 2},
    # 24 / 8 positions are not a multiple of 8.
    {"data": 1, "context": 8},
    {"data": 2, "context": 4},
    {"data": 1, "fsdp": 2, "context": 2, "tensor": 2},
]
NARROW = replace(BOTH, vocab_size=256, d_model=64, encoder=None, decoder=replace(STACK, feedforward_width=256))
LARGE = replace(STACK, num_layers=12, num_heads=12, feedforward_width=3072)
LONG = {
    "figures": (NARROW, 2, 2048, "context"),
    "figures-parts": (NARROW, 32, 128, "fsdp", 4),
    "figures-accumulated": (NARROW, 32, 128, "data", 4),
    "figures-gpt2": (
        replace(BOTH, vocab_size=50_257, d_model=768, encoder=None, decoder=LARGE, tied_head=True),
        1,
        2**14,
        "context",
    ),
}
"""Model, rows, their length, the axis of the mesh, and into how many parts a batch is divided."""


def loss_and_gradients(config, params, mesh):
    net, mesh = transformer(config), make_mesh(MeshConfig(**mesh), ROWS)
    shardings, options = parameter_shardings(mesh, net.shapes), compiler_options("float64")
    params, key = jax.device_put(params, shardings), jax.random.key(2)

    def loss(params, batch):
        return batch_loss(net, params, batch, dropout_key=key)[0]

    with jax.set_mesh(mesh):
        compute = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings), compiler_options=options)
        batch = place_batch(mesh, draw_batch(config, 0, ROWS, LENGTH, SOURCE))
        compiled = compute.lower(params, batch).compile()
    assert "reduce-scatter" not in compiled.as_text(), "gloo's is wrong for large arrays (docs/known-issues.md)"
    return jax.device_get(compiled(params, batch))


def differences(name):
    """Returns for each mesh the largest differences of the loss and of any parameter's gradients, relative."""
    config, narrow = CASES[name], CASES[name].compute.dtype == "bfloat16"
    exact = config.with_dtype("float32" if narrow else "float64")
    config = config if narrow else exact
    params = transformer(exact).init(jax.random.key(1))
    expected, gradients = loss_and_gradients(exact, params, {"data": 1})
    # Biases of keys change nothing: their gradients are rounding.
    least = 1e-3 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))

    def compare(mesh):
        loss, found = loss_and_gradients(config, params, mesh)
        apart = jax.tree.map(lambda x, y: np.abs(x - y).max() / max(np.abs(y).max(), least), found, gradients)
        return [float(abs(loss / expected - 1)), float(max(jax.tree.leaves(apart)))]

    return [compare(mesh) for mesh in MESHES]


def figures(devices, config, rows, length, axis, accumulation=1):
    """Returns the bytes of temporary buffers and the operations of a compiled step, on each device."""
    mesh = make_mesh(MeshConfig(**{"data": 1, axis: devices}), rows // accumulation)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=NamedSharding(mesh, BATCH))
    tx, batch = optimizer(OptimizerConfig(), 10), {"tokens": ids, "labels": ids}
    training = TrainingConfig(batch_size=rows, accumulation=accumulation)
    compiled = prepare(transformer(config), tx, mesh, training, batch).step.compile()
    return compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis()["flops"]


def decoding_bytes():
    """Returns the bytes of the parameters, and of the temporary buffers of the loop that chooses tokens."""
    net, found, advance = transformer(LONG["figures"][0]), [], generate.advance
    shardings = parameter_shardings(make_mesh(MeshConfig(data=1, fsdp=8)), net.shapes)
    params = jax.jit(net.init, out_shardings=shardings)(jax.random.key(0))

    def watch(*given):
        found.append(advance.lower(*given).compile().memory_analysis().temp_size_in_bytes)
        return advance(*given)

    with patch.object(generate, "advance", watch):
        generate.generate(net, params, [[5, 6, 7]] * 8, DecodingConfig(4))
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params)), max(found)


if __name__ == "__main__":
    if sys.argv[1] == "decoding":
        print(json.dumps(decoding_bytes()))
    elif sys.argv[1] in LONG:
        print(json.dumps([figures(devices, *LONG[sys.argv[1]]) for devices in (1, 2, 4, 8)]))
    else:
        jax.config.update("jax_enable_x64", True)
        print(json.dumps(differences(sys.argv[1])))
