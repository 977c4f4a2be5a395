"""Whether drafts are accepted more often than one guess without a draft would be; if not, why that
may be.

Knows the metrics and tokens of requests that drafted. Knows no engine: what is wrong with a pair is
found by `edgespec check --probe`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import command, counted
from edgespec.runtime.loop.metrics import RequestMetrics

MIN_STEPS = 24  # with drafts; fewer say nothing
CERTAIN = 0.01  # by chance, acceptance that is better than the guess's is taken for it so seldom
GOOD = 0.5  # acceptance above it is no fault, however uniform the answers are
NEXT = f"{command('check', 'BASE', 'DRAFT', probe=True)} says which"
CAUSES = (
    "the draft was made for another base",
    "it reads other layers of the base than it was trained on (aux layers)",
    "its vocabulary is another one, or its d2t maps to other ids",
    "quantization has damaged the base or the draft",
    "the requests are in a thinking mode that the draft was not trained in",
)


@dataclass(frozen=True, slots=True)
class NoBetterThanChance:
    """Of `steps` with drafts so many `accepted` their first draft, as many as always guessing the
    answers' own most frequent token may get: it is right with the probability `guess`."""

    steps: int
    accepted: int
    guess: float

    @classmethod
    def of(
        cls, drafted: Sequence[RequestMetrics], answers: Sequence[Sequence[int]]
    ) -> NoBetterThanChance | None:
        """That of requests that drafted, and of the tokens of their answers; None where acceptance
        is better than the guess's (one-sided binomial test at 99 %), or too few steps drafted."""
        first = [accepted > 0 for request in drafted for accepted in request.drafting_steps]
        steps, accepted = len(first), sum(first)
        if steps < MIN_STEPS or accepted > GOOD * steps:
            return None
        counts = Counter(token for answer in answers for token in answer)
        guess = max(counts.values()) / counts.total()
        if at_least(accepted, steps, guess) <= CERTAIN:
            return None
        return cls(steps, accepted, guess)

    @property
    def lines(self) -> list[str]:
        """For the user: the figures, the likely causes and the next step."""
        return [
            (
                f"drafts are no better than chance: {self.accepted} of"
                f" {counted(self.steps, 'first draft')} accepted, and always guessing the answers'"
                f" most frequent token is right in {self.guess:.0%}"
            ),
            f"  likely causes: {'; '.join(CAUSES)}. {NEXT}.",
        ]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of a summary."""
        return {
            "steps_with_drafts": self.steps,
            "first_drafts_accepted": self.accepted,
            "most_frequent_token_share": self.guess,
            "likely_causes": [*CAUSES],
            "next": NEXT,
        }


def at_least(hits: int, tries: int, prob: float) -> float:
    """The probability of at least so many hits in independent tries (binomial upper tail)."""
    if hits <= 0:
        return 1.0
    if prob <= 0 or prob >= 1:
        return float(prob > 0)
    terms = []
    for k in range(hits, tries + 1):
        ways = math.lgamma(tries + 1) - math.lgamma(k + 1) - math.lgamma(tries - k + 1)
        terms.append(math.exp(ways + k * math.log(prob) + (tries - k) * math.log1p(-prob)))
    return min(1.0, math.fsum(terms))
