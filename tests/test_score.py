"""How translations are scored: exact match first, BLEU only where it means something."""

from collections import Counter

import numpy as np
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


def multi_bleu(answers, references):
    """What Moses's multi-bleu.perl computes, written out: precisions of 1 to 4 words in a row, and brevity."""
    right, all_of_them, lengths = np.zeros(4), np.zeros(4), np.zeros(2)
    for answer, reference in zip(answers, references, strict=True):
        lengths += len(answer.split()), len(reference.split())
        for n in range(4):
            runs = [[text.split()[start:] for start in range(n + 1)] for text in (answer, reference)]
            found, wanted = (Counter(zip(*words, strict=False)) for words in runs)
            right[n] += (found & wanted).total()
            all_of_them[n] += found.total()
    return 100 * min(1, np.exp(1 - lengths[1] / lengths[0])) * np.exp(np.log(right / all_of_them).mean())


def test_bleu_of_the_paper():
    """Parts of a compound may be right; a hyphen that stands alone, or ends a word, makes none."""
    references = ["das ist ein Rich-Text-Format , und es gilt", "er kam - wie gesagt - am Montag und sprach lange"]
    answers = ["das ist ein Rich-Text-Dokument , und es gilt", "er kam - wie gesagt - am Dienstag und sprach"]
    split = lambda text: text.replace("Rich-Text-", "Rich ##AT##-##AT## Text ##AT##-##AT## ")  # noqa: E731
    scores = translation_scores(answers, references, split_compounds=True)
    assert scores.bleu == pytest.approx(multi_bleu(map(split, answers), map(split, references)), rel=1e-9)
    assert scores.bleu > multi_bleu(answers, references)
    assert "tok:none|smooth:none" in scores.signatures[0]
    assert translation_scores(["a-b c d"], ["x-y z u v"], split_compounds=True).bleu == 0, "nothing is smoothed"
