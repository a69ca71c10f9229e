"""The cache of decoding: full, growing with its text, and after thousands of tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.decoding import generate as generation
from jax_tformer.decoding.beam import search
from jax_tformer.decoding.generate import generate, stream
from jax_tformer.decoding.loop import advance, layers_apart
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.functional import transformer
from tests.test_decoding import GPT, PROMPTS, SEQ2SEQ, START, Model


def made(kind: str) -> Model:
    """The models of the other tests of decoding."""
    config, seed = {"gpt": (GPT, 0), "seq2seq": (SEQ2SEQ, 3)}[kind]
    net = transformer(config)
    return net, net.init(jax.random.key(seed))


def test_a_full_cache() -> None:
    net, params = made("gpt")
    model = net.bind(params)
    cache = model(jnp.array([[3, 4, 5]]), cache=model.new_cache(1, 3)).cache
    with pytest.raises(InputError, match="the cache has 3 slots and 3 are used; expected 1 free"):
        model(jnp.array([[6]]), cache=cache)
    with pytest.raises(InputError, match="there are segments and a cache"):
        model(jnp.array([[6]]), cache=model.new_cache(1, 3), segments=jnp.array([[1]]))


def test_a_cache_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    net, params = made("gpt")
    decoding = DecodingConfig(140, temperature=1.0)
    whole = generate(net, params, PROMPTS, decoding)
    before = advance._cache_size()
    monkeypatch.setattr(generation, "SHORT", 16)
    assert [generation.cache_length(used, 192) for used in (1, 32, 33, 64)] == [64, 64, 192, 192]
    found = generate(net, params, PROMPTS, decoding)
    assert advance._cache_size() == before + 1, "a shorter cache has a program of its own"
    assert (found.tokens == whole.tokens).all()
    streamed = stream(net, params, PROMPTS, decoding)
    assert (np.stack([*streamed], axis=2) == whole.tokens).all()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gpt", {"early_stopping": True}),
        # What these look back at goes on when the cache grows.
        ("gpt", {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2, "renormalize_logits": True}),
        pytest.param("seq2seq", {"early_stopping": "never", "length_penalty": 2.0}, marks=pytest.mark.deep),
    ],
)
def test_beams_in_a_cache_that_grows(kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    net, params = made(kind)
    decoding = DecodingConfig(140, num_beams=3, num_return_sequences=2, **settings)
    asked: dict[str, Any] = {"end_id": 4, "limits": [140, 100, 12, 60]}
    asked |= {"start_id": START} if kind == "seq2seq" else {}
    whole = generate(net, params, PROMPTS, decoding, **asked)
    before = search._cache_size()
    monkeypatch.setattr(generation, "SHORT", 16)
    found = generate(net, params, PROMPTS, decoding, **asked)
    assert search._cache_size() > before, "a shorter cache has a program of its own"
    assert found.lengths.max() > 64, "the cache should grow"
    for ours, expected in zip(found, whole, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.deep
def test_two_thousand_tokens_are_compiled_once_and_leave_nothing_behind() -> None:
    net, params = made("gpt")
    params, decoding = layers_apart(params), DecodingConfig(2_000, temperature=1.0)
    compiled, arrays, tokens = [], [], 0
    for tokens, _ in enumerate(stream(net, params, [[3, 4, 5]], decoding, context=64), 1):
        if tokens % 200 == 0:
            compiled.append(advance._cache_size())
            arrays.append(sum(array.nbytes for array in jax.live_arrays()))
    assert tokens == 2_000
    assert len(set(compiled)) == 1
    assert len(set(arrays)) == 1
