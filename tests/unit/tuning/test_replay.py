"""What plans would have brought in a step, against trees that are cut by hand and the policy."""

from __future__ import annotations

import pytest

from edgespec.runtime.costs.cost_model import CostModel
from edgespec.runtime.plans.policy import AdaptivePolicy
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan
from edgespec.tuning.replay import DraftedStep, adapted, replayed
from edgespec.tuning.steps import SampledStep
from tests.unit.tuning.costs import profile

# 1 and 2 below the root, 3 and 4 below 1, 5 below 2, 6 below 3
PARENTS = (-1, 0, 0, 1, 1, 2, 3)
PROBS = (1.0, 0.6, 0.35, 0.5, 0.4, 0.9, 0.8)


def step(*path: int, context: int = 10) -> SampledStep:
    return SampledStep(PARENTS, PROBS, path, context)


@pytest.mark.parametrize(
    ("plan", "path", "drafted"),
    [
        (DraftPlan(1, 2, 3), (0, 1, 3, 6), DraftedStep(3, 2, 3)),  # of three accepted drafts two
        (DraftPlan(1, 3, 4), (0, 1, 4), DraftedStep(4, 3, 2)),  # the second is of rank 1
        (DraftPlan(1, 3, 4), (0, 2, 5), DraftedStep(4, 3, 1)),
        (DraftPlan(2, 1, 3), (0, 2, 5), DraftedStep(3, 1, 2)),
        # 0.6, 0.35, 0.3, 0.24, 0.315: all but 4 are kept
        (DraftPlan(2, 2, 5), (0, 2, 5), DraftedStep(5, 2, 3)),
        (DraftPlan(2, 2, 5), (0, 1, 4), DraftedStep(5, 2, 2)),
        (DraftPlan(2, 2, 3), (0, 2, 5), DraftedStep(3, 2, 2)),
        (StaticPlan.of([[0], [1], [1, 0]]), (0, 2, 5), DraftedStep(4, 2, 3)),
        (StaticPlan.of([[0], [1], [1, 0]]), (0, 1, 3), DraftedStep(4, 2, 2)),
    ],
)
def test_a_plan_is_cut_out_of_the_wide_tree(
    plan: DraftPlan, path: tuple[int, ...], drafted: DraftedStep
) -> None:
    assert replayed([step(*path)], plan) == [drafted]


def test_blocks_go_on_with_all_nodes() -> None:
    """A drafter that goes level by level leaves out the children of 4, which is the third best of
    its level."""
    deep = SampledStep((*PARENTS, 4), (*PROBS, 0.9), (0, 1, 4, 7), 10)
    assert replayed([deep], DraftPlan(2, 3, 8)) == [DraftedStep(8, 3, 3)]
    assert replayed([deep], BlockPlan(2, 3, 8), beams=False) == [DraftedStep(8, 3, 4)]


def test_the_policy_stops_where_drafts_are_dear_and_goes_on_where_they_are_cheap() -> None:
    answer = [step(0, 1, 3, 6, context=10 + 4 * i) for i in range(20)]
    missed = [step(0, context=10 + i) for i in range(80)]
    plan = DraftPlan(2, 3, 7, adaptive=True)
    cheap = AdaptivePolicy(CostModel(profile(row=0.01, draft=0.01)))
    steps = adapted([answer], plan, cheap)
    assert sum(s.tokens for s in steps) >= 80
    assert sum(s.tokens for s in steps) / len(steps) > 2
    dear = AdaptivePolicy(CostModel(profile(row=0.5, draft=1.0)))
    plain = adapted([missed], plan, dear)
    assert sum(s.nodes == 1 for s in plain) > 0.9 * len(plain)


def test_the_policy_is_the_same_each_time() -> None:
    answer = [step(0, 1, context=10 + 2 * i) for i in range(30)]
    policy = AdaptivePolicy(CostModel(profile(row=0.05, draft=0.2)))
    plan = DraftPlan(2, 3, 7, adaptive=True)
    assert adapted([answer], plan, policy) == adapted([answer], plan, policy)


def test_the_policy_is_given_the_drafts_of_the_step_that_begins_where_it_stands() -> None:
    """Of two steps the first accepts all of its drafts, the second none."""
    answer = [step(0, 1, 3, 6, context=10), step(0, context=14)]
    policy = AdaptivePolicy(CostModel(profile(row=0.01, draft=0.01)))
    first, second = adapted([answer], DraftPlan(2, 3, 7, adaptive=True), policy)
    assert (first.tokens, second.tokens) == (4, 1)
