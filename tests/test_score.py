"""How translations are scored: exact match first, BLEU only where it means something."""

import re

import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.decoding.texts import translation_scores

LONG = ["the cat is on the mat", "there is a dog"]


@pytest.mark.parametrize(
    "targets",
    [
        ["x"],
        ["positive", "negative"],
        ["le nombre 12", ""],
        ["a b c", "d", LONG[0]],
        LONG,
        # A date has five tokens: three numbers and the hyphens between them.
        ["2021-03-03", "1999-12-31"],
        [*LONG, "x", "y"],
    ],
)
def test_bleu_is_where_half_the_references_have_four_tokens(targets):
    """It compares runs of up to four tokens; without any it is 0.00, however good the answers are."""
    scores = translation_scores(targets, targets)
    short = sum(len(re.findall(r"\w+|-", target)) < 4 for target in targets)
    assert scores.lines[0] == f"exact match 1.0000: {len(targets)} of {len(targets)}"
    assert scores.lines[2].startswith("chrF2|")
    if 2 * short <= len(targets):
        assert (scores.exact_match, scores.no_bleu) == (1, None)
        assert (scores.lines[1][:5], len(scores.signatures)) == ("BLEU|", 2)
        assert scores.bleu == pytest.approx(100)
    else:
        why = f"{short} of {len(targets)} references have fewer than 4 tokens, and BLEU compares runs of 4"
        assert (scores.exact_match, scores.bleu, scores.no_bleu) == (1, None, why)
        assert (scores.lines[1], len(scores.signatures)) == (f"no BLEU: {why}", 1)


def test_it_is_the_references_that_decide():
    """A model that says too little is told so by its BLEU."""
    scores = translation_scores(["cat", "there is a dog"], LONG)
    assert (scores.exact_match, 0 < scores.bleu < 100) == (0.5, True)
    assert translation_scores(["cat", "dog"], LONG).bleu == 0


@pytest.mark.parametrize(("answers", "references"), [([], []), (["a"], ["a", "b"])])
def test_what_cannot_be_scored(answers, references):
    with pytest.raises(InputError, match=r"translations"):
        translation_scores(answers, references)
