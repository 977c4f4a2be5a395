"""Acceptance by depth and rank: of all drafts whose parent was accepted, how many were accepted.

Knows trees and accepted paths. Knows no engine and no cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count, takewhile

from edgespec.tuning.steps import SampledStep

FEWEST = 5  # steps that must have reached a depth before its rates are used


def by_depth_and_rank(
    steps: Iterable[SampledStep], ranks: int, fewest: int = FEWEST
) -> list[list[float]]:
    """[depth][rank], as deep as `fewest` steps reached; the ranks from 0 to `ranks` - 1. The rank
    of a node is its place among its siblings, whom a drafter gives in the order of their
    probability.

    A rank that a tree left out, as too improbable, counts as not accepted where its parent had
    children; a parent without any says nothing.
    """
    tries, hits = Counter[int](), Counter[tuple[int, int]]()
    for step in steps:
        tries.update(depth for depth, node in enumerate(step.path) if step.children[node])
        hits.update(enumerate(step.ranks))
    depths = takewhile(lambda depth: tries[depth] >= fewest, count())
    return [[hits[depth, rank] / tries[depth] for rank in range(ranks)] for depth in depths]


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
