"""Which drafts pay, against values computed by hand and against all choices there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgespec.runtime.costs.cost_model import StepCosts
from edgespec.runtime.plans.acceptance_estimate import AcceptanceEstimate
from edgespec.runtime.plans.draft_budget import DraftBudget
from edgespec.runtime.trees.tree import DraftTree, TreePool
from tests.costs import costs


def budget(row: float = 0.1, level: float = 0.1, rate: float = 1.0, levels: int = 8) -> DraftBudget:
    return DraftBudget(AcceptanceEstimate(), costs(row, level), rate, levels)


def test_survival_is_the_product_along_the_path() -> None:
    found = budget().survival([-1, -1, 0, 2], [0.5, 0.2, 0.4, 0.9])
    assert found == pytest.approx([0.5, 0.2, 0.2, 0.18])


def test_further_nodes_are_valued_behind_those_that_were() -> None:
    asked, parents, probs = budget(), [-1, -1, 0, 2], [0.5, 0.2, 0.4, 0.9]
    found: list[float] = []
    asked.extend(found, parents[:2], probs[:2])
    asked.extend(found, parents, probs[2:])
    assert found == asked.survival(parents, probs)


@pytest.mark.parametrize(
    ("survival", "nodes"),
    [
        ([0.5], 2),
        ([0.05], 1),  # less than its row costs
        ([0.5, 0.05, 0.3], 4),  # 0.4, 0.35, 0.55: the third pays for the second
        ([0.5, 0.05, 0.1], 2),
        ([], 1),
    ],
)
def test_nodes_are_verified_as_long_as_their_rows_pay(survival: list[float], nodes: int) -> None:
    assert budget().num_nodes(survival) == nodes


def test_a_faster_sequence_asks_more_of_each_row() -> None:
    assert budget(rate=1.0).num_nodes([0.5, 0.15]) == 3
    assert budget(rate=2.0).num_nodes([0.5, 0.15]) == 2


def test_a_level_is_drafted_where_it_brings_more_than_it_costs() -> None:
    # 0.6 is the prior: 0.3 tokens for 0.1 of the draft and 0.1 of the row
    assert budget().goes_on(0.5, 1, 2, 1)
    # 0.12, 0.192, 0.235 and 0.261 tokens for 0.2, 0.4, 0.6 and 0.8
    assert not budget().goes_on(0.2, 1, 2, 1)


def test_levels_that_only_pay_together_are_drafted() -> None:
    """Three levels cost as much as two: 0.3 tokens do not pay for 0.4, 0.48 do."""
    flat = costs(0.0, 0.0)
    two = StepCosts(flat.passes, [0, 0, 0.4, 0.4, *[5.0] * 126], flat.observe)
    assert budget_of(two).goes_on(0.5, 1, 2, 1)
    three = StepCosts(flat.passes, [0, 0, 0.4, 0.8, *[5.0] * 126], flat.observe)
    assert not budget_of(three).goes_on(0.5, 1, 2, 1)


def budget_of(own: StepCosts) -> DraftBudget:
    return DraftBudget(AcceptanceEstimate(), own, 1.0, 8)


def test_no_level_is_drafted_beyond_the_last_one_allowed() -> None:
    free = budget(0.0, 0.0, levels=3)
    assert free.goes_on(0.9, 2, 3, 1)
    assert not free.goes_on(0.9, 3, 4, 1)


def pool_of(rng: np.random.Generator, levels: int, width: int) -> TreePool:
    pool, beam = TreePool(), [-1]
    for _ in range(levels):
        born: list[int] = []
        for parent in beam:
            probs = np.sort(rng.dirichlet(np.full(width + 1, 0.4)))[::-1][:width] + 1e-6
            tokens = rng.permutation(50)[:width]
            born += pool.add_children(parent, tokens, np.log(probs).astype(np.float32))
        beam = pool.best(born, width)
    return pool


@pytest.mark.parametrize("seed", range(20))
def test_selected_tree_is_worth_as_much_as_the_best_prefix_of_its_kind(seed: int) -> None:
    """Nodes come with their ancestors, in the order of survival, as many as gain most."""
    rng = np.random.default_rng(seed)
    pool, asked = pool_of(rng, 3, 3), budget(row=float(rng.uniform(0.01, 0.3)))
    tree = asked.select(pool, 7, 12)
    assert tree.probs is not None
    assert len(tree) == len(tree.probs) <= 12
    assert (tree.parents[1:] < np.arange(1, len(tree))).all()
    assert (tree.tokens[0], tree.parents[0], tree.probs[0]) == (7, -1, 1)
    survival = asked.survival(pool.parents, pool.probs(0))
    best = sorted(survival, reverse=True)[:11]
    passes = asked.costs.passes
    gains = [sum(best[:n]) - (passes[n + 1] - passes[1]) for n in range(12)]
    own = asked.survival([p - 1 for p in tree.parents[1:].tolist()], tree.probs[1:].tolist())
    assert sum(own) - (passes[len(tree)] - passes[1]) == pytest.approx(max(gains), abs=1e-5)
    assert tree.drafted_levels == 3  # however many of them it kept


def test_what_is_known_of_a_pool_is_not_valued_again() -> None:
    pool, asked = pool_of(np.random.default_rng(0), 2, 3), budget()
    whole = asked.select(pool, 7, 12)
    known: list[float] = []
    asked.extend(known, pool.parents[:3], pool.probs(0)[:3])
    assert asked.select(pool, 7, 12, known).tokens.tolist() == whole.tokens.tolist()


def test_cut_keeps_the_first_nodes_and_says_what_was_drafted() -> None:
    tree = DraftTree.chain(5, [6, 7, 8])
    found = budget().cut(tree, [0.9, 0.5, 0.1])
    # 0.9, 0.45 and 0.045 tokens for 0.1 each
    assert found.tokens.tolist() == [5, 6, 7]
    assert found.probs is not None
    assert found.probs.tolist() == pytest.approx([1, 0.9, 0.5])
    assert (found.drafted_levels, int(found.depths.max())) == (3, 2)
    nothing = replace(budget(), rate=100.0).cut(tree, [0.9, 0.5, 0.1])
    assert (len(nothing), nothing.drafted_levels) == (1, 3)
