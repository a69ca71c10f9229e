"""A step that is not finite changes no parameter, and what is not finite first is found."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util

from jax_tformer import DropoutConfig, transformer
from jax_tformer.config.experiment import LossConfig, MeshConfig, OptimizerConfig, TrainingConfig
from jax_tformer.runs.evaluation import find_not_finite
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.sharding import make_mesh
from jax_tformer.training.step import init_state, train_step
from tests.small_models import GPT, STACK, assert_same_bits

CONFIG = replace(GPT, vocab_size=128, d_model=8, decoder=replace(STACK, feedforward_width=8))
NET = transformer(replace(CONFIG, dropout=DropoutConfig(residual=0.1)))
TX = optimizer(OptimizerConfig(warmup_steps=0, schedule="constant"), 10)
STEP = jax.jit(train_step(NET, TX, accumulation=2))
UP = "decoder.blocks.feedforward.up.kernel"
"""The second feature that it is given is large and negative, whatever else is added up with it, and in which order."""
LETTERS: Any = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
"""A tokenizer whose ids are letters."""


@pytest.fixture(scope="module")
def start():
    return jax.jit(lambda: init_state(NET, TX, jax.random.key(0)))()


def batch(*rows):
    ids = np.array([list(row.encode()) for row in rows], np.int32)
    return {"tokens": ids, "labels": ids}


# The third begins with a letter that no other has.
BATCH = batch("good", "many", "Zero", "ones")


def spoil(state, parameter, index, value):
    flat = traverse_util.flatten_dict(state.params, sep=".")
    flat[parameter] = flat[parameter].at[index].set(value)
    return state._replace(params=traverse_util.unflatten_dict(flat, sep="."))


def test_a_step_that_is_not_finite_changes_no_parameter_and_nor_does_the_next(start):
    good, _ = STEP(start, BATCH)
    assert int(good.step) == 1
    broken = after = spoil(good, "embedding.tokens.embedding", ord("Z"), 3e38)
    for rows in (BATCH, batch("good", "many", "ones", "nice")):
        after, _ = STEP(after, rows)
        assert (int(after.step), bool(after.finite)) == (1, False)
        assert_same_bits(after.params, broken.params)


@pytest.mark.parametrize(
    "parameter, index, value, said",
    [
        ("embedding.tokens.embedding", ord("Z"), 3e38, "in row 3 of 4, which begins 'Zero'"),
        (UP, (1, 1), -3e38, "the output of decoder.blocks.1 is the first that is not"),
        ("decoder.blocks.self_attention.key.bias", 1, np.nan, "decoder.blocks.1.self_attention.key.bias was not"),
        (
            "decoder.final_norm.scale",
            slice(None),
            3e38,
            "what the vocabulary projection is given is the first",
        ),
        ("decoder.final_norm.scale", 0, 1e30, "every layer's output is finite, the norm of the gradient of "),
    ],
)
def test_what_is_not_finite_first_is_found(start, parameter, index, value, said):
    state, _ = STEP(spoil(start, parameter, index, value), BATCH)
    assert not state.finite
    assert said in find_not_finite(
        NET, make_mesh(MeshConfig(), 2), LETTERS, TrainingConfig(accumulation=2), state, BATCH
    )


def test_a_gradient_of_what_is_added_to_the_loss_is_found(start):
    training = TrainingConfig(loss=LossConfig(z_loss=1e25))
    state, _ = jax.jit(train_step(NET, TX, loss=training.loss))(start, BATCH)
    assert not state.finite
    told = find_not_finite(NET, make_mesh(MeshConfig(), 4), LETTERS, training, state, BATCH)
    assert "every layer's output is finite, the norm of the gradient of " in told


@pytest.mark.parametrize(
    "activation, index, value, said",
    [
        ("relu", (0, 1), -3e38, r"encountered in dot_general in model/layers.py, line \d+: y = x @ self.kernel"),
        (
            "gelu_tanh",
            (0, 0),
            1e25,
            r"is not; .* encountered in mul in model/layers.py, line \d+: return function\(x\)",
        ),
    ],
)
def test_the_operation_that_made_a_nan_is_named(activation, index, value, said):
    net = transformer(replace(CONFIG, decoder=replace(CONFIG.decoder, num_layers=1, activation=activation)))
    state = spoil(init_state(net, TX, jax.random.key(0)), UP, index, value)
    state, _ = jax.jit(train_step(net, TX))(state, BATCH)
    told = find_not_finite(net, make_mesh(MeshConfig(), 4), LETTERS, TrainingConfig(), state, BATCH, operation=True)
    assert re.search(said, told), told
