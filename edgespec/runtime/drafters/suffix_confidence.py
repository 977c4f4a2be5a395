"""Which drafts pay: how probable one is, by how many tokens matched before it, and what a row of a
base pass costs.

Knows counts and costs. Knows no tokens and no clock: the same text and the same model of costs give
the same drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

# Matches of at least so many tokens are one class, up to the next number; and of each those that
# occurred once, twice or three times, and more often
SIZES = (1, 2, 3, 4, 6, 9, 14, 24)
COUNTS = (1, 2, 4)
# How often the token that followed such a match most often follows again, over how often it should
# by its share of the counts: measured on Python files and README files, a word a token
PRIOR = (
    *(0.18, 0.29, 0.50),
    *(0.38, 0.56, 0.73),
    *(0.48, 0.69, 0.83),
    *(0.65, 0.80, 0.89),
    *(0.75, 0.87, 0.91),
    *(0.83, 0.92, 0.95),
    *(0.88, 0.93, 0.96),
    *(0.93, 0.95, 0.98),
)
PRIOR_WEIGHT = 8.0  # predictions that the prior counts for
DECAY = 0.99  # of what was seen, a prediction: old ones count less


def class_of(size: int, count: int) -> int:
    """The class of a match of `size` tokens that was followed by something `count` times, both 1 or
    more."""
    return len(COUNTS) * (bisect_right(SIZES, size) - 1) + bisect_right(COUNTS, count) - 1


@dataclass
class Confidence:
    """How far the counts of a sequence can be trusted, learnt from its own tokens: each is compared
    with what the counts predicted, whether that was drafted or not."""

    hits: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT * share for share in PRIOR])
    expected: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT] * len(PRIOR))

    def trust(self, size: int, count: int) -> float:
        """What the share of a continuation is multiplied by for its probability."""
        kind = class_of(size, count)
        return min(1.0, self.hits[kind] / self.expected[kind])

    def learn(self, size: int, count: int, share: float, *, hit: bool) -> None:
        """Take in whether a match's most frequent continuation, with this share of its counts, came
        true."""
        kind = class_of(size, count)
        self.hits[kind] = DECAY * self.hits[kind] + hit
        self.expected[kind] = DECAY * self.expected[kind] + share


@dataclass
class Pace:
    """Tokens that a sequence gets for the time of a plain step, by the model of costs: a pass over
    n rows takes 1 + (n - 1) * row_cost plain steps. Of the last few dozen steps, most of all."""

    row_cost: float
    tokens: float = 8.0
    cost: float = 8.0

    def add(self, tokens: int, rows: int) -> None:
        """Take in a step: the tokens that it gave, and the rows that were verified."""
        self.tokens = 0.98 * self.tokens + tokens
        self.cost = 0.98 * self.cost + 1 + self.row_cost * (rows - 1)

    @property
    def rate(self) -> float:
        """Tokens for a plain step's time; 1 is plain decoding."""
        return max(1.0, self.tokens / self.cost)

    def least_probability(self, batch_size: int) -> float:
        """From which probability on a draft pays: it takes row_cost of a plain step, in which the
        batch would otherwise get tokens at its present rate (renewal-reward: a row pays if what it
        gives per time is more than the average)."""
        plain = batch_size / (1 + self.row_cost * (batch_size - 1))
        return min(1.0, self.row_cost * plain * self.rate)
