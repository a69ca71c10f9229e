"""How near translations come to references: BLEU and chrF, as sacrebleu computes and reports them."""

from collections.abc import Sequence
from typing import NamedTuple

from jax_tformer.config import require


class TranslationScores(NamedTuple):
    """Two scores, and how to report them so that others can compare."""

    bleu: float
    """From 0 to 100 (Papineni et al., 2002)."""
    chrf: float
    """From 0 to 100 (Popović, 2015)."""
    lines: tuple[str, ...]
    """Each score as sacrebleu prints it: its signature, the score, what it is made of."""
    signatures: tuple[str, ...]
    """How each score was computed, in sacrebleu's notation: tokenisation, smoothing, version ..."""


def translation_scores(answers: Sequence[str], references: Sequence[str]) -> TranslationScores:
    """Scores of all `answers` together, each against its one reference.

    Raises InputError for an empty batch, and for answers and references of different numbers.
    """
    require(len(answers) > 0, "there are no translations; expected one at least")
    require(
        len(answers) == len(references),
        f"there are {len(answers)} translations and {len(references)} references; expected as many of both",
    )
    from sacrebleu.metrics import BLEU, CHRF

    # force: no lines on standard error about texts that look tokenised.
    metrics = (BLEU(force=True), CHRF())
    scores = [metric.corpus_score(list(answers), [list(references)]) for metric in metrics]
    signatures = tuple(str(metric.get_signature()) for metric in metrics)
    lines = tuple(score.format(signature=signature) for score, signature in zip(scores, signatures, strict=True))
    return TranslationScores(scores[0].score, scores[1].score, lines, signatures)
