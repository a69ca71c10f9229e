"""docs/errata.md, proven: every test shows what a source document says and that ours does what is right.

A document is called by the number that its file begins with. The `literal_` functions do what a document does; they
are ours only in wording.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jaxtyping import Array
from torch import nn
from torch.nn import functional as F

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.data.ids import IGNORED
from jax_tformer.models.transformer import Transformer, transformer
from jax_tformer.nn.arrays import Params
from jax_tformer.nn.attention import Attention, attend
from jax_tformer.nn.blocks import Block, Context
from jax_tformer.nn.embedding import InputEmbedding
from jax_tformer.nn.feedforward import FeedForward
from jax_tformer.nn.masks import causal_mask, padding_mask
from jax_tformer.nn.positions import position_ids, sinusoidal
from jax_tformer.nn.stacks import Stack
from jax_tformer.presets import ARCHITECTURES
from jax_tformer.training.losses import mean_cross_entropy
from jax_tformer.weights.names import from_reference, to_reference
from parity_tests.bridge import Tensors
from parity_tests.cases import CONFIGS, weights_for
from parity_tests.measure import FLOAT64_BAR, relative_error
from parity_tests.test_sources import (
    ATTENTION_OUTPUT,
    NORMALISED,
    SCALED_WEIGHTS,
    WEIGHTS,
    assert_prints,
    first_layer,
    horizon,
)
from torch_ref import layers, reference

NOTEBOOK = ARCHITECTURES["notebook-bert"]


def model(config: TransformerConfig) -> tuple[Transformer, Params]:
    """The model in float64, with weights large enough for attention to be far from uniform."""
    net = transformer(config.with_dtype("float64"))
    return net, jax.tree.map(jnp.asarray, from_reference(weights_for(config, 0.2), net.shapes))


def influence(function: Callable[[Array], Array], x: Array) -> np.ndarray:
    """`[T, J]`, the largest derivative of function(x) at position t by x at position j; both have a batch of one."""
    jacobian = jax.jit(jax.jacrev(function))(x)
    return np.abs(np.asarray(jacobian)[0, :, :, 0]).max(axis=(1, 3))


def token_influence(net: Transformer, params: Params, home: str, tokens: Array, *before: Array) -> np.ndarray:
    """`[T, T]`, how the logits (or hidden states) depend on the embeddings of `tokens`, which all differ."""
    table = params[home]["tokens"]["embedding"]

    def logits(embedded: Array) -> Array:
        rows = {"tokens": {"embedding": table.at[tokens[0]].set(embedded[0])}}
        return net.apply({**params, home: {**params[home], **rows}}, *before, tokens)

    return influence(logits, table[tokens])


def assert_causal(dependence: np.ndarray) -> None:
    """Every position depends on itself and all before it, and not at all (exact zeros) on any after it."""
    past = np.tri(*dependence.shape, dtype=bool)
    assert (dependence[past] > 1e-6).all()
    assert not dependence[~past].any()


def literal_cross_attention(layer: Block, memory: Array, x: Array) -> Array:
    """000's decoder layer: the encoder's output asks, the decoder's state answers, and both are added."""
    x = layer.self_attention_norm(x + layer.self_attention(x, x, causal_mask(x.shape[1]))[0])
    x = layer.cross_attention_norm(x + layer.cross_attention(memory, x, None)[0])
    return layer.feedforward_norm(x + layer.feedforward(x))


def article_layer(source_length: int) -> tuple[Block, Array, Array]:
    """The decoder layer of 000 (small), an encoder's output and five decoder states."""
    net, params = model(CONFIGS["article-encoder-decoder"])
    memory = net.encode(params, jnp.arange(source_length)[None])
    states = jnp.asarray(np.random.default_rng(2).standard_normal((1, 5, 6)))
    return first_layer(net.bind(params).decoder), memory, states


class TestCrossAttentionTurnedRound:
    def test_the_literal_version_sees_later_targets(self) -> None:
        layer, memory, states = article_layer(source_length=5)
        dependence = influence(lambda x: literal_cross_attention(layer, memory, x), states)
        assert (dependence > 1e-6).all()
        context = Context(self_mask=causal_mask(5), memory=memory)
        assert_causal(influence(lambda x: layer(x, context)[0], states))

    def test_our_logits_do_not(self) -> None:
        net, params = model(CONFIGS["article-encoder-decoder"])
        source, target = jnp.array([[7, 1, 9]]), jnp.array([[4, 11, 2, 8, 5]])
        assert_causal(token_influence(net, params, "target_embedding", target, source))

    def test_the_literal_version_needs_equal_lengths(self) -> None:
        layer, memory, states = article_layer(source_length=3)
        with pytest.raises(TypeError, match=r"\(1, 5, 6\).*\(1, 3, 6\)"):
            literal_cross_attention(layer, memory, states)
        x, captured = layer(states, Context(self_mask=causal_mask(5), memory=memory))
        assert x.shape == (1, 5, 6)
        assert captured.cross_attention is not None
        assert captured.cross_attention.shape == (1, 2, 5, 3)


