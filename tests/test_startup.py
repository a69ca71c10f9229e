"""What a program's start does: options of the compiler, the device, the cache of compiled programs."""

import dataclasses
import os
import warnings

import jax
import jax.numpy as jnp
import pytest

from jax_tformer import EXPERIMENTS, DropoutConfig, startup, transformer
from jax_tformer.config.experiment import OptimizerConfig
from jax_tformer.startup import FLOAT64, OPTIONS, compiler_options
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import init_state, train_step
from tests.refusals import refused
from tests.several_processes import run_alone
from tests.small_models import GPT


@pytest.mark.parametrize("options", [*OPTIONS.values(), *FLOAT64.values(), compiler_options(once=True)])
def test_the_compiler_knows_its_options(options):
    assert jax.jit(lambda x: x + 1, compiler_options=options)(jnp.ones(())) == 2
    with pytest.raises(Exception, match="xla_no_such_option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_no_such_option": True})(jnp.ones(()))


@pytest.mark.parametrize("dtype, fused", [("float32", True), ("float64", False)])
def test_float64_does_without_the_fusions_that_read_what_nobody_wrote(dtype, fused):
    """docs/known-issues.md; that float32 has them shows that the test can see them."""

    def centred(x, kernel):
        return jax.nn.relu((x - x.mean(-1, keepdims=True)) @ kernel)

    with jax.enable_x64(True):
        x, kernel = jnp.ones((64, 32), dtype), jnp.ones((32, 48), dtype)
        compiled = jax.jit(centred, compiler_options=compiler_options(dtype)).lower(x, kernel).compile()
    assert ("__ynn_fusion" in compiled.as_text()) == fused


def test_programs_pass_parameters_as_arguments():
    """Those that are closed over would be constants of the program, with which these fusions go wrong.

    A training step has the loss in it, but not what makes logits.
    """
    net = transformer(dataclasses.replace(GPT, dropout=DropoutConfig(0.1, 0.1, 0.1, 0.1)))
    tx, tokens, params = optimizer(OptimizerConfig(), 10), jnp.zeros((2, 5), jnp.int32), net.init(jax.random.key(0))
    state, batch = jax.eval_shape(lambda: init_state(net, tx, jax.random.key(0))), {"tokens": tokens, "labels": tokens}

    def has_matrices(program, *arguments):
        return any(jnp.ndim(constant) > 1 for constant in jax.make_jaxpr(program)(*arguments).consts)

    assert not has_matrices(train_step(net, tx, accumulation=2), state, batch)
    assert not has_matrices(net.apply, params, tokens)
    assert has_matrices(lambda tokens: net.apply(params, tokens), tokens)


INITIALISED = """
import jax, numpy as np
from jax_tformer.startup import compiler_options
from jax_tformer.functional import transformer
from jax_tformer.config.presets import EXPERIMENTS

for name in ("python-docs", "dates"):
    net = transformer(EXPERIMENTS[name].config.model.with_vocab_size(64))
    ways = ({}, compiler_options(once=True))
    found = [jax.jit(net.init, compiler_options=options)(jax.random.key(0)) for options in ways]
    jax.tree.map(np.testing.assert_array_equal, *found)
"""


@pytest.mark.deep
def test_what_is_compiled_to_run_once_computes_the_same_bits(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    run_alone(["-c", INITIALISED])


UNKNOWN = "Backend 'rocm' is not in the list of known backends: ['cpu', 'tpu']."


@pytest.mark.parametrize(
    "platforms, error, said",
    [
        ("", RuntimeError("Unable to initialize backend 'cuda': none\nhere"), "there is no such device here"),
        ("", AssertionError(), "there is no such device here"),
        # What JAX says of "gpu" is about another name, rocm, in nested brackets.
        (
            "gpu",
            RuntimeError(f"Unable to initialize backend 'rocm': {UNKNOWN} (set ...)"),
            "^JAX_PLATFORMS is 'gpu', and",
        ),
    ],
)
def test_a_platform_that_is_not_there(platforms, error, said, monkeypatch):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    with refused(said):
        startup.set_up_jax(EXPERIMENTS["dates"].config.model)


@pytest.mark.parametrize(
    "flags, before, after",
    [
        ("--xla_force_host_platform_device_count=100", None, "400"),
        ("--xla_force_host_platform_device_count=100", "7", "7"),
        ("--xla_force_host_platform_device_count=1", None, None),
        ("", None, None),
    ],
)
def test_cpu_devices_get_threads_to_wait_in(flags, before, after, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(os, "environ", {name: x for name, x in os.environ.items() if name != "PJRT_NPROC"})
    if before:
        os.environ["PJRT_NPROC"] = before
    startup.set_up_jax(EXPERIMENTS["dates"].config.model)
    assert os.environ.get("PJRT_NPROC") == after


DAMAGED_CACHE = """
import sys
import warnings
from pathlib import Path
import jax
from jax_tformer.config.presets import EXPERIMENTS
from jax_tformer.startup import set_up_jax

set_up_jax(EXPERIMENTS["dates"].config.model)
folder = Path(sys.argv[1]) / "jax-tformer"

def compile_anew():
    jax.clear_caches()
    for name in ("first", "second"):
        def f(x):
            return x + 1
        f.__name__ = name
        assert jax.jit(f)(1) == 2
    return {path.name: path.read_bytes() for path in folder.glob("*-cache")}

whole = compile_anew()
assert {name.split("-")[0] for name in whole} >= {"jit_first", "jit_second"}
for name in whole:
    (folder / name).write_bytes(whole[name][:20])
again = compile_anew()
assert again.keys() == whole.keys() and all(len(again[name]) > 20 for name in again)
print("mended", file=sys.stderr)
assert compile_anew() == again
"""


def test_damaged_compiled_programs_are_replaced_with_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, errors = run_alone(["-c", DAMAGED_CACHE, tmp_path])
    assert errors == "compiled programs in the cache were damaged; they are compiled anew\nmended\n"


def test_a_cache_that_cannot_be_had_is_not_called_damaged_and_other_warnings_are_shown(tmp_path, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *where, **more: shown.append(str(message)))
    show = startup._CacheWarnings(tmp_path)
    show("Error reading persistent compilation cache entry for 'jit_step': OSError: here", UserWarning, "file", 1)
    show("something else", UserWarning, "file", 1)
    assert capsys.readouterr().err == f"compiled programs cannot be kept in {tmp_path}: OSError: here\n"
    assert shown == ["something else"]


KEPT = """
import resource, sys
from types import SimpleNamespace
import numpy
from jax_tformer.startup import keep_freed_memory, set_malloc
set_malloc(M_ARENA_MAX=1)
needs = SimpleNamespace(temp_size_in_bytes=int(sys.argv[1]) << 20)
keep_freed_memory(SimpleNamespace(memory_analysis=lambda: needs))
for turn in range(20):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    numpy.ones(1 << 22)
assert (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > 1000) == int(sys.argv[2])
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="needs glibc")
@pytest.mark.parametrize(
    "megabytes, threshold, faults_again",
    # A small step, a large one, and what the user has tuned.
    [(64, None, 0), (1024, None, 1), (64, "65536", 1)],
)
def test_small_steps_keep_freed_memory(megabytes, threshold, faults_again, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    if threshold is not None:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", threshold)
    monkeypatch.setenv("NUMPY_MADVISE_HUGEPAGE", "0")
    run_alone(["-c", KEPT, megabytes, faults_again])
