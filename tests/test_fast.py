"""Parameters laid out for decoding compute what the model's own do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import DecodingConfig
from jax_tformer.decoding.generate import generate
from jax_tformer.decoding.loop import layers_apart
from jax_tformer.decoding.score import score
from jax_tformer.functional import transformer
from jax_tformer.model.fast import FEW_ROWS, multiply_by_rows
from tests.test_decoding import GPT, PROMPTS


def test_layers_apart_or_together():
    net = transformer(GPT)
    params = net.init(jax.random.key(0))
    tokens = jnp.array([[3, 4, 5]])
    together, whole = net.bind(params), net.apply(params, tokens)
    cached = together(tokens, cache=together.new_cache(1, 3)).logits
    np.testing.assert_allclose(cached, whole, atol=1e-5)
    for rows in (1000, 1):
        apart = layers_apart(params, rows=rows)
        model = net.bind(apart)
        found = model(tokens, cache=model.new_cache(1, 3)).logits
        np.testing.assert_allclose(found, cached, atol=1e-5 if rows == 1 else 0, rtol=0)
        for refused in (lambda apart=apart: net.apply(apart, tokens), lambda apart=apart: score(net, apart, [[3, 4]])):
            with pytest.raises(InputError, match="the parameters have layers apart, for generate and stream"):
                refused()
        assert jax.tree.structure(layers_apart(apart, rows=rows)) == jax.tree.structure(apart)
        assert (
            generate(net, apart, PROMPTS, DecodingConfig(9)).tokens
            == generate(net, params, PROMPTS, DecodingConfig(9)).tokens
        ).all()


@pytest.mark.parametrize("outputs", [6, 35, 127])
def test_products_of_few_and_many_rows(outputs):
    """Outputs in 2 parts, in 5, and of a number without divisors."""
    drawn = np.random.default_rng(0)
    matrix = drawn.standard_normal((outputs, 16)).astype(np.float32)
    for rows in (1, 3, FEW_ROWS, FEW_ROWS + 1):
        x = drawn.standard_normal((rows, 16)).astype(np.float32)
        np.testing.assert_allclose(multiply_by_rows(jnp.array(x), jnp.array(matrix)), x @ matrix.T, atol=1e-5)
    half = multiply_by_rows(jnp.array(x[:3], jnp.bfloat16), jnp.array(matrix, jnp.bfloat16), jnp.float32)
    assert half.dtype == jnp.float32
