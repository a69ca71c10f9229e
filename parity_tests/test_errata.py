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
from torch.nn import functional as F

from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.hub.names import from_reference, slots
from jax_tformer.model.attention import Attention, attend
from jax_tformer.model.blocks import Block
from jax_tformer.model.dropout import name_sites
from jax_tformer.model.embedding import InputEmbedding
from jax_tformer.model.layers import FeedForward
from jax_tformer.model.masks import Mask, position_ids
from parity.gates.measure import FLOAT64_BAR, relative_error
from parity_tests.documents import (
    ATTENTION_OUTPUT,
    KEYS,
    NORMALISED,
    NORMALISED_SUM,
    QUERY,
    SCALED_WEIGHTS,
    WEIGHTS,
    assert_prints,
)
from torch_ref import reference
from twin.cases import CONFIGS, weights_for

ARTICLE, LECTURE, NOTEBOOK = (CONFIGS[name] for name in ("article-encoder-decoder", "lecture-seq2seq", "notebook-bert"))


def sharp(config):
    """The model in float64, with weights large enough for attention to be far from uniform."""
    net = transformer(config.with_dtype("float64"))
    return net, jax.tree.map(jnp.asarray, from_reference(weights_for(config, 0.2), net.shapes))


def first_layer(stack):
    """Layer 0 of a stack, whose parameters carry a leading L axis."""
    graph, parameters = nnx.split(stack.blocks, nnx.Param)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[0]), parameters))


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


def decoder_layer(source_length):
    """A decoder layer of 000's size, an encoder's output and five decoder states."""
    net, params = sharp(ARTICLE)
    rng = np.random.default_rng(2)
    memory, states = (jnp.asarray(rng.standard_normal((1, length, 6))) for length in (source_length, 5))
    return first_layer(net.bind(params).decoder), memory, states


def test_cross_attention_turned_round_sees_later_targets():
    layer, memory, states = decoder_layer(source_length=5)
    assert (influence(lambda x: literal_decoder_layer(layer, memory, x), states) > 1e-6).all()


def test_our_cross_attention_does_not_see_later_targets():
    net, params = sharp(ARTICLE)
    source, target = jnp.array([[7, 1, 9]]), jnp.array([[4, 11, 2, 8, 5]])
    assert_causal(token_influence(net, params, "target_embedding", target, source))


def test_cross_attention_turned_round_needs_equal_lengths():
    layer, memory, states = decoder_layer(source_length=3)
    with pytest.raises(TypeError, match=r"\(1, 5, 6\).*\(1, 3, 6\)"):
        jax.eval_shape(partial(literal_decoder_layer, layer), memory, states)
    ours = partial(layer, mask=Mask(causal=True), memory=memory, memory_mask=Mask(), capture=True)
    x, found, _ = jax.eval_shape(ours, states)
    assert x.shape == (1, 5, 6)
    assert found.cross_attention.shape == (1, 2, 5, 3)


class LiteralDropout(nn.Module):
    """000's: the rate is an argument that nothing reads."""

    def __init__(self, rate):
        super().__init__()
        self.dropout = nn.Dropout()

    def forward(self, x):
        return self.dropout(x)


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_a_bare_dropout_ignores_its_rate(rate):
    torch.manual_seed(0)
    x = torch.ones(1, 2000, 50).double()
    assert (LiteralDropout(rate)(x) == 0).double().mean().item() == pytest.approx(0.5, abs=0.01)

    # Identity matrices let the hidden activations through: all 1, but for dropout.
    config = replace(ARTICLE, d_model=50, dropout=replace(ARTICLE.dropout, feedforward=rate)).with_dtype("float64")
    ours = name_sites(FeedForward(config, replace(config.output_stack, feedforward_width=50), residual_branches=1))
    for linear in (ours.up, ours.down):
        linear.kernel[...] = jnp.eye(50)
    found = np.asarray(jax.jit(ours)(jnp.asarray(x), jax.random.key(0)))
    assert (found == 0).mean() == pytest.approx(rate, abs=0.01)
    np.testing.assert_allclose(found[found != 0], 1 / (1 - rate), rtol=1e-12)


