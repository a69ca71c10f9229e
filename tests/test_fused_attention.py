"""Attention as one kernel gives what the plain computation gives, and says where it cannot."""

from dataclasses import fields, replace
from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import pallas

from jax_tformer import ComputeConfig, transformer
from jax_tformer.model.attention import attend_by
from jax_tformer.model.fast import READS, choose_implementation
from jax_tformer.model.masks import Mask
from tests.refusals import refused
from tests.several_processes import run_alone
from tests.small_models import GPT

BATCH, LENGTH, HEADS, WIDTH = 4, 384, 6, 64
"""384 makes the TPU kernel take three blocks of keys in turn. Six heads that share three would show it if they shared
them by turns, and not in groups."""

WHOLE = (BATCH, LENGTH, HEADS, WIDTH)


def draw(*shapes, dtype="float32"):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def padding(length):
    """Rows without padding, with it on the right, on the left (a whole block and more), and with nothing else."""
    tokens = np.ones((BATCH, length), bool)
    tokens[1, length - 37 :] = False
    tokens[2, : length // 2 - 5] = False
    tokens[3] = False
    return jnp.asarray(tokens)


def attended(implementation, inputs, mask, dtype="float32"):
    """The output in `dtype`, and what a random gradient of it makes of query, key and value; all as float32."""
    *arrays, gradient = (x.astype(dtype) for x in inputs)

    @jax.jit
    def compute(*arrays):
        output, pull = jax.vjp(lambda *x: attend_by(implementation, *x, mask, WIDTH**-0.5)[0], *arrays)
        return output, *pull(gradient)

    found = [np.asarray(x, np.float32) for x in compute(*arrays)]
    allowed = mask.boolean(LENGTH, inputs[1].shape[1])
    if allowed is not None:
        blind = ~np.broadcast_to(allowed.any(axis=3)[:, 0], (BATCH, LENGTH))
        assert not found[0][blind].any(), "what sees nothing gets zeros"
    return found


def largest_difference(implementation, key_heads, keys, *, masked, causal, segments=None):
    """Of outputs and gradients from those of "einsum", which for normal inputs are of order 1."""
    shared = (BATCH, keys, key_heads, WIDTH)
    mask = Mask(causal=causal, is_token=padding(keys) if masked else None, segments=segments)
    plain, fused = (attended(by, draw(WHOLE, shared, shared, WHOLE), mask) for by in ("einsum", implementation))
    # NumPy's maximum, which a NaN does not slip through.
    return float(np.max([np.abs(a - b).max() for a, b in zip(fused, plain, strict=True)]))


TEXTS = jnp.broadcast_to(jnp.arange(LENGTH) // 100, (BATCH, LENGTH))
OTHERS = jnp.broadcast_to(2 * (jnp.arange(256) // 150), (BATCH, 256))


@pytest.mark.parametrize(
    "causal, masked, key_heads, keys, segments",
    [
        (True, False, 3, LENGTH, None),
        (True, True, 1, LENGTH, None),
        (False, True, 3, 256, None),
        (False, False, 6, 256, None),
        # Several texts in a row; across two sequences, some find no text of their number.
        (False, False, 6, 256, (TEXTS, OTHERS)),
        pytest.param(True, True, 6, LENGTH, (TEXTS, TEXTS), marks=pytest.mark.deep),
    ],
)
def test_fused_attention_is_attention(causal, masked, key_heads, keys, segments, monkeypatch):
    """The TPU kernel is interpreted here, block by block."""
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    found = largest_difference("pallas", key_heads, keys, masked=masked, causal=causal, segments=segments)
    assert found < 2e-5


@pytest.mark.parametrize(
    "key_heads, keys, mask",
    [
        (3, LENGTH, Mask(causal=True)),
        (6, LENGTH, Mask(causal=True, window=100)),
        (1, LENGTH, Mask(causal=True, is_token=padding(LENGTH))),
        (3, LENGTH, Mask(causal=True, is_token=padding(LENGTH), window=100)),
        (6, LENGTH, Mask(causal=True, segments=(TEXTS, TEXTS))),
        (3, 256, Mask(is_token=padding(256))),
        (6, 256, Mask()),
        (6, 256, Mask(segments=(TEXTS, OTHERS))),
    ],
)
def test_cudnns_attention_is_attention(key_heads, keys, mask):
    """In bfloat16 it is as near to float32 as the plain formula in bfloat16."""
    if jax.default_backend() != "gpu":
        pytest.skip("cuDNN needs a GPU")
    shared = (BATCH, keys, key_heads, WIDTH)
    inputs = draw(WHOLE, shared, shared, WHOLE, dtype="bfloat16")
    exact = attended("einsum", inputs, mask)
    plain, fused = (attended(by, inputs, mask, "bfloat16") for by in ("einsum", "cudnn"))
    for name, *found in zip(("output", "query", "key", "value"), exact, plain, fused, strict=True):
        expected, allowed, error = found[0], *(np.linalg.norm(x - found[0]) for x in found[1:])
        assert np.isfinite(error), name
        assert error <= 1.5 * allowed, (name, error / np.linalg.norm(expected), allowed / np.linalg.norm(expected))


BIAS, KEEP = jnp.zeros((1, 1, 128, 128)), jnp.ones((1, 2, 128, 128), bool)
CAUSAL = Mask(causal=True)


@pytest.mark.parametrize(
    "implementations, length, given, parts, message",
    [
        (["cudnn"], 128, [CAUSAL, 1.0], 1, "which cannot compute this here"),
        (["pallas"], 100, [CAUSAL, 1.0], 1, "for lengths that 128 divides, and these are 100 and 100"),
        (["cudnn", "pallas"], 128, [CAUSAL, 1.0, 0.5, KEEP], 1, "which cannot drop"),
        (["cudnn", "pallas"], 128, [Mask(causal=True, bias=BIAS), 1.0], 1, "which cannot take the bias of a mask"),
        (["cudnn", "pallas"], 128, [CAUSAL, 1.0], 2, "which computes no rows split over devices .--mesh.context.; "),
    ],
)
def test_what_a_kernel_cannot_compute_is_said_in_one_line(implementations, length, given, parts, message):
    if message.endswith("this here") and jax.default_backend() == "gpu":
        pytest.skip("cuDNN can compute this")
    arrays = [jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)] * 3
    for implementation in implementations:
        with (
            jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1, 1, parts), ("data", "fsdp", "context"))),
            refused(f"attention is '{implementation}',? {message}"),
        ):
            jax.eval_shape(lambda *arrays, by=implementation: attend_by(by, *arrays, *given), *arrays)


