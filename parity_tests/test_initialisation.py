"""Gate 10: fresh parameters are distributed as the config and its source say, and independent of one another."""

import math

import jax
import numpy as np
import pytest
from flax import traverse_util

from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.training.step import forward
from parity.gates.measure import Measured
from parity_tests.initialisation import Expected, expected, gate
from twin.cases import CONFIGS, batch_for

DRAWS = 12
LOSS = "10 first loss"


def drawn(config, draws=DRAWS):
    """`[draws, ...]`, every parameter of so many fresh models, by path."""
    net = transformer(config)
    params = jax.vmap(net.init)(jax.random.split(jax.random.key(3), draws))
    return {path: np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(params, sep=".").items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_start_as_config_and_source_say(name, record):
    record(name, gate(CONFIGS[name], drawn(CONFIGS[name])))


@pytest.mark.parametrize(
    "name, path, start",
    [
        ("gpt2", "embedding.tokens.embedding", Expected("normal", 0.02)),
        ("gpt2", "decoder.blocks.self_attention.output.kernel", Expected("normal", 0.02 / math.sqrt(24))),
        ("bert-base", "embedding.token_types.embedding", Expected("normal", 0.02)),
        ("vaswani-base", "source_embedding.tokens.embedding", Expected("normal", 512**-0.5)),
        ("vaswani-base", "decoder.blocks.cross_attention.query.kernel", Expected("uniform", math.sqrt(2 / 1024))),
        ("lecture-seq2seq", "head.kernel", Expected("uniform", math.sqrt(2 / 522))),
    ],
)
def test_the_sources_figures_at_full_size(name, path, start):
    """In the words of the test, and in what the library declares."""
    assert expected(ARCHITECTURES[name], path) == pytest.approx(start)
    declared = transformer(ARCHITECTURES[name])._declared[path].start
    deviation = declared.size / math.sqrt(3) if declared.kind == "uniform" else declared.size
    assert (declared.kind, deviation) == pytest.approx(start)


def excess(config):
    """How far fresh models are from the loss that they should have, ln V + d std^2 / 2: relative to the second term.

    What the head multiplies has just been normalised, so that its length is sqrt(d), and logits are normal with the
    variance d std^2, std being that of the head's matrix. In a model with a tied head the token that is read stands
    out a little beyond that. Labels are any token, each as probable.
    """
    net, matrix = transformer(config), "head.kernel"
    if config.tied_head:
        matrix = f"{'source_' if config.shared_embedding else ''}embedding.tokens.embedding"
    batch = jax.device_put(batch_for(config, "none"))

    def loss(key):
        logits = forward(net, net.init(key), batch).logits
        return (jax.nn.logsumexp(logits, axis=-1) - logits.mean(-1)).mean()

    losses = jax.jit(jax.vmap(loss))(jax.random.split(jax.random.key(5), 48))
    added = config.d_model * expected(config, matrix).size ** 2 / 2
    return Measured(LOSS, abs(float(losses.mean()) - math.log(config.vocab_size or 0) - added) / added, 0.5, "loss")


@pytest.mark.parametrize("name", ["article-encoder-decoder", "vaswani-base", "gpt2", "bert-base"])
def test_the_loss_of_fresh_models(name):
    excess(CONFIGS[name]).require()
