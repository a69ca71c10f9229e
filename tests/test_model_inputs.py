"""What a model says of inputs that do not fit: masks of another shape, ids outside of the vocabulary."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jax_tformer import transformer
from tests import small_models
from tests.refusals import refused
from tests.small_models import STACK

GPT = transformer(small_models.GPT)
BOTH = transformer(replace(small_models.GPT, encoder=STACK))
TOKENS, SOURCE, MEMORY = jnp.ones((2, 5), jnp.int32), jnp.ones((2, 7), jnp.int32), jnp.ones((2, 7, 16))


@pytest.mark.parametrize(
    "call, given, name, tokens",
    [
        *((GPT.apply, [TOKENS], name, TOKENS) for name in ("mask", "segments", "prefix")),
        (BOTH.apply, [SOURCE, TOKENS], "source_mask", SOURCE),
        *((BOTH.apply, [SOURCE, TOKENS], name, TOKENS) for name in ("target_mask", "target_segments")),
        (BOTH.encode, [SOURCE], "source_mask", SOURCE),
        (BOTH.decode, [TOKENS, MEMORY], "source_mask", SOURCE),
        (BOTH.decode, [TOKENS, MEMORY], "target_mask", TOKENS),
    ],
)
def test_a_mask_of_another_shape_is_told_the_right_one(call, given, name, tokens):
    rows, length = tokens.shape
    more = {"source_segments": SOURCE} if name == "target_segments" else {}

    def run(shape):
        mask = jnp.ones(shape, int if name.endswith("segments") else bool)
        jax.eval_shape(lambda params: call(params, *given, **more, **{name: mask}), call.__self__.shapes)

    # One too long; a whole attention mask; a row for all.
    for wrong in ([rows, length + 1], [rows, 1, 1, length], [1, length]):
        with refused(re.escape(f"{name} has the shape {wrong}; expected {[rows, length]}, that of its tokens")):
            run(wrong)
    run([rows, length])


@pytest.mark.parametrize("segments", [{"source_segments": SOURCE}, {"target_segments": TOKENS}])
def test_segments_of_one_side_alone_are_refused(segments):
    with refused("there are segments of one side alone; expected source_segments and"):
        jax.eval_shape(lambda params: BOTH.apply(params, SOURCE, TOKENS, **segments), BOTH.shapes)


def test_an_id_outside_of_the_vocabulary_spoils_its_row_alone():
    """Decoding refuses it; `apply` may be traced, and cannot."""
    nan = jnp.isnan(jax.jit(GPT.apply)(GPT.init(jax.random.key(0)), TOKENS.at[1, 2].set(23)))
    assert (bool(nan[1].all()), bool(nan[0].any())) == (True, False)
