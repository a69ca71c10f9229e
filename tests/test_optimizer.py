"""The schedules are the papers' formulas, worked by hand; gate 5 holds optimizers and clipping to PyTorch's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_tformer import ARCHITECTURES, EXPERIMENTS, LoraConfig, transformer
from jax_tformer.config.experiment import OptimizerConfig
from jax_tformer.lora import trained
from jax_tformer.training.optimizer import has_decay, learning_rate, optimizer
from parity.gates.pytrees import paths

STEPS = np.arange(1, 201)
PAPER = 512**-0.5 * np.minimum(STEPS**-0.5, STEPS * 40**-1.5)
"""Section 5.3: d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), steps counted from 1."""
WARM, FALL = [0.5, 1.0, 1.5], [1.75, 1.5, 1.25, 1.0]
COSINE = 2.0 * (0.1 + 0.9 * (1 + np.cos(np.pi * np.arange(101) / 100)) / 2)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"schedule": "inverse_sqrt", "learning_rate": (512 * 40) ** -0.5, "warmup_steps": 40}, PAPER),
        ({"schedule": "cosine", "final_fraction": 0.1}, [*WARM, *COSINE]),
        ({"schedule": "linear"}, [*WARM, 2.0, *FALL]),
        ({"schedule": "warmup_stable_decay", "decay_share": 0.2}, [*WARM, *[2.0] * 13, *FALL]),
        ({"schedule": "constant", "warmup_steps": 0}, [2.0] * 3),
    ],
)
def test_the_rates_of_a_schedule(settings, expected):
    config = OptimizerConfig(**{"learning_rate": 2.0, "warmup_steps": 4, "final_fraction": 0.5, **settings})
    rates = learning_rate(config, len(expected))(jnp.arange(len(expected)))
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


MODELS = {
    **ARCHITECTURES,
    **{name: each.config.model.with_vocab_size(300) for name, each in EXPERIMENTS.items()},
    "adapters": replace(ARCHITECTURES["gpt2"], lora=LoraConfig(targets=("all",))),
    "classifier": replace(
        ARCHITECTURES["bert-base"], head="classify_tokens", classes=3, tied_head=False, head_bias=False
    ),
}
IN_LAYERS = ("query", "key", "value", "output", "gate", "up", "down")
"""What has matrices in layers; outside, the transform of BERT's head has one."""


def kind(path):
    """What the issue says of a parameter, by its name alone."""
    *where, module, leaf = path.split(".")
    if leaf in ("bias", "scale"):
        return "vectors"
    if leaf == "embedding":
        return "tables"
    if leaf in ("a", "b") or (leaf == "kernel" and (module == "dense" or ("blocks" in where and module in IN_LAYERS))):
        return "matrices"
    assert path in ("head.kernel", "classifier.kernel")
    return "head"


@pytest.mark.parametrize("name", MODELS)
def test_what_each_parameter_gets(name):
    """Muon for the matrices of layers, AdamW for the rest, with decay of all but vectors.

    By default Muon would have what has two axes: the table, and the scales of stacked norms.
    """
    params = trained(transformer(MODELS[name]).shapes)
    state = jax.eval_shape(optimizer(OptimizerConfig(name="muon", clip_norm=None), 10).init, params)
    found = {}
    for rule, inner in state.inner_states.items():
        kept = inner.inner_state[0].trace if rule == "matrices" else optax.tree_utils.tree_get(inner, "mu")
        # What is masked has no leaf there.
        for path in paths(kept):
            assert path not in found, f"{path} has two rules"
            found[path] = rule
    assert found == {path: kind(path) for path in paths(params)}
    assert paths(has_decay(params)) == {path: kind(path) != "vectors" for path in found}


def test_adafactor_keeps_rows_and_columns_of_each_layer():
    init = optimizer(OptimizerConfig(name="adafactor", clip_norm=None), 10).init
    state = jax.eval_shape(init, transformer(ARCHITECTURES["gpt2"]).shapes)[0]
    kept = [paths(tree) for tree in (state.rows, state.columns)]
    for path, shapes in {
        "decoder.blocks.self_attention.query.kernel": [(12, 768, 1), (12, 1, 768)],
        "embedding.tokens.embedding": [(50257, 1), (1, 768)],
        "decoder.blocks.self_attention.query.bias": [(12, 768), None],
    }.items():
        assert [getattr(tree.get(path), "shape", None) for tree in kept] == shapes
