"""How translations are scored: exact match first, BLEU only where it means something."""

import re

import pytest
from sacrebleu import corpus_bleu

from jax_tformer.decoding.texts import translation_scores
from tests.refusals import refused

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
    measured = 2 * short <= len(targets)
    why = f"{short} of {len(targets)} references have fewer than 4 tokens, and BLEU compares runs of 4"
    assert (scores.exact_match, scores.no_bleu) == (1, None if measured else why)
    assert scores.bleu == (pytest.approx(100) if measured else None)
    exact, bleu, chrf = scores.lines
    assert exact == f"exact match 1.0000: {len(targets)} of {len(targets)}"
    assert bleu.startswith("BLEU|" if measured else f"no BLEU: {why}")
    assert chrf.startswith("chrF2|")
    assert len(scores.signatures) == 1 + measured


def test_it_is_the_references_that_decide():
    """A model that says too little is told so by its BLEU."""
    scores = translation_scores(["cat", "there is a dog"], LONG)
    assert (scores.exact_match, 0 < scores.bleu < 100) == (0.5, True)
    assert translation_scores(["cat", "dog"], LONG).bleu == 0


@pytest.mark.parametrize("answers, references", [([], []), (["a"], ["a", "b"])])
def test_what_cannot_be_scored(answers, references):
    with refused(r"translations"):
        translation_scores(answers, references)


def test_bleu_of_the_paper():
    """Parts of a compound may be right; a hyphen that stands alone, or ends a word, makes none."""
    references = ["das ist ein Rich-Text-Format , und es gilt", "er kam - wie gesagt - am Montag und sprach lange"]
    answers = ["das ist ein Rich-Text-Dokument , und es gilt", "er kam - wie gesagt - am Dienstag und sprach"]
    texts = answers, references
    split = [[text.replace("Rich-Text-", "Rich ##AT##-##AT## Text ##AT##-##AT## ") for text in side] for side in texts]
    # As multi-bleu.perl does it.
    whole, parts = (corpus_bleu(a, [b], smooth_method="none", tokenize="none", force=True) for a, b in (texts, split))
    scores = translation_scores(answers, references, split_compounds=True)
    assert scores.bleu == parts.score > whole.score
    assert "tok:none|smooth:none" in scores.signatures[0]
    assert translation_scores(["a-b c d"], ["x-y z u v"], split_compounds=True).bleu == 0, "nothing is smoothed"
