"""How tokens are chosen: 100,000 draws of each strategy against probabilities computed by hand, and its edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import DecodingConfig
from jax_tformer.decoding.sampling import History, Step, choose, draw, keep_min_p, keep_top_k, keep_top_p, make_rules

DRAWS = 100_000
PROBABILITIES = np.array([0.02, 0.3, 0.05, 0.2, 0.13, 0.01, 0.25, 0.04])
SEEN = np.array([False, True, False, False, False, True, False, False])


def step_after(said):
    """The first step behind prompts of the tokens `said`, `[N, P]`."""
    there = jnp.ones(said.shape, bool)
    return Step(jnp.asarray(0), jnp.full(len(said), 9), History.of(said, there, 0, (said, there)))


def normalised(weights):
    return np.asarray(weights) / np.sum(weights)


# By hand: what each strategy makes of PROBABILITIES.
EXPECTED = {
    "temperature 1": ({}, PROBABILITIES),
    "temperature 0.5": ({"temperature": 0.5}, PROBABILITIES**2),
    "temperature 2": ({"temperature": 2.0}, PROBABILITIES**0.5),
    "top-k": ({"top_k": 3}, [0, 0.3, 0, 0.2, 0, 0, 0.25, 0]),
    "top-k beyond the vocabulary": ({"top_k": 99}, PROBABILITIES),
    # 0.3 + 0.25 + 0.2 = 0.75 is not yet 0.8; 0.13 more are.
    "top-p": ({"top_p": 0.8}, [0, 0.3, 0, 0.2, 0.13, 0, 0.25, 0]),
    "top-p of one token": ({"top_p": 0.1}, np.eye(8)[1]),
    "top-p 1": ({"top_p": 1.0}, PROBABILITIES),
    # At least 0.3 * 0.4 = 0.12.
    "min-p": ({"min_p": 0.4}, [0, 0.3, 0, 0.2, 0.13, 0, 0.25, 0]),
    # The top 5 are made sure of first: of their sum 0.93, 0.75 is 81%.
    "top-k, then top-p": ({"top_k": 5, "top_p": 0.8}, [0, 0.3, 0, 0.2, 0, 0, 0.25, 0]),
    # Logits are log-probabilities here, negative, so that what was seen is squared.
    "repetition penalty": ({"repetition_penalty": 2.0}, np.where(SEEN, PROBABILITIES**2, PROBABILITIES)),
    "all at once": (
        {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.3, "repetition_penalty": 1.5},
        # Squared: 0.027 (seen: 0.3^3), 0.04, 0.0169, 0.0625. The first three make up 88% of the four.
        [0, 0.3**3, 0, 0.04, 0, 0, 0.0625, 0],
    ),
}


@pytest.mark.parametrize("strategy", EXPECTED)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_draws_have_the_probabilities(strategy, dtype):
    settings, weights = EXPECTED[strategy]
    probabilities, decoding = normalised(weights), DecodingConfig(**{"temperature": 1.0} | settings)
    with jax.enable_x64(dtype == "float64"):
        logits = jnp.tile(jnp.asarray(np.log(PROBABILITIES), dtype), (DRAWS, 1))
        said = jnp.tile(jnp.flatnonzero(SEEN), (DRAWS, 1))
        keys = jax.random.split(jax.random.key(1), DRAWS)
        tokens = jax.jit(choose)(logits, keys, make_rules(decoding), step_after(said))
    counts = np.bincount(np.asarray(tokens), minlength=8)
    assert counts[probabilities == 0].sum() == 0
    drawn = probabilities > 0
    if drawn.sum() > 1:
        test = stats.chisquare(counts[drawn], probabilities[drawn] * DRAWS)
        assert test.pvalue > 1e-3, (counts, probabilities * DRAWS)


def test_a_wrong_probability_is_seen():
    counts = np.bincount(np.random.default_rng(0).choice(8, DRAWS, p=PROBABILITIES), minlength=8)
    wrong = normalised(PROBABILITIES + np.eye(8)[2] * 0.005)
    assert stats.chisquare(counts, PROBABILITIES * DRAWS).pvalue > 1e-3
    assert stats.chisquare(counts, wrong * DRAWS).pvalue < 1e-6


def test_temperature_zero_is_greedy_whatever_the_key():
    logits = jnp.array([[0.1, 3.0, 0.2], [2.0, 1.9, 0.0], [1.0, 5.0, 5.0]])
    for seed in range(5):
        keys = jax.random.split(jax.random.key(seed), 3)
        assert choose(logits, keys, make_rules(DecodingConfig()), step_after(jnp.zeros((3, 1), int))).tolist() == [
            1,
            0,
            1,
        ]


def test_the_smallest_temperature_is_greedy():
    logits = jnp.array([[0.1, 3.0, 0.2], [200.0, 1.9, 0.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    assert choose(
        logits, keys, make_rules(DecodingConfig(temperature=1e-38)), step_after(jnp.zeros((2, 1), int))
    ).tolist() == [1, 0]


@pytest.mark.deep
def test_what_has_no_probability_is_never_drawn(monkeypatch):
    """Sums in blocks rise by rounding where nothing is added: numbers that fall there must not draw that token."""
    logits = keep_top_k(jax.random.normal(jax.random.key(0), (16, 8000)) * 3, 50)
    sums = np.asarray(jnp.cumsum(jax.nn.softmax(logits, axis=-1), axis=-1))
    # The uniform numbers that hit the sums themselves, and their neighbours.
    for place in range(0, 8000, 160):
        for step in (-1, 0, 1):
            hit = np.minimum(np.nextafter(sums[:, place] / sums[:, -1], np.float32(step)), np.float32(1 - 2**-24))
            monkeypatch.setattr(jax, "vmap", lambda _, hit=hit: lambda keys: jnp.asarray(hit))
            tokens = np.asarray(draw(logits, jax.random.split(jax.random.key(0), 16)))
            monkeypatch.undo()
            assert np.isfinite(np.asarray(logits)[np.arange(16), tokens]).all()


def test_ties_stay_together():
    logits = jnp.log(jnp.array([[0.3, 0.2, 0.2, 0.2, 0.1]]))
    for kept in (keep_top_k(logits, 2), keep_top_p(logits, 0.4), keep_min_p(logits, 0.6)):
        assert jnp.isfinite(kept).tolist() == [[True, True, True, True, False]]


def test_top_p_equals_a_sort():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (50, 300)).astype(np.float32)
    for p in (0.01, 0.5, 0.9, 0.999):
        kept = np.isfinite(np.asarray(keep_top_p(jnp.asarray(logits), p)))
        for row, mask in zip(logits.astype(np.float64), kept, strict=True):
            order = np.argsort(-row)
            before = np.cumsum(normalised(np.exp(row - row.max()))[order]) - normalised(np.exp(row - row.max()))[order]
            certain = np.abs(before - p) > 1e-5
            assert (mask[order] == (before < p))[certain].all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0; expected a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0; expected a finite number above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5; expected a number above 0 and at most 1"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p is -0.1"),
        ({"top_k": 5, "top_p": 0.5}, "top_k is 5; expected none at temperature 0, where nothing is drawn"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1; expected a whole number of at least 0"),
        ({"encoder_no_repeat_ngram_size": -1}, "encoder_no_repeat_ngram_size is -1; expected a whole number"),
        ({"begin_suppress_tokens": (3, -1)}, r"begin_suppress_tokens is \(3, -1\); expected a tuple of ids"),
        (
            {"bad_words_ids": ((1, 2), ())},
            r"bad_words_ids is \(\(1, 2\), \(\)\); expected a tuple of words, each a tuple of one",
        ),
        ({"bad_words_ids": ((1, -2),)}, r"bad_words_ids is \(\(1, -2\),\); expected a tuple of words"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_beams": 2, "temperature": 1.0}, "temperature is 1; expected 0 with a beam search"),
        (
            {"num_beams": 2, "num_return_sequences": 3},
            "num_return_sequences is 3; expected at most 2, the number of beams",
        ),
        ({"num_return_sequences": 3}, "num_return_sequences is 3; expected 1 at temperature 0"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(InputError, match=message):
        DecodingConfig(**settings)
