"""docs/errata.md, proven: each test shows where a source document errs, and that ours does what is right.

A document is called by the number that its file begins with. What is called `literal` does what a document does, in
our words.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.model.attention import Attention
from jax_tformer.model.embedding import sinusoidal
from jax_tformer.model.masks import Mask, position_ids
from parity_tests.test_decoding import model_of
from twin.cases import CONFIGS

ARTICLE, LECTURE, NOTEBOOK = (CONFIGS[name] for name in ("article-encoder-decoder", "lecture-seq2seq", "notebook-bert"))


def first_layer(stack):
    """Layer 0 of a stack, whose parameters carry a leading L axis."""
    graph, parameters = nnx.split(stack.blocks, nnx.Param)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], parameters))


def influence(function, x):
    """`[T, J]`, the largest derivative of function(x) at position t by x at position j; both have a batch of one."""
    jacobian = np.asarray(jax.jit(jax.jacrev(function))(x))
    return np.abs(jacobian[0, :, :, 0]).max(axis=(1, 3))


def token_influence(net, params, home, tokens, *before):
    """`[T, T]`, how the model's output depends on the embeddings of `tokens`, no two of which may be alike."""
    table = params[home]["tokens"]["embedding"]

    def output(embedded):
        rows = {"tokens": {"embedding": table.at[tokens[0]].set(embedded[0])}}
        return net.apply({**params, home: {**params[home], **rows}}, *before, tokens)

    return influence(output, table[tokens])


def assert_causal(dependence):
    """Every position depends on itself and all before it, and not at all (exact zeros) on any after it."""
    past = np.tri(*dependence.shape) == 1
    assert (dependence[past] > 1e-6).all()
    assert not dependence[~past].any()


def literal_decoder_layer(layer, memory, x):
    """000's: the encoder's output asks, the decoder's state answers, and the two are added."""
    x = layer.self_attention_norm(x + layer.self_attention(x, x, Mask(causal=True))[0])
    x = layer.cross_attention_norm(x + layer.cross_attention(memory, x, Mask())[0])
    return layer.feedforward_norm(x + layer.feedforward(x))


def test_cross_attention_turned_round_sees_later_targets_and_needs_equal_lengths():
    net, params = model_of(ARTICLE)
    layer, rng = first_layer(net.bind(params).decoder), np.random.default_rng(2)
    memory, states = jnp.asarray(rng.standard_normal((2, 1, 5, 6)))
    assert (influence(lambda x: literal_decoder_layer(layer, memory, x), states) > 1e-6).all()
    with pytest.raises(TypeError, match=r"\(1, 5, 6\).*\(1, 3, 6\)"):
        jax.eval_shape(partial(literal_decoder_layer, layer), memory[:, :3], states)


def test_our_cross_attention_does_not_see_later_targets():
    """Of a source that is shorter."""
    net, params = model_of(ARTICLE)
    source, target = jnp.array([[7, 1, 9]]), jnp.array([[4, 11, 2, 8, 5]])
    assert_causal(token_influence(net, params, "target_embedding", target, source))


def literal_dropout(rate):
    """000's: the rate is an argument that nothing reads."""
    return nn.Dropout()


def test_a_bare_dropout_ignores_its_rate_and_our_preset_has_the_one_that_is_meant():
    """000 sets 0.1, for the feed-forward layer as for what attention gives; gate 10 sees ours drop by its rates."""
    torch.manual_seed(0)
    dropped = literal_dropout(0.1)(torch.ones(100_000))
    assert (dropped == 0).double().mean().item() == pytest.approx(0.5, abs=0.01)
    dropout = ARCHITECTURES["article-encoder-decoder"].dropout
    assert (dropout.residual, dropout.feedforward) == (0.1, 0.1)


SEQUENCE_LENGTH, EMBEDDING_WIDTH = 10, 6


def literal_position_table(length, width):
    """000's: two arguments are named, and the variables of the notebook are read."""
    angle = np.arange(SEQUENCE_LENGTH)[:, None] / 10000 ** (np.arange(0, EMBEDDING_WIDTH, 2) / EMBEDDING_WIDTH)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(SEQUENCE_LENGTH, -1)


def position_table(length, width):
    """Ours."""
    positions = position_ids(jnp.zeros((1, length), int), None)
    return sinusoidal(positions, width, interleaved=True, base=10000.0, dtype=jnp.dtype("float64"))[0]


def test_a_position_table_that_reads_globals():
    """Two widths and two lengths in one process: ours is made for the batch at hand."""
    assert literal_position_table(4, 8).shape == (10, 6)
    for length, width in ((10, 6), (4, 8), (3, 6)):
        expected = [
            [wave(t / 10000 ** (2 * i / width)) for i in range(width // 2) for wave in (math.sin, math.cos)]
            for t in range(length)
        ]
        np.testing.assert_allclose(position_table(length, width), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("scale, width", [("head_width", 64), ("model_width", 768)])
def test_scores_are_divided_by_the_root_of_this_width(scale, width):
    """003 takes that of the model; what follows from it is in gate 1, with a planted fault."""
    config = ARCHITECTURES["notebook-bert"]
    assert config.encoder.attention_scale == "head_width"
    attention = Attention(config, replace(config.encoder, attention_scale=scale), residual_branches=1)
    assert attention.scale == pytest.approx(width**-0.5, rel=1e-15)


def test_a_name_mangled_forward_is_never_found():
    class Block(nn.Module):
        def __forward(self, x):
            return x

    with pytest.raises(NotImplementedError, match="forward"):
        Block()(torch.ones(1))


def test_unmerged_heads_do_not_fit_the_output_projection():
    """In ours they lie side by side, as in BERT, whose weights ours reads: two swapped heads turn gate 1 red."""
    attended = torch.ones(2, 12, 5, 64)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        nn.Linear(768, 768)(attended.permute(0, 2, 1, 3))
    assert nn.Linear(768, 768)(attended.permute(0, 2, 1, 3).flatten(2)).shape == (2, 5, 768)


def test_a_block_without_causal_mask_is_an_encoder_block():
    """The same stack in both roles: what makes a decoder is the mask, which 003 has not."""
    tokens = jnp.array([[4, 11, 2, 8, 5]])
    net, params = model_of(NOTEBOOK)
    assert (token_influence(net, params, "embedding", tokens) > 1e-6).all()
    net, params = model_of(replace(NOTEBOOK, encoder=None, decoder=NOTEBOOK.encoder))
    assert_causal(token_influence(net, params, "embedding", tokens))


@pytest.mark.parametrize(
    "preset, projection_biases, output_bias, learned_positions, norm_placement",
    [
        ("article-encoder-decoder", True, True, False, "post"),
        ("article-encoder", True, True, False, "post"),
        ("post-decoder-only", False, True, True, "pre"),
        ("notebook-bert", False, True, False, "post"),
        ("lecture-seq2seq", False, True, True, "post"),
        ("vaswani-base", False, False, False, "post"),
        ("bert-base", True, True, True, "post"),
    ],
)
def test_presets_keep_what_their_documents_choose(
    preset, projection_biases, output_bias, learned_positions, norm_placement
):
    config = ARCHITECTURES[preset]
    for stack in filter(None, (config.encoder, config.decoder)):
        assert {stack.query_bias, stack.key_bias, stack.value_bias} == {projection_biases}
        assert stack.output_bias == output_bias
        assert (stack.positions == "learned") == learned_positions
        assert stack.norm_placement == norm_placement
        assert stack.attention_scale == "head_width"