@pytest.mark.parametrize("field", [field.name for field in fields(Mask)])
def test_auto_leaves_a_kernel_what_it_reads_of_a_mask_alone(field):
    """So that a kernel does not pass over a field that comes later."""
    shape = (1, 128, 2, 64)
    for platform, kernel in (("gpu", "cudnn"), ("tpu", "pallas")):
        with patch("jax_tformer.model.fast.capability", lambda: 9.0):
            object.__setattr__(mask := Mask(), field, "something")
            chosen = choose_implementation(platform, jnp.dtype("bfloat16"), shape, shape, mask, drops=False)
        assert chosen == (kernel if field in READS[kernel] else "einsum")


ON_EIGHT_DEVICES = """
import dataclasses
from functools import partial
import jax
from jax.experimental import pallas
pallas.pallas_call = partial(pallas.pallas_call, interpret=True)
from jax_tformer.config.experiment import MeshConfig
from jax_tformer.model.fast import choose_implementation
from benchmarks.training_cases import without_dropout
from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.model.masks import Mask
from jax_tformer.config.errors import InputError
from jax_tformer.model.attention import attend_by
from jax_tformer.training.sharding import make_mesh
from jax_tformer.training import prepare
from tests.test_fused_attention import WHOLE, largest_difference

choose = lambda: choose_implementation("tpu", jax.numpy.dtype("bfloat16"), WHOLE, WHOLE, Mask(causal=True), drops=False)
assert choose() == "einsum", "nobody says how the kernel is to be split"
with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), 4)):
    assert choose() == "pallas"
    # What a run says of itself.
    prepare.choose_implementation = lambda _, *given, **options: choose_implementation("tpu", *given, **options)
    described = prepare.describe_compute(ARCHITECTURES["gpt2"].with_vocab_size(64), jax.sharding.get_mesh(), 384)
    assert "attention 'einsum'" in described, "dropout of attention weights"
    plain = without_dropout(ARCHITECTURES["gpt2"])
    assert "attention 'pallas'" in prepare.describe_compute(plain, jax.sharding.get_mesh(), 384)
    windows = dataclasses.replace(plain.decoder, window=9, window_layers=(True, False))
    other = dataclasses.replace(plain, decoder=windows)
    assert "'einsum and pallas'" in prepare.describe_compute(other, jax.sharding.get_mesh(), 384), "by the layer"
    for switch in ({"score_cap": 50.0}, {"positions": "relative"}):
        other = dataclasses.replace(plain, decoder=dataclasses.replace(plain.decoder, **switch))
        assert "attention 'einsum'" in prepare.describe_compute(other, jax.sharding.get_mesh(), 384), switch
    try:
        attend_by("pallas", *[jax.numpy.ones((3, 128, 2, 64))] * 3, Mask(), 1.0)
    except InputError as error:
        refused = str(error)
    assert refused == (
        "attention is 'pallas' for 3 rows over 4 devices (data x fsdp); expected a multiple of 4, or 'auto' or 'einsum'"
    )
    # With a single head of keys the heads stay together.
    for heads, masked in ((1, False), (1, True), (2, False), (2, True)):
        print(largest_difference("pallas", heads, 384, masked=masked, causal=True))
"""


@pytest.mark.deep
def test_devices_share_the_tpu_kernel():
    output, _ = run_alone(["-c", ON_EIGHT_DEVICES], 8)
    differences = [float(word) for word in output.split()]
    assert len(differences) == 4
    assert max(differences) < 2e-5


@pytest.mark.parametrize("remat, runs", [("none", 1), ("dots", 1), ("full", 2)])
def test_what_is_kept_of_cudnns_kernel(remat, runs, monkeypatch):
    """How often it computes a layer's attention, in a program that is lowered for a GPU and not compiled."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    compute = ComputeConfig(dtype="bfloat16", attention="cudnn", remat=remat)
    net = transformer(replace(GPT, d_model=128, compute=compute))
    gradients = jax.jit(jax.grad(lambda params, tokens: net.apply(params, tokens).sum().astype(jnp.float32)))
    traced = gradients.trace(net.shapes, jax.ShapeDtypeStruct((2, 64), jnp.int32))
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("@__cudnn$fmhaSoftmaxBackward") == 1
    assert program.count("@__cudnn$fmhaSoftmax") == runs + 1
