"""The order of candidates: by the cost model, against brute force, and which are measured."""

from __future__ import annotations

from itertools import combinations

import pytest

from edgespec.runtime.costs.cost_model import CostModel, best_chain, best_static_tree, chosen
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import DraftPlan
from edgespec.tuning.acceptance import by_depth_and_rank
from edgespec.tuning.candidates import Candidate, chains, static_trees, trees, wide_plan
from edgespec.tuning.ranking import Ranked, in_order, to_measure, valued
from edgespec.tuning.replay import DraftedStep, replayed
from edgespec.tuning.steps import SampledStep
from tests.unit.tuning.costs import profile

LIMITS = TreeLimits(60, 60, 1000, static_trees=True)
MODEL = CostModel(profile(row=0.1, draft=0.2))
COSTS = MODEL.at(64)


def full_step(path: tuple[int, ...]) -> SampledStep:
    """A whole tree of two ranks on three levels, and the accepted ranks."""
    parents, at = [-1], {(): 0}
    for depth in range(3):
        for above in [ranks for ranks in at if len(ranks) == depth]:
            for rank in range(2):
                at[*above, rank] = len(parents)
                parents.append(at[above])
    nodes = tuple(at[path[:depth]] for depth in range(len(path) + 1))
    return SampledStep(tuple(parents), None, nodes, 64)


STEPS = (
    [full_step((0, 0, 0))] * 8
    + [full_step((0, 0))] * 4
    + [full_step((0, 1))] * 4
    + [full_step((1,))] * 6
    + [full_step(())] * 10
)


def test_the_value_is_that_of_the_cost_model() -> None:
    plan = DraftPlan(1, 2, 3)
    row = valued(Candidate("eagle3", plan), replayed(STEPS, plan), COSTS)
    tokens = 1 + (16 + 12) / 32
    assert row.tokens == pytest.approx(tokens)
    assert row.over_plain == pytest.approx(chosen(COSTS, 2, 3, tokens).over_plain)
    assert row.over_plain == pytest.approx(tokens / 1.6)  # 1 + 2 rows * 0.1 + 2 levels * 0.2
    assert row.prior == pytest.approx((16 / 32, 12 / 16))


def test_a_step_without_drafts_costs_a_plain_one() -> None:
    row = valued(
        Candidate("ngram", DraftPlan(1, 3, 4), own=False), [DraftedStep(1, 0, 1)] * 4, COSTS
    )
    assert row.over_plain == pytest.approx(1.0)


def test_the_seconds_of_a_drafter_itself_count() -> None:
    steps = [DraftedStep(1, 0, 1)] * 4
    row = valued(Candidate("ngram", DraftPlan(1, 3, 4), own=False), steps, COSTS, own_s=1.0)
    assert row.over_plain == pytest.approx(0.5)


def test_the_best_chain_is_that_of_the_model() -> None:
    plans = [*chains(LIMITS, 3)]
    rows = [valued(Candidate("eagle3", p), replayed(STEPS, p), COSTS) for p in plans]
    assert rows[-1].prior == pytest.approx((16 / 32, 12 / 16, 8 / 12))
    best = best_chain(COSTS, rows[-1].prior)
    first = max(rows, key=lambda row: row.over_plain)
    assert first.candidate.plan.steps == best.levels
    assert first.over_plain == pytest.approx(best.over_plain)


def test_the_fitted_static_tree_is_the_best_of_all_by_its_acceptance() -> None:
    rates = by_depth_and_rank(STEPS, 2, fewest=1)
    (found,) = {
        plan.choices: plan for plan in static_trees(LIMITS, rates, MODEL, 64, 1, most=6)
    }.values()
    nodes = [(a,) for a in range(2)] + [(a, b) for a in range(2) for b in range(2)]
    nodes += [(*n, c) for n in nodes if len(n) == 2 for c in range(2)]

    def value(tree: tuple[tuple[int, ...], ...]) -> float:
        reached = {(): 1.0}
        for node in sorted(tree, key=len):
            reached[node] = reached[node[:-1]] * rates[len(node) - 1][node[-1]]
        levels = max(len(node) for node in tree)
        return chosen(COSTS, levels, 1 + len(tree), sum(reached.values())).over_plain

    whole = [
        tree
        for size in range(1, 6)
        for tree in combinations(nodes, size)
        if all(node[:-1] in {(), *tree} for node in tree)
    ]
    assert value(found.choices) == pytest.approx(max(map(value, whole)))


def test_trees_are_cut_out_of_the_sample_and_within_limits() -> None:
    wide = wide_plan(LIMITS)
    assert (wide.top_k, wide.steps, wide.verify_size) == (6, 10, 60)
    for plan in trees(LIMITS, wide):
        assert plan.top_k <= 6
        assert plan.steps <= 10
        LIMITS.check(plan)
    chain = wide_plan(TreeLimits(12, 8, 1000), trees=False)
    assert (chain.top_k, chain.steps) == (1, 8)


def test_static_trees_beyond_the_draft_engine_are_left_out() -> None:
    rates = [[0.9, 0.05, 0.04]] * 8
    small = TreeLimits(60, 3, 1000, static_trees=True)
    assert all(plan.steps <= 3 for plan in static_trees(small, rates, MODEL, 64, 1, most=60))
    none = TreeLimits(60, 60, 1000, static_trees=False)
    assert static_trees(none, rates, MODEL, 64, 1, most=60) == []


# ---- which are measured


def ranked(method: str, speed: float, *, adaptive: bool = False, nodes: int = 4) -> Ranked:
    plan = DraftPlan(1, nodes - 1, nodes, adaptive=adaptive)
    return Ranked(Candidate(method, plan, own=method == "eagle3"), speed, nodes, 1, 2)


def test_the_simpler_one_comes_first_where_two_are_alike() -> None:
    long, short = ranked("eagle3", 1.501, nodes=9), ranked("eagle3", 1.5, nodes=4)
    assert in_order([long, short]) == [short, long]
    faster = ranked("eagle3", 1.6, nodes=9)
    assert in_order([short, faster]) == [faster, short]


def test_each_family_is_measured_before_the_second_of_one() -> None:
    rows = [
        ranked("ngram", 1.9, nodes=5),
        ranked("ngram", 1.8, nodes=6),
        ranked("suffix", 1.7),
        ranked("eagle3", 1.5),
        ranked("eagle3", 1.2, adaptive=True),
    ]
    assert to_measure(rows, 4) == [rows[0], rows[2], rows[3], rows[4]]
    assert to_measure(rows, 1) == [rows[0]]


def test_the_adaptive_twin_of_the_best_fixed_plan_is_measured_too() -> None:
    fixed, other = ranked("eagle3", 1.5, nodes=4), ranked("eagle3", 1.45, adaptive=True, nodes=9)
    twin = ranked("eagle3", 1.4, adaptive=True, nodes=4)
    third = ranked("eagle3", 1.42, nodes=5)
    assert twin in to_measure([fixed, other, third, twin], 3)


def test_the_twin_takes_the_place_of_no_other_family() -> None:
    fixed, twin = ranked("eagle3", 1.5), ranked("eagle3", 1.2, adaptive=True)
    rows = [fixed, ranked("ngram", 1.4), ranked("suffix", 1.3), twin]
    assert to_measure(rows, 3) == rows[:3]


def test_best_static_tree_is_what_is_ranked() -> None:
    rates = [[0.6, 0.2], [0.5, 0.2]]
    choice = best_static_tree(MODEL.at(64, 1, 2), rates, 8)
    plans = static_trees(LIMITS, rates, MODEL, 64, 1, most=8)
    assert StaticPlan.of(choice.choices) in plans
