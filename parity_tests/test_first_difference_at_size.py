"""`first_difference` of models whose weights are not widened before they are used, and of what float32 has rounded."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from parity import first_difference
from parity.differ import jax_values, traced_sides, values
from parity_tests.localisation import located
from parity_tests.other_pairs.faults import FAULTS
from parity_tests.small_modules import Module, numbers

pytestmark = pytest.mark.usefixtures("as_others_write")
LAYERS, WIDTH, HEADS, GROUPS, LENGTH, VOCABULARY = 3, 32, 4, 2, 24, 96
NAMES = {
    "before": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "after": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
WEIGHTS = {"table": "model.embed_tokens.weight", "norm": "model.norm.weight"} | {
    f"{name}_{n}": f"model.layers.{n}.{path}.weight" for name, path in NAMES.items() for n in range(LAYERS)
}
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH))


@pytest.fixture
def large(monkeypatch):
    """Every model counts as one of billions of weights."""
    monkeypatch.setattr(sys.modules["parity.differ.first_difference"], "_LARGE", 0)
    monkeypatch.setattr(jax_values, "_LARGEST", 0)


def llama(scale):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        initializer_range=scale,
        rope_theta=10000.0,
        attn_implementation="eager",
    )
    module = LlamaForCausalLM(config)
    for parameter in module.parameters():  # the frequencies of rotation stay in float32, as where a file is loaded
        parameter.data = parameter.data.bfloat16()
    return module


def ours(activation, angles):
    """Llama as it is written in JAX, with this activation in its second layer, and these angles of rotation."""

    def norm(weight, x):
        wide = x.astype(jnp.float32)
        return weight * (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def split(x, heads):
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)

    def rotated(x):
        a, b = jnp.split(x, 2, -1)
        there = jnp.concatenate((-b, a), -1)
        return x * jnp.cos(angles()).astype(x.dtype) + there * jnp.sin(angles()).astype(x.dtype)

    def forward(p, ids):
        x = p["table"][ids]
        seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        for n in range(LAYERS):
            h = norm(p[f"before_{n}"], x)
            q = rotated(split(h @ p[f"query_{n}"].T, HEADS))
            k = jnp.repeat(rotated(split(h @ p[f"key_{n}"].T, GROUPS)), HEADS // GROUPS, 1)
            v = jnp.repeat(split(h @ p[f"value_{n}"].T, GROUPS), HEADS // GROUPS, 1)
            scores = jnp.where(seen, q @ k.swapaxes(2, 3) * (WIDTH // HEADS) ** -0.5, -1e30)
            mixed = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype) @ v
            x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ p[f"out_{n}"].T
            h = norm(p[f"after_{n}"], x)
            act = activation if n == 1 else jax.nn.silu
            x = x + (act(h @ p[f"gate_{n}"].T) * (h @ p[f"up_{n}"].T)) @ p[f"down_{n}"].T
        return norm(p["norm"], x) @ p["table"].T

    return forward


def angles(numpy=jnp, base=10000.0):
    """Of every place, by numpy in float64 or by JAX in float32."""
    steps = numpy.arange(0, WIDTH // HEADS, 2, dtype=numpy.float32 if numpy is jnp else float) / (WIDTH // HEADS)
    found = numpy.arange(LENGTH, dtype=steps.dtype)[:, None] / base**steps
    return jnp.concatenate((found, found), -1)


def asked(ours, theirs):
    return first_difference(ours, theirs, WEIGHTS, [IDS], backward=False)


def test_a_fault_in_a_large_model_is_found_with_its_weights_as_they_are(large):
    module = llama(0.2).train()
    found = asked(ours(jax.nn.gelu, angles), module)
    assert found.confirmed
    assert found.kind == "another activation: GELU (tanh) in ours, SiLU in theirs"
    assert found.theirs.module == "model.layers.1.mlp.act_fn"
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert all(part.training for part in module.modules())


def test_a_large_model_runs_a_few_times_however_many_experiments_are_made(large, monkeypatch):
    """No number is kept unasked here, and no kind is known that proves the difference."""
    monkeypatch.setattr(values, "_ROOM", 0)
    runs = []
    for side in ("run_ours", "run_theirs"):
        run = getattr(traced_sides.Sides, side)

        def counted(*args, run=run, **more):
            runs.append(run)
            return run(*args, **more)

        monkeypatch.setattr(traced_sides.Sides, side, counted)
    found = asked(ours(lambda x: x, angles), llama(0.2))
    assert found.confirmed
    assert found.theirs.module == "model.layers.1.mlp.act_fn"
    assert len(runs) <= 30


@pytest.mark.parametrize("numpy", [jnp, np], ids=["in float32", "in float64"])
@pytest.mark.parametrize("scale", [0.02, 0.2])
def test_a_table_that_float32_rounded_is_no_difference(numpy, scale, large):
    """A port of Llama is right whatever digits its frequencies have, and PyTorch keeps those of its own in float32."""
    found = asked(ours(jax.nn.silu, lambda: angles(numpy)), llama(scale))
    assert not found
    assert found.rounded


def test_a_table_of_two_numbers_may_be_rounded_too():
    """A class weight of a tenth, which PyTorch keeps in float32."""

    theirs = Module(
        lambda self, x: torch.log_softmax(self.linear(x), -1) * self.weight,
        linear=lambda: nn.Linear(4, 5),
        weight=lambda: nn.Buffer(torch.tensor([1.0] * 4 + [0.1])),
    )

    def found(tenth):
        def weighted(p, x):
            return jax.nn.log_softmax(x @ p["kernel"].T + p["bias"]) * jnp.ones(5).at[4].set(tenth)

        weights = {"kernel": "linear.weight", "bias": "linear.bias"}
        return first_difference(weighted, theirs, weights, [numbers(3, 4)])

    assert not found(0.1)
    assert found(0.1001)


@pytest.mark.parametrize("scale", [0.02, 0.2])
def test_a_difference_that_grows_through_the_bar_is_not_said_to_begin_there(scale):
    """Another base by one in ten thousand: with small weights it takes layers to be seen at all."""
    found = asked(ours(jax.nn.silu, lambda: angles(np, 10001.0)), llama(scale))
    assert found
    assert not found.sure or "rotary_emb" in found.theirs.module


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.stage == "forward" and fault.side in ("ours", "theirs")][::6], ids=str
)
def test_faults_in_large_models_are_named_as_in_others(fault, large):
    assert located(fault).verdict == "right"
