"""How near translations come to references: exact match, and BLEU and chrF as sacrebleu computes and reports them."""

from collections.abc import Sequence
from typing import NamedTuple

from jax_tformer.errors import require

_RUN = 4
"""BLEU compares runs of up to so many tokens, and is zero without any."""


class TranslationScores(NamedTuple):
    """Scores, and how to report them so that others can compare."""

    exact_match: float
    """From 0 to 1: the share of answers that are their reference, character by character."""
    bleu: float | None
    """From 0 to 100 (Papineni et al., 2002); None where it would mean nothing."""
    no_bleu: str | None
    """Why there is no BLEU; None where there is."""
    chrf: float
    """From 0 to 100 (Popović, 2015)."""
    lines: tuple[str, ...]
    """What to print: exact match first, then the others as sacrebleu prints them, with their signatures."""
    signatures: tuple[str, ...]
    """How each score was computed, in sacrebleu's notation: tokenisation, smoothing, version ..."""


def translation_scores(answers: Sequence[str], references: Sequence[str]) -> TranslationScores:
    """Scores of all `answers` together, each against its one reference.

    BLEU is left out where more than half of the references are shorter than the runs of four tokens that it compares:
    without any such run it is 0.00 however good the answers are, and with a few it says nothing about the rest.
    Raises InputError for an empty batch, and for answers and references of different numbers.
    """
    require(len(answers) > 0, "there are no translations; expected one at least")
    require(
        len(answers) == len(references),
        f"there are {len(answers)} translations and {len(references)} references; expected as many of both",
    )
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    count, tokens = len(answers), Tokenizer13a()
    equal = sum(answer == reference for answer, reference in zip(answers, references, strict=True))
    short = sum(len(tokens(reference).split()) < _RUN for reference in references)
    no_bleu = None
    if 2 * short > count:
        no_bleu = f"{short:,} of {count:,} references have fewer than {_RUN} tokens, and BLEU compares runs of {_RUN}"
    # force: no lines on standard error about texts that look tokenised.
    metrics = (CHRF(),) if no_bleu else (BLEU(force=True), CHRF())
    scores = [metric.corpus_score(list(answers), [list(references)]) for metric in metrics]
    signatures = tuple(str(metric.get_signature()) for metric in metrics)
    lines = [f"exact match {equal / count:.4f}: {equal:,} of {count:,}", *([f"no BLEU: {no_bleu}"] if no_bleu else [])]
    lines += [score.format(signature=signature) for score, signature in zip(scores, signatures, strict=True)]
    bleu = None if no_bleu else scores[0].score
    return TranslationScores(equal / count, bleu, no_bleu, scores[-1].score, tuple(lines), signatures)
