"""What "auto" becomes, how steps are compiled, and what a program's start does."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config import ComputeConfig, DropoutConfig, Remat, StackConfig, TransformerConfig
from jax_tformer.config.experiment import MeshConfig, OptimizerConfig
from jax_tformer.functional import transformer
from jax_tformer.runs.preparing import choose_remat, compile_beside, describe_compute, fit_to_devices, kept_bytes
from jax_tformer.runs.startup import FLOAT64, OPTIONS, compiler_options
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.sharding import make_mesh
from jax_tformer.training.step import evaluation_step, init_state, train_step

STACK = StackConfig(num_layers=4, num_heads=4, feedforward_width=64, norm_placement="pre")
CONFIG = TransformerConfig(vocab_size=64, d_model=16, decoder=STACK)
ROWS = np.zeros((8, 32), np.int32)
BATCH = {"tokens": ROWS, "labels": ROWS}
PART = {name: jax.ShapeDtypeStruct(rows.shape, rows.dtype) for name, rows in BATCH.items()}


def with_remat(remat: Remat) -> TransformerConfig:
    return dataclasses.replace(CONFIG, compute=ComputeConfig(remat=remat))


def test_less_is_kept_the_more_is_computed_again() -> None:
    none, dots, full = (kept_bytes(transformer(with_remat(remat)), PART) for remat in ("none", "dots", "full"))
    # Of every layer "full" keeps its input, "dots" also queries, keys, values, attention, projections and activations.
    token = 4 * ROWS.size * STACK.num_layers
    assert full >= token * 16
    assert dots - full == pytest.approx(token * (5 * 16 + 64), rel=0.05)
    assert none > 1.5 * dots


def test_remat_follows_from_the_memory() -> None:
    weights = 16 * sum(leaf.size for leaf in jax.tree.leaves(transformer(CONFIG).shapes))
    none, dots = (kept_bytes(transformer(with_remat(remat)), PART) for remat in ("none", "dots"))
    limits = {1.01 * (weights + none): "none", 0.99 * (weights + none): "dots", 0.99 * (weights + dots): "full"}
    for needed, expected in limits.items():
        assert choose_remat(CONFIG, PART, int(needed / 0.8), 1, 1) == expected
    # Over two devices by rows and two by weights, half of each is enough.
    assert choose_remat(CONFIG, PART, int(1.01 * (weights + none) / 2 / 0.8), 2, 2) == "none"
    assert choose_remat(CONFIG, PART, None, 1, 1) == "dots"


def test_what_auto_becomes_on_a_processor() -> None:
    mesh = make_mesh(MeshConfig(data=1), 8)
    fitted = fit_to_devices(CONFIG, BATCH, mesh, 2)
    assert fitted == with_remat("dots")
    assert describe_compute(fitted, mesh, 32) == "float32, attention 'blocks', remat 'dots'"
    assert fit_to_devices(with_remat("full"), BATCH, mesh, 1) == with_remat("full")


@pytest.mark.parametrize("options", [*OPTIONS.values(), *FLOAT64.values(), compiler_options(once=True)])
def test_the_compiler_knows_its_options(options: dict[str, bool | int | str]) -> None:
    assert jax.jit(lambda x: x + 1, compiler_options=options)(jnp.ones(())) == 2
    with pytest.raises(Exception, match="xla_no_such_option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_no_such_option": True})(jnp.ones(()))


@pytest.mark.parametrize(("dtype", "fused"), [("float32", True), ("float64", False)])
def test_float64_does_without_the_fusions_that_read_what_nobody_wrote(dtype: str, fused: bool) -> None:
    """docs/known-issues.md; that float32 has them shows that the test can see them."""

    def centred(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.nn.relu((x - x.mean(-1, keepdims=True)) @ kernel)

    with jax.enable_x64(True):
        x, kernel = jnp.ones((64, 32), dtype), jnp.ones((32, 48), dtype)
        compiled = jax.jit(centred, compiler_options=compiler_options(dtype)).lower(x, kernel).compile()
    assert ("__ynn_fusion" in compiled.as_text()) == fused


def test_programs_pass_parameters_as_arguments() -> None:
    """Those that are closed over would be constants of the program, with which these fusions go wrong."""
    net = transformer(dataclasses.replace(CONFIG, dropout=DropoutConfig(0.1, 0.1, 0.1, 0.1)))
    tx = optimizer(OptimizerConfig(), 10)
    state = jax.eval_shape(lambda: init_state(net, tx, jax.random.key(0)))
    tokens = jnp.zeros((2, 5), jnp.int32)
    batch = {"tokens": tokens, "labels": tokens}
    params = net.init(jax.random.key(0))

    def matrices(program: Callable[..., Any], *arguments: Any) -> list[Any]:
        constants = jax.make_jaxpr(program)(*arguments).consts
        return [c for c in constants if jnp.ndim(c) > 1 and jnp.issubdtype(jnp.result_type(c), jnp.floating)]

    assert matrices(train_step(net, tx, accumulation=2), state, batch) == []
    assert matrices(evaluation_step(net), params, batch) == []
    assert matrices(net.apply, params, tokens) == []
    assert matrices(lambda tokens: net.apply(params, tokens), tokens) != []


INITIALISED = """
import jax, numpy as np
from jax_tformer.runs.startup import compiler_options
from jax_tformer.functional import transformer
from jax_tformer.config.presets import EXPERIMENTS

for name in ("python-docs", "dates"):
    net = transformer(EXPERIMENTS[name].config.model.with_vocab_size(64))
    ways = ({}, compiler_options(once=True))
    found = [jax.jit(net.init, compiler_options=options)(jax.random.key(0)) for options in ways]
    jax.tree.map(np.testing.assert_array_equal, *found)
"""


@pytest.mark.deep
def test_what_is_compiled_to_run_once_computes_the_same_bits() -> None:
    # In a process that compiles as programs do, and not as tests.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", INITIALISED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compiled_beside_other_work() -> None:
    function = jax.jit(lambda x, y: x @ y)
    shape = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    x = jnp.arange(9.0).reshape(3, 3)
    np.testing.assert_array_equal(compile_beside(function.lower(shape, shape)).result()(x, x), x @ x)
    refused = jax.jit(lambda x: x + 1, compiler_options={"xla_no_such_option": True}).lower(shape)
    with pytest.raises(Exception, match="xla_no_such_option"):
        compile_beside(refused).result()


HUGE, KEEP = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, "MALLOC_TRIM_THRESHOLD_"
