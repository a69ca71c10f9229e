"""docs/errata.md, proven where it is about masks: padding, and what a mask of -10000 hides.

As in test_errata.py, a document is called by the number that its file begins with, and what is called `literal` does
what a document does.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from jax_tformer.config import IGNORED
from jax_tformer.model.attention import attend
from jax_tformer.model.masks import Mask
from parity.gates.measure import FLOAT64_BAR, relative_error
from parity_tests.test_decoding import model_of
from parity_tests.test_errata import LECTURE
from twin.reference_loss import mean_cross_entropy


def notebook_weights(scores, mask):
    """Attention weights for one query with these scores, as 003 computes them and as we do, in float32."""
    literal = (torch.tensor(scores) + (1.0 - torch.tensor(mask)) * -10000.0).softmax(0)
    key = jnp.asarray(scores, jnp.float32)[None, :, None, None]
    ours = attend(jnp.ones_like(key[:, :1]), key, key, Mask(is_token=jnp.array([mask]) == 1), 1.0)[1]
    return literal.numpy(), np.asarray(ours[0, 0, 0])


def test_minus_ten_thousand_does_not_hide_a_large_score():
    literal, ours = notebook_weights([0.0, 1.0, 10002.0], mask=[1, 1, 0])
    assert_allclose(literal, [0.09003, 0.24473, 0.66524], atol=1e-5)
    assert_allclose(ours, [0.26894, 0.73106, 0.0], atol=1e-5)
    assert ours[2] == 0


def test_minus_ten_thousand_attends_to_padding_where_all_is_padding():
    # 10,000 has steps of 0.001 in float32, so that even the order of the scores is lost.
    literal, ours = notebook_weights([0.0, 1e-4, 2e-4], mask=[0, 0, 0])
    assert_allclose(literal, np.ones(3) / 3, rtol=1e-6)
    assert ours.tolist() == [0, 0, 0]


@cache
def lecture():
    """The model of 004 (small) on one source and one target; compiled once for each kind of call."""
    net, params = model_of(LECTURE)
    run = jax.jit(lambda params, *inputs, **masks: net.bind(params)(*inputs, **masks, capture=True))

    def outputs(source, target, **masks):
        options = {name: jnp.array([mask]) == 1 for name, mask in masks.items()}
        return run(params, jnp.array([source]), jnp.array([target]), **options)

    return outputs


def lecture_logits(source, target, **masks):
    """`[T, V]`."""
    return np.asarray(lecture()(source, target, **masks).logits[0])


SOURCE, TARGET, PADDED, OTHER = [3, 1, 4, 2], [1, 4, 3, 2, 5], [1, 4, 3, 0, 0], [1, 4, 3, 7, 2]
ALL = [1] * 5


def test_padded_keys_are_hidden_and_padded_queries_ignored():
    masks = {"source_mask": [1, 1, 1, 0], "target_mask": ALL}
    one, two = (lecture()([3, 1, 4, last], TARGET, **masks) for last in (0, 2))
    # The mask of 004 hides column 3 and leaves row 3: a padded query attends to the tokens, and computes something.
    weights = np.asarray(one.encoder.self_attention)
    assert not weights[..., 3].any()
    assert_allclose(weights[..., 3, :3].sum(-1), 1, rtol=1e-12)
    assert abs(one.encoder.hidden - two.encoder.hidden)[-1, 0, 3].max() > 1e-3
    # Nothing reads it: whatever stands at the padding, the logits are the same to the bit.
    assert_array_equal(one.logits, two.logits)


def test_the_loss_ignores_padded_targets():
    labels = jnp.array([[4, 3, 2, IGNORED, IGNORED]])
    padded, other = (lecture()(SOURCE, target).logits for target in (PADDED, OTHER))
    assert abs(padded - other)[0, 3:].max() > 1e-3
    loss = mean_cross_entropy(padded, labels)
    assert loss == mean_cross_entropy(other, labels)
    assert float(loss) == pytest.approx(float(mean_cross_entropy(padded[:, :3], labels[:, :3])), rel=1e-12)


def test_a_causal_mask_suffices_for_padding_on_the_right():
    padded, other = (lecture_logits(SOURCE, target) for target in (PADDED, OTHER))
    assert_array_equal(padded[:3], other[:3])
    masked = lecture_logits(SOURCE, PADDED, source_mask=[1] * 4, target_mask=[1, 1, 1, 0, 0])
    assert relative_error(masked[:3], padded[:3]) <= FLOAT64_BAR
    assert relative_error(masked[3:], padded[3:]) > 0.01


def test_padding_on_the_left_needs_a_target_mask():
    masks = {"source_mask": [1] * 4, "target_mask": [0, 0, 1, 1, 1]}
    (seen, other), (masked, still) = (
        [lecture_logits(SOURCE, target, **given)[2:] for target in ([0, 0, 1, 4, 3], [7, 2, 1, 4, 3])]
        for given in ({}, masks)
    )
    assert (np.abs(seen - other).max(axis=1) > 1e-3).all()
    assert_array_equal(masked, still)
    # The same as without any padding, whose logits stand at the tokens, with positions counted from the first of them.
    unpadded = lecture_logits(SOURCE, PADDED)[:3]
    assert relative_error(masked, unpadded) <= FLOAT64_BAR
    assert relative_error(seen, unpadded) > 0.01


def test_a_token_with_the_index_of_padding_is_not_hidden():
    """004 takes every 0 for padding; we are told by a mask, and a token may have any id."""
    given = [3, 0, 4, 2], TARGET
    ours = lecture_logits(*given)
    literal, told = (lecture_logits(*given, source_mask=[1, seen, 1, 1], target_mask=ALL) for seen in (0, 1))
    assert relative_error(ours, told) <= FLOAT64_BAR
    assert relative_error(ours, literal) > 0.01
