"""Scores translations against references: exact match, and BLEU and chrF as sacrebleu computes and reports them."""

from collections.abc import Sequence
from typing import NamedTuple

from jax_tformer.config.errors import require

_RUN = 4
"""BLEU compares runs of up to this many tokens, and is zero without any such run."""


class TranslationScores(NamedTuple):
    """The scores, with what others need to compare them."""

    exact_match: float
    """From 0 to 1: the fraction of answers that equal their reference, character by character."""
    bleu: float | None
    """From 0 to 100 (Papineni et al., 2002); None if it would be meaningless."""
    no_bleu: str | None
    """Why there is no BLEU; None if there is."""
    chrf: float
    """From 0 to 100 (Popović, 2015)."""
    lines: tuple[str, ...]
    """The lines to print: exact match, then the others as sacrebleu prints them, with their signatures."""
    signatures: tuple[str, ...]
    """How each score was computed, in sacrebleu's notation: tokenisation, smoothing, version ..."""


def translation_scores(answers: Sequence[str], references: Sequence[str]) -> TranslationScores:
    """Scores all `answers` together, each against its one reference.

    Leaves out BLEU if more than half of the references are shorter than the runs of four tokens that it compares:
    without any such run it is 0.00 however good the answers are, and with a few it says nothing about the rest.
    Raises InputError for an empty batch, and if the numbers of answers and references differ.
    """
    require(len(answers) > 0, "there are no translations; expected at least one")
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
    # force: prints no warning about texts that look tokenised.
    metrics = (CHRF(),) if no_bleu else (BLEU(force=True), CHRF())
    scores = [metric.corpus_score(list(answers), [list(references)]) for metric in metrics]
    signatures = tuple(str(metric.get_signature()) for metric in metrics)
    lines = [f"exact match {equal / count:.4f}: {equal:,} of {count:,}", *([f"no BLEU: {no_bleu}"] if no_bleu else [])]
    lines += [score.format(signature=signature) for score, signature in zip(scores, signatures, strict=True)]
    bleu = None if no_bleu else scores[0].score
    return TranslationScores(equal / count, bleu, no_bleu, scores[-1].score, tuple(lines), signatures)
