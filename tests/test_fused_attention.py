"""Attention as one kernel gives what the plain computation gives, and says where it cannot."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from jax_tformer.config import AttentionImplementation
from jax_tformer.errors import InputError
from jax_tformer.nn.attention import attend
from jax_tformer.nn.fused_attention import choose_implementation

BATCH, LENGTH, HEADS, WIDTH = 4, 384, 2, 64
"""384 makes the TPU kernel take three blocks of keys in turn."""

WHOLE = (BATCH, LENGTH, HEADS, WIDTH)


def draw(*shapes: tuple[int, ...], dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def padding(length: int) -> jax.Array:
    """Rows without padding, with it on the right, on the left (a whole block and more), and with nothing else."""
    tokens = np.ones((BATCH, length), bool)
    tokens[1, length - 37 :] = False
    tokens[2, : length // 2 - 5] = False
    tokens[3] = False
    return jnp.asarray(tokens)[:, None, None]


def output_and_gradients(
    implementation: AttentionImplementation, inputs: list[jax.Array], mask: jax.Array | None, causal: bool
) -> tuple[jax.Array, ...]:
    """The output, and what a random gradient of it makes of query, key and value."""
    *arrays, gradient = inputs

    @jax.jit
    def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        def attended(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return attend(query, key, value, mask, causal=causal, scale=WIDTH**-0.5, implementation=implementation)

        output, pull = jax.vjp(attended, *arrays)
        return (output, *pull(gradient))

    return compute(*arrays)


def largest_difference(
    implementation: AttentionImplementation, key_heads: int, keys: int, *, masked: bool, causal: bool
) -> float:
    """Of outputs and gradients from those of "einsum", which for normal inputs are of order 1."""
    shared = (BATCH, keys, key_heads, WIDTH)
    inputs, mask = draw(WHOLE, shared, shared, WHOLE), padding(keys) if masked else None
    plain = output_and_gradients("einsum", inputs, mask, causal)
    fused = output_and_gradients(implementation, inputs, mask, causal)
    if masked:
        assert not any(array[3].any() for array in fused), "a row of padding has neither output nor gradients"
    # NumPy's maximum, which a NaN does not slip through.
    return float(np.max([jnp.abs(a - b).max() for a, b in zip(fused, plain, strict=True)]))


@pytest.mark.parametrize(
    ("causal", "masked", "key_heads", "keys"),
    [(True, False, 2, LENGTH), (True, True, 1, LENGTH), (False, True, 2, 256), (False, False, 1, 256)],
)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_fused_attention_is_attention(
    implementation: AttentionImplementation,
    causal: bool,
    masked: bool,
    key_heads: int,
    keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The TPU kernel is interpreted here, block by block."""
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    assert largest_difference(implementation, key_heads, keys, masked=masked, causal=causal) < 2e-5


@pytest.mark.parametrize(
    ("implementation", "length", "dtype", "message"),
    [
        ("cudnn", 128, "bfloat16", "attention is 'cudnn', which cannot compute this here"),
        ("xla", 128, "float64", "attention is 'xla', whose softmax runs in float32; for float64 expected"),
        ("pallas", 100, "float32", "attention is 'pallas', for lengths that 128 divides, and these are 100 and 100"),
    ],
)
def test_what_a_kernel_cannot_compute_is_said_in_one_line(
    implementation: AttentionImplementation, length: int, dtype: str, message: str
) -> None:
    if implementation == "cudnn" and jax.default_backend() == "gpu":
        pytest.skip("cuDNN can compute this")
    with jax.enable_x64(dtype == "float64"):
        query, key, value = draw(*[(1, length, 2, 64)] * 3, dtype=dtype)
        with pytest.raises(InputError, match=message) as raised:
            attend(query, key, value, None, causal=True, scale=1.0, implementation=implementation)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("implementation", ["xla", "cudnn", "pallas"])
def test_no_kernel_drops_attention_weights(implementation: AttentionImplementation) -> None:
    query, key, value = draw(*[(1, 128, 2, 64)] * 3)
    keep = jnp.ones((1, 2, 128, 128), bool)
    with pytest.raises(InputError, match=f"attention is '{implementation}', which cannot drop") as raised:
        attend(query, key, value, None, causal=True, scale=1.0, keep=keep, implementation=implementation)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("devices", "choice"), [(1, "pallas"), (4, "einsum")])
def test_the_tpu_kernel_is_for_one_device(devices: int, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    assert choose_implementation("tpu", jnp.dtype("bfloat16"), WHOLE, WHOLE, drops=False) == choice
