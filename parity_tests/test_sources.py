"""What the source documents print, reproduced with our code and, where it has the same part, with the reference.

A document is called by the number that its file begins with. The token ids that 000 prints, and its windows, are
checked in tests/test_tokenizers.py; where the documents err is the subject of test_errata.py.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_tformer.config.presets import ARCHITECTURES
from jax_tformer.functional import transformer
from jax_tformer.model.attention import Attention, attend
from jax_tformer.model.embedding import angles
from jax_tformer.model.layers import Norm
from jax_tformer.model.masks import Mask
from parity.gates.measure import FLOAT64_BAR, relative_error
from parity_tests.documents import (
    ATTENTION_OUTPUT,
    CAUSAL,
    DENOMINATORS,
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
from parity_tests.test_errata import position_table
from torch_ref import embedding
from torch_ref.masks import visible

DOCUMENTS = Path(__file__).resolve().parents[2] / "shared" / "sources"


def test_the_figures_stand_in_the_documents():
    """The literals of documents.py, in one piece and in their order."""
    if not DOCUMENTS.is_dir():
        pytest.skip("needs ../shared/sources")
    copied = {
        "000": [DENOMINATORS, POSITIONS, NORMALISED],
        "001": [DENOMINATORS, POSITIONS, ATTENTION_OUTPUT, NORMALISED_SUM, NORMALISED],
        "002": [QUERY, KEYS, VALUES, SCORES, WEIGHTS, OUTPUT],
    }
    for number, tables in copied.items():
        (document,) = DOCUMENTS.glob(f"{number}_*.txt")
        printed = " ".join(re.findall(r"-?\d+\.\d{4}\b", document.read_text(encoding="utf-8")))
        for table in tables:
            assert " ".join(f"{figure:.4f}" for figure in np.ravel(table)) in printed


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
    assert_prints(position_table(10, 6), POSITIONS)
    assert_prints(embedding.sinusoidal(torch.arange(10.0)[None].double(), 6, 10000.0, interleaved=True)[0], POSITIONS)


def test_causal_mask_of_size_ten():
    """Ours is True where the articles add 0, and False where they add -inf; their mask of zeros is our None."""
    ours, theirs = Mask(causal=True).boolean(10, 10), visible(torch.zeros(4, 10), causal=True)
    assert ours.dtype == jnp.bool_
    assert ours[0, 0].astype(int).tolist() == theirs[0, 0].int().tolist() == CAUSAL
    assert Mask().boolean(10, 10) is visible(torch.zeros(4, 10), causal=False) is None


@pytest.mark.parametrize(
    "preset, inputs, heads, hidden, logits",
    [
        # 000 computes probabilities over GPT-2's vocabulary, with 2 heads of width 3; of 001 the encoder is the result.
        ("article-encoder-decoder", [(4, 10), (4, 10)], (2, 3), 12, (4, 10, 50257)),
        ("article-encoder", [(4, 10)], (2, 3), 12, (4, 10, 6)),
        # In 002, (2, 6, 4) goes through two heads of width 2; in 003, (2, 5, 768) through 12 heads of width 64.
        ("post-decoder-only", [(2, 6)], (2, 2), 16, (2, 6, 256)),
        ("notebook-bert", [(2, 5)], (12, 64), 3072, (2, 5, 768)),
        # The toy run of 004: sources (2, 9) and targets (2, 8) without their last token give (2, 7, 10).
        ("lecture-seq2seq", [(2, 9), (2, 7)], (8, 64), 2048, (2, 7, 10)),
    ],
)
def test_shapes(preset, inputs, heads, hidden, logits):
    """At full size: of outputs, and of the projections to heads and to the hidden layer."""
    net = transformer(ARCHITECTURES[preset])
    ids = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in inputs]
    assert jax.eval_shape(net.apply, net.shapes, *ids).shape == logits
    for stack in net.shapes.keys() & {"encoder", "decoder"}:
        layer = net.shapes[stack]["blocks"]
        assert layer["self_attention"]["query"]["kernel"].shape[2:] == heads
        assert layer["feedforward"]["up"]["kernel"].shape[2:] == (hidden,)


def test_layer_norm_by_hand():
    """000 and 001: mean, mean of squared deviations, eps inside the root; on the figures that 001 prints.

    000 prints for attention + input what 001 prints for attention alone; 001 has NORMALISED_SUM for the sum.
    """
    config = ARCHITECTURES["article-encoder"].with_dtype("float64")
    x = np.array([ATTENTION_OUTPUT])
    deviation = x - x.mean(-1, keepdims=True)
    by_hand = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-5)
    norm = Norm(config, config.encoder)
    norm.scale[...] = jnp.ones(6)
    ours = np.asarray(norm(jnp.asarray(x)))
    assert relative_error(ours, by_hand) <= FLOAT64_BAR
    # What goes in is printed with four decimals too, which costs up to one unit in the last place of what comes out.
    np.testing.assert_allclose(ours[0, :, 0], NORMALISED, rtol=0, atol=1e-4)
    assert np.abs(ours[0, :, 0] - NORMALISED_SUM).max() > 0.4


def horizon(attention_scale):
    """Weights and output of "horizon" in 002, with our attention, its scale and its causal mask."""
    # Of the queries only the last is printed; the others are left at zero, and nothing depends on them.
    query = np.zeros((1, 6, 1, 2))
    query[0, 5, 0] = QUERY
    key, value = (np.array(rows)[None, :, None, :] for rows in (KEYS, VALUES))
    config = ARCHITECTURES["post-decoder-only"]
    scale = Attention(config, replace(config.decoder, attention_scale=attention_scale), residual_branches=1).scale
    output, weights = jax.jit(partial(attend, mask=Mask(causal=True), scale=scale))(query, key, value)
    return np.asarray(weights[0, 0, 5]), np.asarray(output[0, 5, 0])


def test_attention_row_of_horizon():
    """002 prints the softmax of scores that are not scaled, whatever its text says."""
    weights, output = horizon("none")
    assert_prints(np.array(KEYS) @ np.array(QUERY), SCORES)
    assert_prints(weights, WEIGHTS)
    # 002 multiplies the weights as it has printed them, whose rounding adds up to 1e-4: exactly, it is 0.5862.
    assert_prints(output, [0.5862, 0.4673])
    assert_prints(np.array(WEIGHTS) @ np.array(VALUES), OUTPUT)
    np.testing.assert_allclose(output, OUTPUT, rtol=0, atol=1e-4)


def test_attention_row_of_horizon_scaled():
    """What the text of 002 describes: scores times head_width^-0.5."""
    weights, output = horizon(ARCHITECTURES["post-decoder-only"].decoder.attention_scale)
    assert_prints(weights, SCALED_WEIGHTS)
    assert_prints(output, SCALED_OUTPUT)
