"""Models that are compiled at once; and whether two trees of arrays are the same."""

import jax
import numpy as np

from jax_tformer import StackConfig, TransformerConfig

STACK = StackConfig(num_layers=2, num_heads=2, feedforward_width=32, norm_placement="pre", final_norm=True)
GPT = TransformerConfig(vocab_size=23, d_model=16, decoder=STACK)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, two in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
