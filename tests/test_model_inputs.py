"""What a model says of inputs that do not fit: masks of another shape, ids outside of the vocabulary."""

import inspect
import re

import jax
import jax.numpy as jnp
import pytest

from jax_tformer.config import StackConfig, TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import DecodingConfig
from jax_tformer.decoding.generate import generate, stream
from jax_tformer.decoding.score import score
from jax_tformer.functional import transformer

STACK = StackConfig(num_layers=1, num_heads=2, feedforward_width=8)
GPT = transformer(TransformerConfig(vocab_size=11, d_model=8, decoder=STACK))
BERT = transformer(TransformerConfig(vocab_size=11, d_model=8, encoder=STACK))
BOTH = transformer(TransformerConfig(vocab_size=11, d_model=8, encoder=STACK, decoder=STACK))
TOKENS, SOURCE, MEMORY = jnp.ones((2, 5), jnp.int32), jnp.ones((2, 7), jnp.int32), jnp.ones((2, 7, 8))
FIVE, SEVEN = jnp.ones((2, 5), bool), jnp.ones((2, 7), bool)


@pytest.mark.parametrize(
    ("net", "call", "name", "expected"),
    [
        (GPT, lambda params, mask: GPT.apply(params, TOKENS, mask=mask), "mask", [2, 5]),
        (BERT, lambda params, mask: BERT.apply(params, SOURCE, mask=mask), "mask", [2, 7]),
        (BOTH, lambda params, mask: BOTH.apply(params, SOURCE, TOKENS, source_mask=mask), "source_mask", [2, 7]),
        (BOTH, lambda params, mask: BOTH.apply(params, SOURCE, TOKENS, target_mask=mask), "target_mask", [2, 5]),
        (BOTH, lambda params, mask: BOTH.encode(params, SOURCE, source_mask=mask), "source_mask", [2, 7]),
        (BOTH, lambda params, mask: BOTH.decode(params, TOKENS, MEMORY, source_mask=mask), "source_mask", [2, 7]),
        (BOTH, lambda params, mask: BOTH.decode(params, TOKENS, MEMORY, target_mask=mask), "target_mask", [2, 5]),
        (GPT, lambda params, mask: GPT.apply(params, TOKENS, segments=mask.astype(int)), "segments", [2, 5]),
        (GPT, lambda params, mask: GPT.apply(params, TOKENS, prefix=mask), "prefix", [2, 5]),
        (
            BOTH,
            lambda params, mask: BOTH.apply(
                params, SOURCE, TOKENS, source_segments=SOURCE, target_segments=mask.astype(int)
            ),
            "target_segments",
            [2, 5],
        ),
    ],
)
def test_a_mask_of_another_shape_is_told_the_right_one(net, call, name, expected):
    # One too long; a whole attention mask; a row for all.
    for wrong in ([2, expected[1] + 1], [2, 1, 1, expected[1]], [1, expected[1]]):
        message = re.escape(f"{name} has the shape {wrong}; expected {expected}, that of its tokens")
        with pytest.raises(InputError, match=message):
            jax.eval_shape(call, net.shapes, jnp.ones(wrong, bool))
    jax.eval_shape(call, net.shapes, jnp.ones(expected, bool))


@pytest.mark.parametrize("side", ["source_segments", "target_segments"])
def test_segments_of_one_side_alone_are_refused(side):
    segments = {side: SOURCE if side == "source_segments" else TOKENS}
    with pytest.raises(InputError, match="there are segments of one side alone; expected source_segments and"):
        jax.eval_shape(lambda params: BOTH.apply(params, SOURCE, TOKENS, **segments), BOTH.shapes)


def test_ids_outside_of_the_vocabulary_are_refused_where_they_can_be():
    params, message = GPT.init(jax.random.key(0)), "a token has the id 11; expected ids from 0 to 10"
    asked = DecodingConfig(2)
    for refused in (
        lambda: generate(GPT, params, [[3, 11]], asked),
        lambda: next(stream(GPT, params, [[3], [11]], asked)),
        lambda: score(GPT, params, [[3, 11]]),
        lambda: score(GPT, params, [[3, 4]], start_id=11),
        lambda: generate(BOTH, {}, [[3]], asked, start_id=11),
        lambda: score(BOTH, {}, [[3]], sources=[[11]], start_id=1),
    ):
        with pytest.raises(InputError, match=message):
            refused()
    with pytest.raises(InputError, match="a token has the id -1"):
        generate(GPT, params, [[-1]], asked)
    # And what `apply` says of itself: NaN in the row that has the id, and nowhere else.
    nan = jnp.isnan(jax.jit(GPT.apply)(params, TOKENS.at[1, 2].set(11)))
    assert nan[1].all()
    assert not nan[0].any()


def test_every_kind_of_model_shows_what_it_takes():
    names = {net: [*inspect.signature(net.apply).parameters] for net in (GPT, BERT, BOTH)}
    assert names[GPT] == ["params", "tokens", "mask", "token_types", "segments", "prefix", "dropout_key"]
    assert names[BERT] == ["params", "tokens", "mask", "token_types", "segments", "dropout_key"]
    masks = ["source_mask", "target_mask", "source_segments", "target_segments"]
    assert names[BOTH] == ["params", "source", "target", *masks, "dropout_key"]
    assert "logits of the token after each" in (GPT.apply.__doc__ or "")


def test_apply_gives_logits_alone():
    cache = GPT.bind(GPT.shapes)
    for more in ({"capture": True}, {"cache": jax.eval_shape(lambda: cache.new_cache(2, 9))}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            jax.eval_shape(lambda params, more=more: GPT.apply(params, TOKENS, **more), GPT.shapes)
