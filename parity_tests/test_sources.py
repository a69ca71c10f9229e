"""What the source documents print, reproduced with our code and, where it has the same part, with the reference.

A document is called by the number that its file begins with. The token ids that 000 prints, and its windows, are
checked in tests/test_tokenizers.py (`TestArticle`); where the documents err is the subject of test_errata.py.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.data.pairs import shift_right
from jax_tformer.data.text import windows
from jax_tformer.functional import transformer
from jax_tformer.model.attention import attend
from jax_tformer.model.embedding import angles, sinusoidal
from jax_tformer.model.layers import Norm
from jax_tformer.model.masks import Mask, position_ids
from parity.gates.measure import FLOAT64_BAR, relative_error
from parity_tests.documents import (
    ATTENTION_OUTPUT,
    CAUSAL,
    DENOMINATORS,
    EMBEDDED,
    END_OF_TEXT,
    IDS,
    KEYS,
    NORMALISED,
    NORMALISED_SUM,
    OUTPUT,
    POSITIONS,
    QUERY,
    SCALED_OUTPUT,
    SCALED_WEIGHTS,
    SCORES,
    VALUES,
    WEIGHTS,
    assert_prints,
)
from torch_ref import embedding, layers, reference
from torch_ref.masks import visible
from twin.bridge import Pair
from twin.cases import weights_for

DOCUMENTS = Path(__file__).resolve().parents[2] / "shared" / "sources"


def test_the_figures_stand_in_the_documents():
    """The literals of documents.py, in one piece and in their order."""
    if not DOCUMENTS.is_dir():
        pytest.skip("needs ../shared/sources")
    copied: dict[str, list[Any]] = {
        "000": [DENOMINATORS, POSITIONS, NORMALISED],
        "001": [DENOMINATORS, POSITIONS, ATTENTION_OUTPUT, NORMALISED_SUM, NORMALISED],
        "002": [EMBEDDED, QUERY, KEYS, VALUES, SCORES, WEIGHTS, OUTPUT],
    }
    for number, tables in copied.items():
        (document,) = DOCUMENTS.glob(f"{number}_*.txt")
        printed = " ".join(re.findall(r"-?\d+\.\d{4}\b", document.read_text(encoding="utf-8")))
        for table in tables:
            assert " ".join(f"{figure:.4f}" for figure in np.ravel(table)) in printed


def first_layer(stack):
    """Layer 0 of a stack, whose parameters carry a leading L axis."""
    graph, parameters = nnx.split(stack.blocks, nnx.Param)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[0]), parameters))


def captured(net):
    """All that a forward pass computes, compiled: a function of parameters and inputs."""
    return jax.jit(lambda params, *inputs, **masks: net.bind(params)(*inputs, **masks, capture=True))


def both_run(config, *inputs):
    """The bound JAX model, and what it and the reference compute from `inputs` with the same random weights."""
    models = Pair(config, weights_for(config, 0.2), "float64", optimised=False)
    ours = captured(models.net)(models.params, *inputs)
    with torch.no_grad():
        theirs = models.module(*map(torch.from_numpy, inputs))
    assert relative_error(np.asarray(ours.logits), theirs.logits.numpy()) <= FLOAT64_BAR
    return models.net.bind(models.params), ours, theirs


def drawn(config):
    """The model, with normal float32 numbers (over and over) as parameters: `init` compiles for seconds."""
    net, noise = transformer(config), 0.02 * np.random.default_rng(0).standard_normal(99_991, np.float32)
    return net, jax.tree.map(lambda leaf: jnp.asarray(np.resize(noise, leaf.shape)), net.shapes)


def test_position_denominators():
    """000 computes in float32, where 2/3 is rounded before it becomes an exponent: exactly, it is 464.1589."""
    one = jnp.ones((1, 1), jnp.int32)
    single, double = (1 / angles(one, 6, 10000.0, jnp.dtype(dtype))[0, 0] for dtype in ("float32", "float64"))
    assert single.dtype == jnp.float32
    assert_prints(single.astype(jnp.float64), DENOMINATORS)
    assert_prints(double, [1.0000, 21.5443, 464.1589])
    assert_prints(1 / embedding.angles(torch.ones(1, 1, dtype=torch.float64), 6, 10000.0)[0, 0], [1, 21.5443, 464.1589])
    assert_prints(1 / embedding.angles(torch.ones(1, 1), 6, 10000.0)[0, 0].double(), DENOMINATORS)


def test_position_table():
    ours = sinusoidal(
        position_ids(jnp.zeros((1, 10), int), None), 6, interleaved=True, base=10000.0, dtype=jnp.dtype("float64")
    )
    assert_prints(ours[0], POSITIONS)
    assert_prints(embedding.sinusoidal(torch.arange(10.0)[None].double(), 6, 10000.0, interleaved=True)[0], POSITIONS)


def test_causal_mask_of_size_ten():
    """Ours is True where the articles add 0, and False where they add -inf; their mask of zeros is our None."""
    ours, theirs = Mask(causal=True).boolean(10, 10), visible(torch.zeros(4, 10), causal=True)
    assert ours.dtype == jnp.bool_
    assert ours[0, 0].astype(int).tolist() == theirs[0, 0].int().tolist() == CAUSAL
    assert Mask().boolean(10, 10) is visible(torch.zeros(4, 10), causal=False) is None


def article_steps(layer, embedded):
    """The shapes inside one self-attention, where 000 and 001 print them: 2 heads of width 3."""
    attention = layer.self_attention
    assert embedded.shape == (4, 10, 6)
    # The articles project to 3 x 6 columns at once and put the heads first; ours stay behind the positions.
    query, key, value = attention.query(embedded), attention.key(embedded), attention.value(embedded)
    assert query.shape == key.shape == value.shape == (4, 10, 2, 3)
    values, weights = attend(query, key, value, Mask(), attention.scale)
    assert weights.shape == (4, 2, 10, 10)
    assert values.shape == (4, 10, 2, 3)
    assert attention.output(values).shape == (4, 10, 6)
    assert layer.self_attention_norm(embedded + attention.output(values)).shape == (4, 10, 6)
    assert layer.feedforward.up(embedded).shape == (4, 10, 12)
    assert layer.feedforward(embedded).shape == (4, 10, 6)


def test_shapes_of_the_encoder_decoder_article():
    """000, from the windows of both sides to probabilities over GPT-2's vocabulary."""
    config = ARCHITECTURES["article-encoder-decoder"]
    source, target = (windows(ids, 10, 1)[:4].copy() for ids in (IDS, shift_right(IDS, END_OF_TEXT)))
    assert source.shape == target.shape == (4, 10)
    assert target[0].tolist() == [END_OF_TEXT, *source[0, :9].tolist()]

    model, ours, theirs = both_run(config, source, target)
    for stack, embed, ids in (
        (model.encoder, model.source_embedding, source),
        (model.decoder, model.target_embedding, target),
    ):
        embedded = jax.eval_shape(
            partial(embed, table=embed.tokens), jnp.asarray(ids), position_ids(jnp.zeros((1, 10), int), None)
        )
        jax.eval_shape(partial(article_steps, first_layer(stack)), embedded)

    assert ours.encoder.hidden.shape == ours.decoder.hidden.shape == (1, 4, 10, 6)
    for weights in (ours.encoder.self_attention, ours.decoder.self_attention, ours.decoder.cross_attention):
        assert weights.shape == (1, 4, 2, 10, 10)
    assert ours.encoder.cross_attention is None
    assert ours.logits.shape == tuple(theirs.logits.shape) == (4, 10, 50257)
    np.testing.assert_allclose(jax.nn.softmax(ours.logits, axis=-1).sum(-1), np.ones((4, 10)), rtol=1e-12)
    allowed = np.broadcast_to(np.array(CAUSAL, bool), (1, 4, 2, 10, 10))
    np.testing.assert_array_equal(np.asarray(ours.decoder.self_attention) > 0, allowed)
    assert (np.asarray(ours.encoder.self_attention) > 0).all()
    assert tuple(theirs.decoder.cross_attention[0].shape) == (4, 2, 10, 10)


