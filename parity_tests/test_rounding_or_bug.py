"""`parity.explain` in bfloat16 and float32: bugs smaller than the noise, digits that are lost, and noise alone."""

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import parity
from parity.differ import jax_values
from parity_tests.small_modules import Module

CONFIG = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=96, n_positions=64, bos_token_id=0, eos_token_id=0)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 48))


def logits():
    return Module(lambda self, tokens: self.model(tokens).logits, model=lambda: GPT2LMHeadModel(CONFIG))


def norm(weights, x, fault):
    dtype, x = x.dtype, x if fault == "norms in their type" else x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    if fault == "variance by N - 1":
        variance = variance * (64 / 63)
    y = centred * jax.lax.rsqrt(variance + (1e-6 if fault == "epsilon" else 1e-5))
    return (y * weights["weight"] + weights["bias"]).astype(dtype)


def attention(weights, x, fault):
    def heads(x):
        return x.reshape(*x.shape[:2], 4, 16).swapaxes(1, 2)

    query, key, value = map(heads, jnp.split(linear(weights["c_attn"], x), 3, -1))
    if fault == "products in float32":
        scores = jnp.einsum("bhqc,bhkc->bhqk", query, key, preferred_element_type=jnp.float32).astype(x.dtype)
    else:
        scores = query @ key.swapaxes(-1, -2)
    scores = scores / (4.004 if fault == "scale" else 4)
    scores = jnp.where(jnp.tril(jnp.ones((48, 48), bool), int(fault == "mask")), scores, jnp.finfo(scores.dtype).min)
    scores = scores if fault == "softmax in its type" else scores.astype(jnp.float32)
    probabilities = jax.nn.softmax(scores, -1).astype(x.dtype)
    if fault == "probabilities of 4 bits":
        probabilities = jax.lax.reduce_precision(probabilities, 8, 3)
    mixed = (probabilities @ value).swapaxes(1, 2).reshape(x.shape)
    return linear(weights["c_proj"], mixed)


def linear(weights, x):
    return x @ weights["weight"] + weights["bias"]


def model(fault):
    @jax.numpy_rank_promotion("allow")
    def ours(params, tokens):
        weights = params["model"]["transformer"]
        x = weights["wte"]["weight"][tokens] + weights["wpe"]["weight"][jnp.arange(48) + (fault == "position")]
        dtype, x = x.dtype, x.astype(jnp.float32) if fault == "residual stream in float32" else x
        if fault == "stream of 3 bits":
            x = jax.lax.reduce_precision(x, 8, 2)
        for block in weights["h"].values():
            x = x + attention(block["attn"], norm(block["ln_1"], x, fault).astype(dtype), fault)
            y = linear(block["mlp"]["c_fc"], norm(block["ln_2"], x, "").astype(dtype))
            y = jax.nn.gelu(y, approximate=fault != "gelu")
            x = x + linear(block["mlp"]["c_proj"], y) * (1.001 if fault == "factor" else 1)
        x = norm(weights["ln_f"], x, "").astype(dtype)
        table = weights["wte"]["weight"]
        if fault == "table in bfloat16":
            table = table.astype(jnp.bfloat16).astype(dtype)
        return jnp.matmul(x, table.T, preferred_element_type=jnp.float32 if fault == "logits in float32" else None)

    return ours


BUGS = ["epsilon", "variance by N - 1", "scale", "mask", "position", "gelu", "factor"]
RIGHT = [
    *("", "norms in their type", "softmax in its type", "products in float32", "residual stream in float32"),
    "logits in float32",
]
LINES = {"stream of 3 bits": "8, 2", "probabilities of 4 bits": "8, 3", "table in bfloat16": "bfloat16"}
LOST = {"bfloat16": ["stream of 3 bits"], "float32": [*LINES]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "kind, fault", [*(("a bug", fault) for fault in BUGS), *(("rounding", fault) for fault in RIGHT), ("lost", "")]
)
def test_rounding_or_a_bug(kind, fault, dtype):
    module = logits().to(getattr(torch, dtype))
    weights = {name: name for name, _ in module.named_parameters()}
    for planted in LOST[dtype] if kind == "lost" else [fault]:
        found = parity.explain(model(planted), module, weights, [TOKENS], name=planted)
        assert found.kind == ("lost digits" if kind == "lost" else kind)
        (gap, ours, theirs) = found.gaps["output"]
        assert bool(found) == (kind != "rounding")
        if kind == "rounding":
            assert not found.difference
            assert gap < 2 * (ours + theirs)
            assert [grown.our_error for grown in found.growth] == sorted(grown.our_error for grown in found.growth)
            assert len(found.most) == 5
        elif kind == "a bug":
            assert found.difference.sure
            assert found.difference.ours.source in str(found)
        else:
            assert LINES[planted] in found.uneven.ours.source
            assert ours > 3 * theirs
        assert not found.coarse
        assert found.as_json()["verdict"] in str(found)


def test_the_example_of_the_documentation_prints_what_stands_there(own_folder):
    text = (Path(__file__).parents[1] / "docs" / "parity-howto.md").read_text("utf-8")
    section = text.split("## Rounding or a bug\n")[1].split("\n## ")[0]
    code, printed = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", section, re.DOTALL).groups()
    Path("port.py").write_text(code)
    names = runpy.run_path("port.py")
    found = [*str(names["noise"]).splitlines()[:2], *str(names["digits"]).splitlines()[:4]]
    number = r"[\d.]+(e-\d+|%)"
    assert re.sub(number, "", "\n".join(found) + "\n") == re.sub(number, "", printed)


def test_the_precision_of_products_is_named(monkeypatch):
    """As a GPU has it: factors are rounded to 10 bits after the point, sums are not."""
    made = jax_values._made

    def on_tensor_cores(eqn, arrays):
        if eqn.primitive.name == "dot_general" and arrays[0].dtype == np.float32:
            arrays = [jax.lax.reduce_precision(array, 8, 10) for array in arrays]
        return made(eqn, arrays)

    monkeypatch.setattr(jax_values, "_made", on_tensor_cores)
    module = logits()
    found = parity.explain(model(""), module, {name: name for name, _ in module.named_parameters()}, [TOKENS])
    assert {site.operation for site in found.coarse} == {"dot_general"}
    assert "products of matrices have fewer digits than their type" in str(found)
