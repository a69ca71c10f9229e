"""How translations are scored: exact match first, BLEU only where it means something."""

import re
from collections import Counter

import numpy as np
import pytest

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


@pytest.mark.parametrize("answers, references", [([], []), (["a"], ["a", "b"])])
def test_what_cannot_be_scored(answers, references):
    with refused(r"translations"):
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
