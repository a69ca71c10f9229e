"""How translations are scored: exact match first, BLEU only where it means something."""

import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.decoding.texts import translation_scores

LONG = ["the cat is on the mat", "there is a dog"]


@pytest.mark.parametrize("targets", [["x"], ["positive", "negative"], ["le nombre 12", ""], ["a b c", "d", LONG[0]]])
def test_perfect_short_targets_have_no_bleu_and_a_reason(targets):
    """BLEU compares runs of up to four tokens; without any it is 0.00, however good the answers are."""
    scores = translation_scores(targets, targets)
    assert (scores.exact_match, scores.bleu) == (1, None)
    assert scores.chrf > 66
    short = len(targets) - (LONG[0] in targets)
    why = f"{short} of {len(targets)} references have fewer than 4 tokens, and BLEU compares runs of 4"
    assert scores.no_bleu == why
    assert scores.lines[:2] == (f"exact match 1.0000: {len(targets)} of {len(targets)}", f"no BLEU: {why}")
    assert scores.lines[2].startswith("chrF2|")
    assert len(scores.signatures) == 1


@pytest.mark.parametrize("targets", [LONG, ["2021-03-03", "1999-12-31"], [*LONG, "x", "y"]])
def test_bleu_where_half_the_references_have_four_tokens(targets):
    """A date has five: three numbers and the hyphens between them."""
    scores = translation_scores(targets, targets)
    assert (scores.exact_match, scores.no_bleu) == (1, None)
    assert scores.bleu == pytest.approx(100)
    exact, bleu, chrf = scores.lines
    assert (exact[:11], bleu[:5], chrf[:6]) == ("exact match", "BLEU|", "chrF2|")
    assert len(scores.signatures) == 2


def test_it_is_the_references_that_decide():
    """A model that says too little is told so by its BLEU."""
    scores = translation_scores(["cat", "there is a dog"], LONG)
    assert scores.exact_match == 0.5
    assert scores.bleu is not None
    assert 0 < scores.bleu < 100
    assert translation_scores(["cat", "dog"], LONG).bleu == 0


@pytest.mark.parametrize(("answers", "references"), [([], []), (["a"], ["a", "b"])])
def test_what_cannot_be_scored(answers, references):
    with pytest.raises(InputError, match=r"translations"):
        translation_scores(answers, references)