class LiteralDropout(nn.Module):
    """000's way: the rate is an argument that nothing reads."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x)


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_a_bare_dropout_ignores_its_rate(rate: float) -> None:
    assert ARCHITECTURES["article-encoder-decoder"].dropout.feedforward == 0.1
    torch.manual_seed(0)
    ones = torch.ones(100_000)
    assert (LiteralDropout(rate)(ones) == 0).double().mean().item() == pytest.approx(0.5, abs=0.01)

    # Identity weights show the hidden activations, all 1 before dropout; 2,000 x 50 of them.
    config = CONFIGS["article-encoder-decoder"]
    config = replace(config, d_model=50, dropout=replace(config.dropout, feedforward=rate)).with_dtype("float64")
    stack = replace(config.output_stack, num_heads=2, feedforward_width=50)
    ours, theirs = FeedForward(config, stack, residual_branches=1), layers.FeedForward(config, stack, ).double()
    for layer in (ours.up, ours.down):
        layer.kernel[...] = jnp.eye(50)
    theirs.load_state_dict({name: torch.eye(50) if array.ndim == 2 else torch.zeros(50) for name, array in theirs.state_dict().items()})
    dropped = np.asarray(ours(jnp.ones((1, 2000, 50)), dropout_key=jax.random.key(0)))
    with torch.no_grad():
        reference_dropped = theirs.train()(torch.ones(1, 2000, 50).double()).numpy()
    for hidden in (dropped, reference_dropped):
        assert (hidden == 0).mean() == pytest.approx(rate, abs=0.01)
        np.testing.assert_allclose(hidden[hidden != 0], 1 / (1 - rate), rtol=1e-12)
    np.testing.assert_array_equal(ours(jnp.ones((1, 2, 50))), np.ones((1, 2, 50)))


SEQUENCE_LENGTH, EMBEDDING_WIDTH = 10, 6


def literal_position_table(length: int, width: int) -> np.ndarray:
    """000's way: the arguments are named, and the notebook's variables are read."""
    angle = np.arange(SEQUENCE_LENGTH)[:, None] / 10000 ** (np.arange(0, EMBEDDING_WIDTH, 2) / EMBEDDING_WIDTH)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(SEQUENCE_LENGTH, -1)


def test_a_position_table_that_reads_globals() -> None:
    assert literal_position_table(4, 8).shape == (10, 6)
    with pytest.raises(ValueError, match="broadcast"):
        np.zeros((1, 4, 6)) + literal_position_table(4, 6)  # the whole table is added, whatever the length

    float64 = jnp.dtype("float64")
    wide, narrow, again = (
        np.asarray(sinusoidal(position_ids(length, None), width, interleaved=True, base=10000.0, dtype=float64)[0])
        for length, width in ((4, 8), (10, 6), (4, 8))
    )
    np.testing.assert_allclose(narrow, literal_position_table(10, 6), rtol=0, atol=1e-15)
    np.testing.assert_array_equal(wide, again)
    expected = [[f(t / 10000 ** (2 * i / 8)) for i in range(4) for f in (math.sin, math.cos)] for t in range(4)]
    np.testing.assert_allclose(wide, expected, rtol=0, atol=1e-15)
    # And as models use it: two widths in one process, a length of the moment.
    for width, length in ((8, 4), (6, 3)):
        config = replace(CONFIGS["article-encoder"], d_model=width).with_dtype("float64")
        embedding = InputEmbedding(config, config.output_stack)  # its token table holds zeros
        added = embedding(jnp.zeros((1, length), int), position_ids(length, None))[0]
        np.testing.assert_array_equal(added, {8: wide, 6: narrow}[width][:length])


def test_the_normalisation_by_hand_leaves_out_the_residual() -> None:
    """000 prints NORMALISED for LayerNorm(attention + input): it is that of the attention alone, as 001 shows."""
    alone = F.layer_norm(torch.tensor(ATTENTION_OUTPUT).double(), (6,))[:, 0]
    np.testing.assert_allclose(alone, NORMALISED, rtol=0, atol=1e-4)
    with_residual = [-0.9511, -0.7062, -0.7170, -0.5669, 1.0509, -0.6046, 0.6238, -0.7322, -0.8901, -0.8219]  # in 001
    assert np.abs(alone.numpy() - with_residual).max() > 0.4

    # Ours adds the residual: with attention and feed-forward that give nothing, a layer normalises its input.
    config = CONFIGS["article-encoder"].with_dtype("float64")
    layer = Block(config, config.output_stack, cross=False)  # its matrices hold zeros
    layer.self_attention_norm.scale[...] = layer.feedforward_norm.scale[...] = jnp.ones(6)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 6)) * 100)
    twice = F.layer_norm(F.layer_norm(torch.from_numpy(np.array(x)), (6,)), (6,)).numpy()
    assert relative_error(np.asarray(layer(x, Context())[0]), twice) <= FLOAT64_BAR


def test_printed_probabilities_are_unscaled() -> None:
    stack = ARCHITECTURES["post-decoder-only"].output_stack
    config = ARCHITECTURES["post-decoder-only"]
    ours = Attention(config, stack, residual_branches=1).scale
    none = Attention(config, replace(stack, attention_scale="none"), residual_branches=1).scale
    assert ours == pytest.approx(2**-0.5, rel=1e-15)
    assert none == 1.0
    assert_prints(horizon(none)[0], WEIGHTS)
    assert_prints(horizon(ours)[0], SCALED_WEIGHTS)
    # The largest difference is 14 units of what is printed below rounding's reach.
    assert np.abs(np.array(WEIGHTS) - SCALED_WEIGHTS).max() > 0.01
