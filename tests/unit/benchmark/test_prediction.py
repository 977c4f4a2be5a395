"""What the cost model says of a plan, against cases that were computed by hand."""

from __future__ import annotations

import pytest

from edgespec.benchmark.cases import Cell, DecodingVariant
from edgespec.benchmark.prediction import Step, predicted_speed
from edgespec.benchmark.synthetic import Dial
from edgespec.contract import Role
from edgespec.runtime.costs.cost_model import CostModel
from edgespec.runtime.costs.cost_profile import CostProfile, ObserveTime, PassTime, ProposeTime
from edgespec.runtime.trees.tree import DraftPlan

CELL = Cell(100, 56, 1)
# A plain step takes 10 ms, each further row 1 ms, a level 1 ms, an observed token nothing
PROFILE = CostProfile(
    role=Role.BASE,
    base=tuple(
        PassTime(rows=rows, context=128, batch=1, seconds=0.009 + 0.001 * rows)
        for rows in (1, 2, 4, 8, 60)
    ),
    method="eagle3",
    propose=tuple(
        ProposeTime(levels=levels, top_k=1, context=128, batch=1, seconds=0.001 * levels)
        for levels in (1, 2, 4, 8)
    ),
    observe=(ObserveTime(rows=1, context=128, batch=1, seconds=0.0),),
)
COSTS = CostModel(PROFILE)


def predicted(variant: DecodingVariant, steps: list[Step], rates: list[float]) -> float | None:
    return predicted_speed(COSTS, variant, CELL, prompt_tokens=100.0, steps=steps, acceptance=rates)


def test_fixed_plan_costs_what_its_steps_do() -> None:
    """Three drafts take 10 + 3 + 3 ms, one draft 12 ms: 6 tokens in 28 ms, plain in 60."""
    chain = DecodingVariant(DraftPlan(1, 3, 4))
    assert predicted(chain, [Step(3, 3, 4), Step(1, 1, 2)], []) == pytest.approx(60 / 28)
    assert predicted(chain, [Step(0, 0, 1)], []) == pytest.approx(1)
    assert predicted(chain, [Step(3, 3, 1)], []) == pytest.approx(10 / 16)


def test_adaptive_plan_is_worth_the_best_chain() -> None:
    """At 0.9 eight drafts: 1 + 0.9 + ... + 0.9^8 tokens in 26 ms; at 0 none."""
    plan, steps = DraftPlan(1, 8, 9, adaptive=True), [Step(1, 1, 1)]
    tokens = sum(0.9**depth for depth in range(9))
    best = max(sum(0.9**d for d in range(n + 1)) * 10 / (10 + 2 * n) for n in range(9))
    assert best >= tokens * 10 / 26
    assert predicted(DecodingVariant(plan, Dial((0.9,))), steps, []) == pytest.approx(best)
    assert predicted(DecodingVariant(plan, Dial((0.0,))), steps, [1.0]) == pytest.approx(1)
    # measured: 0.5, then 0.9 for sure not enough to go on
    assert predicted(DecodingVariant(plan), steps, [0.5]) == pytest.approx(1.5 * 10 / 12)


def test_nothing_is_predicted_without_costs_plan_or_steps() -> None:
    chain = DecodingVariant(DraftPlan(1, 3, 4))
    assert predicted(DecodingVariant(), [Step(0, 0, 1)], []) is None
    assert predicted(chain, [], []) is None
    assert (
        predicted_speed(None, chain, CELL, prompt_tokens=1, steps=[Step(1, 1, 1)], acceptance=[])
        is None
    )
