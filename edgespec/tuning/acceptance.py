"""Acceptance by depth and rank: of all drafts whose parent was accepted, how many were accepted.

Knows trees and accepted paths. Knows no engine and no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgespec.tuning.steps import SampledStep

FEWEST = 5  # steps that must have reached a depth before its rates are used


class AcceptanceCounts:
    """How often each rank was accepted at each depth. The rank of a node is its place among its
    siblings, whom a drafter gives in the order of their probability.

    A rank that a tree left out, as too improbable, counts as not accepted where its parent had
    children; a parent without any says nothing.
    """

    def __init__(self) -> None:
        self.tries: list[int] = []  # by depth, the first drafts at 0
        self.hits: list[dict[int, int]] = []  # by depth: rank -> accepted

    @classmethod
    def of(cls, steps: Iterable[SampledStep]) -> AcceptanceCounts:
        """The counts of all steps."""
        counts = cls()
        for step in steps:
            counts.learn(step)
        return counts

    def learn(self, step: SampledStep) -> None:
        """Take in a step."""
        for depth, node in enumerate(step.path):
            children = step.children[node]
            if not children:
                return
            if depth == len(self.tries):
                self.tries.append(0)
                self.hits.append({})
            self.tries[depth] += 1
            if depth + 1 < len(step.path):
                rank = children.index(step.path[depth + 1])
                self.hits[depth][rank] = self.hits[depth].get(rank, 0) + 1

    def rates(self, ranks: int, fewest: int = FEWEST) -> list[list[float]]:
        """[depth][rank], as deep as `fewest` steps reached; the ranks from 0 to `ranks` - 1."""
        rows = []
        for tries, hits in zip(self.tries, self.hits, strict=True):
            if tries < fewest:
                break
            rows.append([hits.get(rank, 0) / tries for rank in range(ranks)])
        return rows


def by_depth(lengths: Sequence[int], levels: int, fewest: int = FEWEST) -> list[float]:
    """The acceptance at depths 1 to `levels`, from the number of drafts that each step accepted of
    a plan; as deep as `fewest` steps reached."""
    rates = []
    for depth in range(1, levels + 1):
        reached = sum(length >= depth - 1 for length in lengths)
        if reached < fewest:
            break
        rates.append(sum(length >= depth for length in lengths) / reached)
    return rates