def test_shapes_of_the_encoder_article():
    """001: the encoder's output is the result, normalised last."""
    model, ours, theirs = both_run(ARCHITECTURES["article-encoder"], windows(IDS, 10, 1)[:4].copy())
    embedded = jax.ShapeDtypeStruct((4, 10, 6), jnp.float64)
    jax.eval_shape(partial(article_steps, first_layer(model.encoder)), embedded)
    assert ours.logits.shape == tuple(theirs.logits.shape) == (4, 10, 6)
    assert ours.decoder is None
    assert ours.encoder.self_attention.shape == (1, 4, 2, 10, 10)
    np.testing.assert_array_equal(ours.encoder.hidden[0], ours.logits)
    last = first_layer(model.encoder).feedforward_norm
    standard = (np.asarray(ours.logits) - np.asarray(last.bias[...])) / np.asarray(last.scale[...])
    np.testing.assert_allclose(standard.mean(-1), np.zeros((4, 10)), rtol=0, atol=1e-12)


def test_layer_norm_by_hand():
    """000 and 001: mean, mean of squared deviations, eps inside the root; on the figures that 001 prints."""
    config = ARCHITECTURES["article-encoder"].with_dtype("float64")
    x = np.array([ATTENTION_OUTPUT])
    deviation = x - x.mean(-1, keepdims=True)
    by_hand = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-5)
    norm = Norm(config, config.encoder)
    norm.scale[...] = jnp.ones(6)
    ours = np.asarray(norm(jnp.asarray(x)))
    assert relative_error(ours, by_hand) <= FLOAT64_BAR
    theirs = layers.Norm(config, config.encoder).double()(torch.from_numpy(x)).detach().numpy()
    assert relative_error(theirs, by_hand) <= FLOAT64_BAR
    # What goes in is printed with four decimals too, which costs up to one unit in the last place of what comes out.
    np.testing.assert_allclose(ours[0, :, 0], NORMALISED, rtol=0, atol=1e-4)


