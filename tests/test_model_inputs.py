"""What a model says of inputs that do not fit: masks of another shape, ids outside of the vocabulary."""

import re

import jax
import jax.numpy as jnp
import pytest

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.functional import transformer
from tests.refusals import refused

STACK = StackConfig(num_layers=1, num_heads=2, feedforward_width=8)
GPT = transformer(TransformerConfig(vocab_size=11, d_model=8, decoder=STACK))
BERT = transformer(TransformerConfig(vocab_size=11, d_model=8, encoder=STACK))
BOTH = transformer(TransformerConfig(vocab_size=11, d_model=8, encoder=STACK, decoder=STACK))
TOKENS, SOURCE, MEMORY = jnp.ones((2, 5), jnp.int32), jnp.ones((2, 7), jnp.int32), jnp.ones((2, 7, 8))


@pytest.mark.parametrize(
    ("call", "given", "name"),
    [
        *((GPT.apply, [TOKENS], name) for name in ("mask", "segments", "prefix")),
        (BERT.apply, [SOURCE], "mask"),
        *((BOTH.apply, [SOURCE, TOKENS], name) for name in ("source_mask", "target_mask", "target_segments")),
        (BOTH.encode, [SOURCE], "source_mask"),
        *((BOTH.decode, [TOKENS, MEMORY], name) for name in ("source_mask", "target_mask")),
    ],
)
def test_a_mask_of_another_shape_is_told_the_right_one(call, given, name):
    rows, length = (SOURCE if name.startswith("source") or call.__self__ is BERT else TOKENS).shape
    more = {"source_segments": SOURCE} if name == "target_segments" else {}

    def shapes(shape):
        mask = jnp.ones(shape, int if name.endswith("segments") else bool)
        return jax.eval_shape(lambda params: call(params, *given, **more, **{name: mask}), call.__self__.shapes)

    # One too long; a whole attention mask; a row for all.
    for wrong in ([rows, length + 1], [rows, 1, 1, length], [1, length]):
        message = f"{name} has the shape {wrong}; expected {[rows, length]}, that of its tokens"
        with refused(re.escape(message)):
            shapes(wrong)
    shapes([rows, length])


@pytest.mark.parametrize("segments", [{"source_segments": SOURCE}, {"target_segments": TOKENS}])
def test_segments_of_one_side_alone_are_refused(segments):
    with refused("there are segments of one side alone; expected source_segments and"):
        jax.eval_shape(lambda params: BOTH.apply(params, SOURCE, TOKENS, **segments), BOTH.shapes)


def test_an_id_outside_of_the_vocabulary_spoils_its_row_alone():
    """Decoding refuses it; `apply` may be traced, and cannot."""
    nan = jnp.isnan(jax.jit(GPT.apply)(GPT.init(jax.random.key(0)), TOKENS.at[1, 2].set(11)))
    assert (bool(nan[1].all()), bool(nan[0].any())) == (True, False)
