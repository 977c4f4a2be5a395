"""The order of candidates by the cost model: what each brings in the sample, and what its steps
cost.

Knows costs and steps. There is one valuation, that of `runtime.cost_model`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from edgespec.runtime.costs.cost_model import StepCosts
from edgespec.tuning.acceptance import by_depth
from edgespec.tuning.candidates import Candidate
from edgespec.tuning.replay import DraftedStep

ALIKE = 0.005  # relative: of speeds that are predicted so near the simpler plan is ranked first


@dataclass(frozen=True)
class Ranked:
    """A candidate and its prediction: speed over plain decoding, nodes and levels of a step, tokens
    that it emits, on average. `prior` is the acceptance of its drafts by depth."""

    candidate: Candidate
    over_plain: float
    nodes: float
    levels: float
    tokens: float
    prior: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As a journal and a report have it."""
        return {
            **self.candidate.to_dict(),
            "words": self.candidate.words,
            "predicted": self.over_plain,
            "nodes": self.nodes,
            "levels": self.levels,
            "tokens": self.tokens,
            "prior": [*self.prior],
        }


def valued(
    candidate: Candidate, steps: Sequence[DraftedStep], costs: StepCosts, own_s: float = 0.0
) -> Ranked:
    """A candidate by the steps that it would make. `own_s` are seconds of a step that the costs do
    not have, such as those of a drafter without an engine."""
    tokens = sum(step.tokens for step in steps)
    spent = sum(seconds(step, costs) + own_s for step in steps)
    return Ranked(
        candidate,
        tokens * costs.plain / spent,
        fmean(step.nodes for step in steps),
        fmean(step.levels for step in steps),
        tokens / len(steps),
        tuple(by_depth([step.tokens - 1 for step in steps], candidate.plan.steps)),
    )


def seconds(step: DraftedStep, costs: StepCosts) -> float:
    """What a step costs."""
    if not step.levels:
        return costs.passes[step.nodes]
    levels = min(step.levels, len(costs.propose) - 1)
    nodes = min(step.nodes, len(costs.passes) - 1)
    return costs.step(nodes, levels, step.tokens)


def in_order(ranked: Iterable[Ranked]) -> list[Ranked]:
    """The fastest first; of those that are predicted alike the simplest."""
    rows = sorted(ranked, key=lambda row: -row.over_plain)
    ordered = list[Ranked]()
    while rows:
        least = rows[0].over_plain * (1 - ALIKE)
        near = [row for row in rows if row.over_plain >= least]
        best = min(near, key=lambda row: row.candidate.complexity)
        ordered.append(best)
        rows.remove(best)
    return ordered


def to_measure(ranked: Sequence[Ranked], count: int) -> list[Ranked]:
    """The `count` candidates that are measured: the best of each family first, then whatever is
    best; of several one at least is of the engine's own drafter. With the best fixed plan of that
    comes its adaptive twin, where it is ranked and there is room."""
    if count < 1:
        return []
    known, first, rest = set[str](), list[Ranked](), list[Ranked]()
    for row in ranked:
        (rest if row.candidate.family in known else first).append(row)
        known.add(row.candidate.family)
    chosen = (first + rest)[:count]
    own = next((row for row in first if row.candidate.own), None)
    if own is not None and count > 1 and not any(row.candidate.own for row in chosen):
        chosen[-1] = own
    fixed = next((row for row in chosen if row.candidate.family == "fixed"), None)
    by_candidate = {row.candidate: row for row in ranked}
    twin = None if fixed is None else by_candidate.get(fixed.candidate.twin)
    if twin is not None and twin not in chosen and len(first) < count:
        chosen[-1] = twin
    return sorted(chosen, key=lambda row: -row.over_plain)
