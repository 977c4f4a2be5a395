"""ROUGE of summaries (Lin, 2004), by the library that the field reports with.

Knows texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from edgespec.errors import MissingDependency

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def check_installed() -> None:
    """Raises MissingDependency where the library is not there; it is asked before any work."""
    try:
        import rouge_score.rouge_scorer  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "ROUGE needs rouge-score, which is not installed.", "pip install edgespec[eval]"
        ) from error


def rouge(answers: Sequence[str], summaries: Sequence[str]) -> dict[str, float]:
    """The mean F-measure of each kind, from 0 to 100, over pairs of an answer and the summary that
    people wrote. Words are not stemmed; for rougeLsum each line is a sentence."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(KINDS), use_stemmer=False)
    scores = [
        scorer.score(target=summary, prediction=answer)
        for answer, summary in zip(answers, summaries, strict=True)
    ]
    return {kind: 100 * fmean(score[kind].fmeasure for score in scores) for kind in KINDS}
