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
from parity_tests.test_errata import position_table
from torch_ref import embedding
from torch_ref.masks import visible

DOCUMENTS = Path(__file__).resolve().parents[2] / "shared" / "sources"


def _printed(text):
    """Numbers as they stand in the text, line by line."""
    return np.loadtxt(text.strip().splitlines()).tolist()


DENOMINATORS = _printed("1.0000 21.5443 464.1590")
POSITIONS = _printed(
    """
     0.0000  1.0000  0.0000  1.0000  0.0000  1.0000
     0.8415  0.5403  0.0464  0.9989  0.0022  1.0000
     0.9093 -0.4161  0.0927  0.9957  0.0043  1.0000
     0.1411 -0.9900  0.1388  0.9903  0.0065  1.0000
    -0.7568 -0.6536  0.1846  0.9828  0.0086  1.0000
    -0.9589  0.2837  0.2300  0.9732  0.0108  0.9999
    -0.2794  0.9602  0.2749  0.9615  0.0129  0.9999
     0.6570  0.7539  0.3192  0.9477  0.0151  0.9999
     0.9894 -0.1455  0.3629  0.9318  0.0172  0.9999
     0.4121 -0.9111  0.4057  0.9140  0.0194  0.9998
    """
)
# 001: the output of its attention for the first sentence; the first column of its normalisation, by hand; and that of
# the normalised sum with the input, which it does not print.
ATTENTION_OUTPUT = _printed(
    """
    -3.9014 -2.5143  0.5328  2.1713 11.6392 -4.5111
    -3.9261 -2.5294  0.5359  2.1826 11.7051 -4.5360
    -3.9235 -2.5278  0.5356  2.1814 11.6980 -4.5333
    -2.9408 -1.9877  0.5475  1.6745  8.8760 -3.4817
     1.7852  1.0139 -0.2578 -0.4185 -3.4584  1.2042
    -3.9260 -2.5294  0.5359  2.1826 11.7050 -4.5360
     1.8151  1.0338 -0.2649 -0.4310 -3.5336  1.2330
    -3.9244 -2.5284  0.5357  2.1818 11.7005 -4.5343
    -3.9097 -2.5193  0.5338  2.1751 11.6612 -4.5194
    -3.9217 -2.5267  0.5354  2.1806 11.6933 -4.5315
    """
)
NORMALISED_SUM = _printed("-0.9511 -0.7062 -0.7170 -0.5669 1.0509 -0.6046 0.6238 -0.7322 -0.8901 -0.8219")
NORMALISED = _printed("-0.8153 -0.8156 -0.8156 -0.8085 1.0473 -0.8156 1.0442 -0.8156 -0.8154 -0.8156")

# 002: one head's view of "horizon", the last of six tokens.
QUERY = _printed("0.9100 0.3448")
KEYS = _printed(
    """
     0.0921  0.9907
     0.5637  0.7303
     0.1860  0.4071
     0.8067  0.1776
     0.7002  0.6632
     0.9094  0.3594
    """
)
VALUES = _printed(
    """
     0.5637  0.4056
     0.9803  0.0100
     0.4111  0.3980
     0.6882  0.9797
     0.5551  0.7583
     0.3060  0.2141
    """
)
SCORES = _printed("0.4254 0.7648 0.3096 0.7953 0.8659 0.9515")
WEIGHTS = _printed("0.1252 0.1758 0.1115 0.1812 0.1945 0.2119")
OUTPUT = _printed("0.5863 0.4673")
# The same row if the scores are scaled, as the text of 002 says; no document prints it.
SCALED_WEIGHTS = _printed("0.1368 0.1740 0.1261 0.1778 0.1868 0.1985")
SCALED_OUTPUT = _printed("0.5863 0.4658")


def assert_prints(array, printed):
    """`array`, rounded to four decimals, is `printed`."""
    np.testing.assert_array_equal(np.round(np.asarray(array), 4), printed)


def test_the_figures_stand_in_the_documents():
    """The literals above, in one piece and in their order."""
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
    for dtype, printed in (("float32", DENOMINATORS), ("float64", [1.0000, 21.5443, 464.1589])):
        ours = angles(jnp.ones((1, 1), jnp.int32), 6, 10000.0, jnp.dtype(dtype))
        theirs = embedding.angles(torch.ones(1, 1, dtype=getattr(torch, dtype)), 6, 10000.0)
        assert ours.dtype == dtype
        for found in (ours, theirs):
            assert_prints((1 / np.asarray(found)[0, 0]).astype(np.float64), printed)


def test_position_table():
    assert_prints(position_table(10, 6), POSITIONS)
    assert_prints(embedding.sinusoidal(torch.arange(10.0)[None].double(), 6, 10000.0, interleaved=True)[0], POSITIONS)


def test_causal_mask_of_size_ten():
    """Ours is True where the articles add 0, and False where they add -inf; their mask of zeros is our None."""
    ours, theirs = Mask(causal=True).boolean(10, 10), visible(torch.zeros(4, 10), causal=True)
    assert ours.dtype == jnp.bool_
    np.testing.assert_array_equal(ours[0, 0], np.tri(10))
    np.testing.assert_array_equal(theirs[0, 0], np.tri(10))
    assert Mask().boolean(10, 10) is visible(torch.zeros(4, 10), causal=False) is None


@pytest.mark.parametrize(
    "preset, heads, hidden, logits",
    [
        # 000 computes probabilities over GPT-2's vocabulary, with 2 heads of width 3; of 001 the encoder is the result.
        ("article-encoder-decoder", (2, 3), 12, (4, 10, 50257)),
        ("article-encoder", (2, 3), 12, (4, 10, 6)),
        # In 002, (2, 6, 4) goes through two heads of width 2; in 003, (2, 5, 768) through 12 heads of width 64.
        ("post-decoder-only", (2, 2), 16, (2, 6, 256)),
        ("notebook-bert", (12, 64), 3072, (2, 5, 768)),
        # The toy run of 004: targets (2, 8) without their last token give (2, 7, 10).
        ("lecture-seq2seq", (8, 64), 2048, (2, 7, 10)),
    ],
)
def test_shapes(preset, heads, hidden, logits):
    """At full size: of outputs, and of the projections to heads and to the hidden layer."""
    net = transformer(ARCHITECTURES[preset])
    ids = [jax.ShapeDtypeStruct(logits[:2], jnp.int32)] * len(net.config.stacks)
    assert jax.eval_shape(net.apply, net.shapes, *ids).shape == logits
    for stack in net.config.stacks:
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