def test_our_article_preset_drops_what_the_article_means():
    """000 sets 0.1, and means it for the feed-forward layer as for what attention gives."""
    dropout = ARCHITECTURES["article-encoder-decoder"].dropout
    assert (dropout.residual, dropout.feedforward) == (0.1, 0.1)


SEQUENCE_LENGTH, EMBEDDING_WIDTH = 10, 6


def literal_position_table(length, width):
    """000's: two arguments are named, and the variables of the notebook are read."""
    angle = np.arange(SEQUENCE_LENGTH)[:, None] / 10000 ** (np.arange(0, EMBEDDING_WIDTH, 2) / EMBEDDING_WIDTH)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(SEQUENCE_LENGTH, -1)


def test_a_position_table_that_reads_globals():
    """Two widths and two lengths in one process: ours is made for the batch at hand."""
    assert literal_position_table(4, 8).shape == (10, 6)
    for length, width in ((10, 6), (4, 8), (3, 6)):
        expected = [
            [wave(t / 10000 ** (2 * i / width)) for i in range(width // 2) for wave in (math.sin, math.cos)]
            for t in range(length)
        ]
        positions = position_ids(jnp.zeros((1, length), int), None)
        # Modules start with zeros for parameters: what remains of the embedded input is the table.
        config = replace(ARTICLE, d_model=width).with_dtype("float64")
        embedding = InputEmbedding(config, config.output_stack)
        run = jax.jit(partial(embedding, table=embedding.tokens))
        np.testing.assert_allclose(run(jnp.zeros((1, length), int), positions)[0], expected, rtol=0, atol=1e-15)


def test_printed_normalisation_leaves_out_the_residual():
    """000 prints for attention + input what 001 prints for attention alone; 001 has NORMALISED_SUM for the sum."""
    alone = F.layer_norm(torch.tensor(ATTENTION_OUTPUT).double(), (6,))[:, 0].numpy()
    np.testing.assert_allclose(alone, NORMALISED, rtol=0, atol=1e-4)
    assert np.abs(alone - NORMALISED_SUM).max() > 0.4

    # Ours adds it: where attention and feed-forward give zero, a layer only normalises what it is given.
    config = ARTICLE.with_dtype("float64")
    layer = Block(config, config.output_stack, cross=False)
    for norm in (layer.self_attention_norm, layer.feedforward_norm):
        norm.scale[...] = jnp.ones(6)
    x = np.random.default_rng(0).standard_normal((1, 5, 6))
    expected = F.layer_norm(F.layer_norm(torch.from_numpy(x), (6,)), (6,)).numpy()
    ours = jax.jit(partial(layer, mask=Mask()))(jnp.asarray(x))[0]
    assert relative_error(np.asarray(ours), expected) <= FLOAT64_BAR


def test_printed_probabilities_are_of_unscaled_scores():
    scores = torch.tensor(KEYS).double() @ torch.tensor(QUERY).double()
    assert_prints(scores.softmax(0), WEIGHTS)
    assert_prints((scores * 2**-0.5).softmax(0), SCALED_WEIGHTS)

    config = ARCHITECTURES["post-decoder-only"]
    stack = config.output_stack
    query, key = jnp.array(QUERY)[None, None, None, :], jnp.array(KEYS)[None, :, None, :]
    for attention_scale, printed in ((stack.attention_scale, SCALED_WEIGHTS), ("none", WEIGHTS)):
        attention = Attention(config, replace(stack, attention_scale=attention_scale), residual_branches=1)
        assert_prints(attend(query, key, key, Mask(), attention.scale)[1][0, 0, 0], printed)


def literal_notebook(weights, x, mask, width):
    """003's block, with scores over sqrt(width); its heads are merged here, since as written it cannot run."""

    def project(name, x):
        prefix = f"encoder.blocks.0.{name}"
        return F.linear(x, weights[f"{prefix}.weight"], weights.get(f"{prefix}.bias"))

    def norm(name, x):
        prefix = f"encoder.blocks.0.{name}"
        return F.layer_norm(x, (768,), weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

    query, key, value = (
        project(f"self_attention.{name}", x).view(*x.shape[:2], 12, 64).permute(0, 2, 1, 3)
        for name in ("query", "key", "value")
    )
    scores = query @ key.transpose(2, 3) / math.sqrt(width) + (1.0 - mask[:, None, None, :]) * -10000.0
    attended = (scores.softmax(3) @ value).permute(0, 2, 1, 3).flatten(2)
    x = norm("self_attention_norm", x + project("self_attention.output", attended))
    return norm("feedforward_norm", x + project("feedforward.down", F.gelu(project("feedforward.up", x))))


def test_the_notebook_scales_by_the_model_width():
    config = replace(ARCHITECTURES["notebook-bert"], vocab_size=1)
    assert config.encoder.attention_scale == "head_width"
    weights = weights_for(config, 0.05)
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    x = np.random.default_rng(3).standard_normal((2, 5, 768))
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    literal = {
        width: literal_notebook(tensors, torch.from_numpy(x), torch.from_numpy(mask), width).numpy()
        for width in (768, 64)
    }
    assert relative_error(literal[768], literal[64]) > 0.01
    stacks = {768: replace(config.encoder, attention_scale="model_width"), 64: config.encoder}
    for width, stack in stacks.items():
        net = transformer(replace(config, encoder=stack).with_dtype("float64"))
        block = first_layer(net.bind(from_reference(weights, net.shapes)).encoder)
        ours = jax.jit(partial(block, mask=Mask(is_token=jnp.asarray(mask == 1))))(jnp.asarray(x))[0]
        assert relative_error(np.asarray(ours), literal[width]) <= FLOAT64_BAR


def test_a_name_mangled_forward_is_never_found():
    class Block(nn.Module):
        def __forward(self, x):
            return x

    with pytest.raises(NotImplementedError, match="forward"):
        Block()(torch.ones(1))
    assert hasattr(Block(), "_Block__forward")

    config = NOTEBOOK.with_dtype("float64")
    model = reference(config)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights_for(config, 0.2).items()})
    assert tuple(model(torch.arange(5)[None]).logits.shape) == (1, 5, config.d_model)


def test_unmerged_heads_do_not_fit_the_output_projection():
    attended = torch.ones(2, 12, 5, 64)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        nn.Linear(768, 768)(attended.permute(0, 2, 1, 3))

    config = ARCHITECTURES["notebook-bert"]
    ours = Attention(config, config.output_stack, residual_branches=1).output
    # Head 1, column 2 is row 64 + 2 of the projection: heads side by side, as the paper concatenates them.
    ours.kernel[...] = jnp.eye(768, dtype=jnp.float32).reshape(12, 64, 768)
    heads = np.zeros((2, 5, 12, 64), np.float32)
    heads[:, :, 1, 2] = 1
    output = np.asarray(jax.jit(ours)(heads))
    assert output.shape == (2, 5, 768)
    assert set(output.nonzero()[2].tolist()) == {66}


def test_a_block_without_causal_mask_is_an_encoder_block():
    """The same stack in both roles: what makes a decoder is the mask, which 003 has not."""
    tokens = jnp.array([[4, 11, 2, 8, 5]])
    net, params = sharp(NOTEBOOK)
    assert (token_influence(net, params, "embedding", tokens) > 1e-6).all()
    net, params = sharp(replace(NOTEBOOK, encoder=None, decoder=NOTEBOOK.encoder))
    assert_causal(token_influence(net, params, "embedding", tokens))


@pytest.mark.parametrize(
    ("preset", "projection_biases", "output_bias", "learned_positions", "norm_placement"),
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
    names = list(slots(transformer(config).shapes))
    for projection in ("query", "key", "value"):
        assert any(name.endswith(f"{projection}.weight") for name in names)
        assert any(name.endswith(f"{projection}.bias") for name in names) == projection_biases
    assert any(name.endswith("attention.output.bias") for name in names) == output_bias
    assert any(name.endswith("positions.weight") for name in names) == learned_positions
    for stack in filter(None, (config.encoder, config.decoder)):
        assert stack.norm_placement == norm_placement
        assert stack.attention_scale == "head_width"
