"""How tokens are chosen: 100,000 draws of each strategy against probabilities computed by hand, and its edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jax_tformer import DecodingConfig
from jax_tformer.decoding.sampling import History, choose, draw, keep_min_p, keep_top_k, keep_top_p, make_rules

DRAWS = 100_000
PROBABILITIES = np.array([0.02, 0.3, 0.05, 0.2, 0.13, 0.01, 0.25, 0.04])
SEEN = [1, 5]

# By hand: what each strategy makes of PROBABILITIES.
EXPECTED = {
    "temperature 1": ({}, PROBABILITIES),
    "temperature 0.5": ({"temperature": 0.5}, PROBABILITIES**2),
    "top-k": ({"top_k": 3}, [0, 0.3, 0, 0.2, 0, 0, 0.25, 0]),
    "top-k beyond the vocabulary": ({"top_k": 99}, PROBABILITIES),
    # 0.3 + 0.25 + 0.2 = 0.75 is not yet 0.8; 0.13 more are.
    "top-p": ({"top_p": 0.8}, [0, 0.3, 0, 0.2, 0.13, 0, 0.25, 0]),
    # At least 0.3 * 0.4 = 0.12.
    "min-p": ({"min_p": 0.4}, [0, 0.3, 0, 0.2, 0.13, 0, 0.25, 0]),
    # The top 5 are made sure of first: of their sum 0.93, 0.75 is 81%.
    "top-k, then top-p": ({"top_k": 5, "top_p": 0.8}, [0, 0.3, 0, 0.2, 0, 0, 0.25, 0]),
    # Logits are log-probabilities here, negative, so that what was seen is squared.
    "repetition penalty": (
        {"repetition_penalty": 2.0},
        [p**2 if i in SEEN else p for i, p in enumerate(PROBABILITIES)],
    ),
    "all at once": (
        {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.3, "repetition_penalty": 1.5},
        # Squared: 0.027 (seen: 0.3^3), 0.04, 0.0169, 0.0625. The first three make up 88% of the four.
        [0, 0.3**3, 0, 0.04, 0, 0, 0.0625, 0],
    ),
}


def first_step(rows, seen):
    """Of as many answers to a prompt of these tokens."""
    said = np.tile(np.int32(seen), (rows, 1))
    return History.of(said, 0, said, np.full(rows, 9))


@pytest.mark.parametrize("strategy", EXPECTED)
def test_draws_have_the_probabilities(strategy):
    settings, weights = EXPECTED[strategy]
    step, rules = first_step(DRAWS, SEEN), make_rules(DecodingConfig(**{"temperature": 1.0} | settings))
    logits = jnp.tile(jnp.log(jnp.array(PROBABILITIES)), (DRAWS, 1))
    tokens = jax.jit(choose)(logits, jax.random.split(jax.random.key(1), DRAWS), rules, step)
    counts, expected = np.bincount(tokens, minlength=8), DRAWS * np.array(weights) / np.sum(weights)
    drawn = expected > 0
    assert not counts[~drawn].any()
    assert stats.chisquare(counts[drawn], expected[drawn]).pvalue > 1e-3, (counts, expected)
    # A twentieth more or less would be seen.
    wrong = expected[drawn] * np.linspace(0.95, 1.05, drawn.sum())
    assert stats.chisquare(counts[drawn], wrong * DRAWS / wrong.sum()).pvalue < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1e-38])
def test_no_temperature_and_the_smallest_are_greedy_whatever_the_key(temperature):
    logits = jnp.array([[0.1, 3.0, 0.2], [200.0, 1.9, 0.0]])
    step, rules = first_step(2, [1]), make_rules(DecodingConfig(temperature=temperature))
    for seed in range(5):
        assert choose(logits, jax.random.split(jax.random.key(seed), 2), rules, step).tolist() == [1, 0]


@pytest.mark.deep
def test_what_has_no_probability_is_never_drawn(monkeypatch):
    """Sums in blocks rise by rounding where nothing is added: numbers that fall there must not draw that token."""
    logits = keep_top_k(jax.random.normal(jax.random.key(0), (16, 8000)) * 3, 50)
    sums = np.asarray(jnp.cumsum(jax.nn.softmax(logits, axis=-1), axis=-1))
    keys = jax.random.split(jax.random.key(0), 16)
    # The uniform numbers that hit the sums themselves, and their neighbours.
    for place in range(0, 8000, 160):
        for step in (-1, 0, 1):
            hit = np.minimum(np.nextafter(sums[:, place] / sums[:, -1], np.float32(step)), np.float32(1 - 2**-24))
            with monkeypatch.context() as patch:
                patch.setattr(jax, "vmap", lambda _, hit=hit: lambda keys: jnp.asarray(hit))
                tokens = draw(logits, keys)
            assert np.isfinite(np.asarray(logits)[np.arange(16), tokens]).all()


def test_ties_stay_together():
    logits = jnp.log(jnp.array([[0.3, 0.2, 0.2, 0.2, 0.1]]))
    for kept in (keep_top_k(logits, 2), keep_top_p(logits, 0.4), keep_min_p(logits, 0.6)):
        assert jnp.isfinite(kept).tolist() == [[True, True, True, True, False]]