def horizon(scale):
    """Weights and output of "horizon" in 002, with our attention and its causal mask."""
    # Of the queries only the last is printed; the others are left at zero, and nothing depends on them.
    query = np.zeros((1, 6, 1, 2))
    query[0, 5, 0] = QUERY
    key, value = (np.array(rows)[None, :, None, :] for rows in (KEYS, VALUES))
    output, weights = jax.jit(partial(attend, mask=Mask(causal=True), scale=scale))(query, key, value)
    return np.asarray(weights[0, 0, 5]), np.asarray(output[0, 5, 0])


def test_attention_row_of_horizon():
    """002 prints the softmax of scores that are not scaled, whatever its text says."""
    weights, output = horizon(scale=1.0)
    assert_prints(np.array(KEYS) @ np.array(QUERY), SCORES)
    assert_prints(weights, WEIGHTS)
    # 002 multiplies the weights as it has printed them, whose rounding adds up to 1e-4: exactly, it is 0.5862.
    assert_prints(output, [0.5862, 0.4673])
    assert_prints(np.array(WEIGHTS) @ np.array(VALUES), OUTPUT)
    np.testing.assert_allclose(output, OUTPUT, rtol=0, atol=1e-4)


def test_attention_row_of_horizon_scaled():
    """What the text of 002 describes: scores times head_width^-0.5."""
    weights, output = horizon(scale=2**-0.5)
    assert_prints(weights, SCALED_WEIGHTS)
    assert_prints(output, SCALED_OUTPUT)


def test_shapes_of_the_decoder_only_article():
    """002: (2, 6, 4) goes through two heads of width 2 and comes out as (2, 6, 4)."""
    config = ARCHITECTURES["post-decoder-only"]
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    model, ours, theirs = both_run(config, tokens)
    assert ours.logits.shape == tuple(theirs.logits.shape) == (2, 6, 256)
    np.testing.assert_allclose(jax.nn.softmax(ours.logits, axis=-1).sum(-1), np.ones((2, 6)), rtol=1e-12)

    x = jnp.array(EMBEDDED)
    attention = first_layer(model.decoder).self_attention
    for project in (attention.query, attention.key, attention.value):
        assert jax.eval_shape(project, x).shape == (2, 6, 2, 2)
    assert attention.scale == pytest.approx(2**-0.5, rel=1e-15)
    run = partial(
        model.decoder,
        masks={None: Mask(causal=True)},
        positions=position_ids(jnp.zeros((1, 6), int), None),
        capture=True,
    )
    hidden, found, _ = jax.jit(run)(x)
    assert x.shape == hidden.shape == (2, 6, 4)
    assert found.self_attention.shape == (2, 2, 2, 6, 6)
    above = np.triu_indices(6, 1)
    assert not np.asarray(found.self_attention)[..., above[0], above[1]].any()


def test_shapes_of_the_notebook():
    """003: b x n x 768 in and out, 12 heads of 64, and a mask of 1 at tokens and 0 at padding."""
    config = ARCHITECTURES["notebook-bert"]
    # The notebook's input is embedded already: the token table is left out of the way.
    net, params = drawn(replace(config, vocab_size=1))
    model = net.bind(params)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 768), np.float32))
    mask = jnp.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    run = partial(
        model.encoder,
        masks={None: Mask(is_token=mask == 1)},
        positions=position_ids(jnp.zeros((1, 5), int), None),
        capture=True,
    )
    output, found, _ = jax.jit(run)(x)
    layer = first_layer(model.encoder)
    assert jax.eval_shape(layer.self_attention.query, x).shape == (2, 5, 12, 64)
    assert jax.eval_shape(layer.feedforward.up, x).shape == (2, 5, 3072)
    assert found.self_attention.shape == (1, 2, 12, 5, 5)
    assert output.shape == (2, 5, 768)
    weights = np.asarray(found.self_attention[0])
    assert (weights > 0).sum(-1).tolist() == [[[5] * 5] * 12, [[3] * 5] * 12]
    assert not weights[1, :, :, 3:].any()


def test_the_toy_run_of_the_lecture():
    """004, at full size: (2, 9) and (2, 8) without its last token -> (2, 7, 10); padding has index 0."""
    config = ARCHITECTURES["lecture-seq2seq"]
    source = np.array([[3, 1, 4, 1, 5, 9, 2, 0, 0], [6, 5, 3, 5, 8, 9, 7, 9, 3]], np.int32)
    target = np.array([[1, 2, 3, 8, 4, 6, 2, 0], [1, 6, 4, 3, 3, 8, 3, 2]], np.int32)
    assert source.shape == (2, 9)
    assert target.shape == (2, 8)
    net, params = drawn(config)
    outputs = captured(net)(params, source, target[:, :-1], source_mask=source != 0)
    assert outputs.logits.shape == (2, 7, 10)
    assert np.isfinite(outputs.logits).all()

    assert outputs.encoder.self_attention.shape == (6, 2, 8, 9, 9)
    assert outputs.decoder.cross_attention.shape == (6, 2, 8, 7, 9)
    for weights in (np.asarray(outputs.encoder.self_attention), np.asarray(outputs.decoder.cross_attention)):
        # Every query, padded or not, sees the 7 tokens of the first source and the 9 of the second.
        assert ((weights > 0).sum(-1) == np.array([7, 9])[None, :, None, None]).all()
        assert not weights[:, 0, :, :, 7:].any()

    with torch.device("meta"):
        theirs = reference(config)(torch.zeros(2, 9).int(), torch.zeros(2, 7).int(), torch.ones(2, 9).bool())
    assert tuple(theirs.logits.shape) == (2, 7, 10)
