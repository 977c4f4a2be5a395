"""Trees are what their parents say, the pool keeps the best whole branches, plans shrink to the
room there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.host import HostLogits
from edgespec.contract import tree_pool_size
from edgespec.runtime.drafters.candidates import top_log_probs
from edgespec.runtime.trees.tree import DraftPlan, DraftTree, TreePool

#         0:7
#        /   \
#     1:3     2:5
#     /  \      \
#   3:5  4:9    5:3
#         |
#        6:1
TREE = DraftTree(np.array([7, 3, 5, 5, 9, 3, 1]), np.array([-1, 0, 0, 1, 1, 2, 4]))


def test_forced_tokens_lead_a_tree_that_goes_on_behind_them() -> None:
    led = TREE.behind([3, 9], 8)
    assert (led.tokens.tolist(), led.parents.tolist()) == ([7, 3, 9, 1], [-1, 0, 1, 2])
    assert (led.num_forced, led.levels) == (2, 3)
    assert TREE.behind([3], 3).tokens.tolist() == [7, 3, 5]  # no room for more
    alone = TREE.behind([3, 8, 2], 8)
    assert (alone.tokens.tolist(), alone.parents.tolist()) == ([7, 3, 8, 2], [-1, 0, 1, 2])


def test_depths_count_the_way_to_the_root() -> None:
    assert TREE.depths.tolist() == [0, 1, 1, 2, 2, 2, 3]


def test_mask_shows_each_node_itself_and_its_ancestors_only() -> None:
    seen = [np.flatnonzero(row).tolist() for row in TREE.mask]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 4, 6]]


def test_each_node_of_a_chain_sees_all_before_it() -> None:
    chain = DraftTree.chain(7, [5, 3, 5])
    assert chain.mask.tolist() == np.tri(4, dtype=bool).tolist()
    assert chain.depths.tolist() == [0, 1, 2, 3]
    assert [chain.child(node, 5) for node in range(4)] == [1, None, 3, None]


def test_child_is_found_by_its_parent_and_its_token_together() -> None:
    assert [
        TREE.child(0, 3),
        TREE.child(0, 5),
        TREE.child(1, 5),
        TREE.child(2, 3),
        TREE.child(4, 1),
    ] == [1, 2, 3, 5, 6]
    assert [TREE.child(0, 7), TREE.child(0, 9), TREE.child(2, 5), TREE.child(6, 1)] == [None] * 4


def test_tree_without_drafts_is_its_root() -> None:
    tree = DraftTree.root_only(42)
    assert (len(tree), tree.tokens.tolist(), tree.parents.tolist()) == (1, [42], [-1])
    assert tree.depths.tolist() == [0]
    assert tree.mask.tolist() == [[True]]


def children(pool: TreePool, parent: int, **log_probs: float) -> list[int]:
    """Add children named t<token>."""
    tokens = np.array([int(name[1:]) for name in log_probs])
    return pool.add_children(parent, tokens, np.array(list(log_probs.values()), np.float32))


def test_score_of_a_candidate_is_the_sum_along_its_path() -> None:
    pool = TreePool()
    (a, b) = children(pool, -1, t1=-0.5, t2=-1.0)
    (c,) = children(pool, b, t3=-0.25)
    (d,) = children(pool, c, t4=-2.0)
    assert (a, b, c, d) == (0, 1, 2, 3)
    assert pool.scores == [-0.5, -1.0, -1.25, -3.25]
    assert pool.depths == [1, 1, 2, 3]


def test_select_keeps_the_best_of_all_levels_in_the_order_of_their_birth() -> None:
    pool = TreePool()
    a, b = children(pool, -1, t1=-0.1, t2=-3.0)
    children(pool, a, t3=-0.2, t4=-0.3)
    children(pool, b, t5=-0.1)
    tree = pool.select(9, 4)
    # scores: 1 -0.1, 2 -3.0, 3 -0.3, 4 -0.4, 5 -3.1
    assert tree.tokens.tolist() == [9, 1, 3, 4]
    assert tree.parents.tolist() == [-1, 0, 1, 1]


def test_select_drops_a_weak_branch_from_the_middle_and_renumbers_parents() -> None:
    pool = TreePool()
    a, b = children(pool, -1, t1=-5.0, t2=-0.1)
    children(pool, a, t3=-0.1)
    (c,) = children(pool, b, t4=-0.1)
    children(pool, c, t5=-0.1)
    tree = pool.select(9, 4)
    assert tree.tokens.tolist() == [9, 2, 4, 5]
    assert tree.parents.tolist() == [-1, 0, 1, 2]


@pytest.mark.parametrize("size", range(1, 8))
def test_child_that_ties_with_its_ancestors_never_comes_without_them(size: int) -> None:
    """Log-probability 0.0 all the way down one branch: every candidate there has its parent's
    score."""
    pool = TreePool()
    a, b = children(pool, -1, t1=0.0, t2=0.0)
    (c,) = children(pool, b, t3=0.0)
    (d,) = children(pool, a, t4=0.0)
    children(pool, c, t5=0.0)
    children(pool, d, t6=0.0)
    tree = pool.select(9, size)
    assert tree.tokens.tolist() == [9, 1, 2, 3, 4, 5, 6][:size]
    assert all(parent < node for node, parent in enumerate(tree.parents))


def test_equal_scores_go_to_the_shallower_then_to_the_earlier() -> None:
    pool = TreePool()
    (a, b) = children(pool, -1, t1=-1.0, t2=-2.0)
    (c, d) = children(pool, a, t3=-1.0, t4=-1.0)
    assert pool.best([d, c, b, a], 4) == [a, b, c, d]
    assert pool.best([d, c], 1) == [c]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_is_selected_is_a_tree_within_its_size(data: st.DataObject) -> None:
    """Scores from a small set, so that ties are everywhere; every parent stands before its
    children."""
    pool = TreePool()
    beam, width = [-1], data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(1, 4))):
        born: list[int] = []
        for parent in beam:
            log_probs = sorted(
                data.draw(
                    st.lists(st.sampled_from([0.0, -0.5, -1.0]), min_size=width, max_size=width)
                )
            )
            born += pool.add_children(
                parent, np.arange(width), np.array(log_probs[::-1], np.float32)
            )
        beam = pool.best(born, width)
    size = data.draw(st.integers(1, 1 + len(pool.tokens)))
    tree = pool.select(9, size)
    assert len(tree) == size
    assert tree.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents.tolist()) if node)
    branches = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(branches)) == size  # siblings differ


@pytest.mark.parametrize(
    ("plan", "levels", "nodes", "wanted"),
    [
        (DraftPlan(10, 6, 60), 99, 99, DraftPlan(10, 6, 60)),
        (DraftPlan(10, 6, 60), 99, 20, DraftPlan(10, 6, 20)),
        (
            DraftPlan(10, 6, 60),
            1,
            99,
            DraftPlan(10, 1, 11),
        ),  # one level holds the root and ten children
        (DraftPlan(10, 6, 60), 0, 99, DraftPlan(10, 0, 1)),
        (DraftPlan(10, 6, 60), 99, 1, DraftPlan(10, 6, 1)),
        (DraftPlan(1, 3, 4), 2, 99, DraftPlan(1, 2, 3)),
        (DraftPlan(4, 3, 16), 2, 99, DraftPlan(4, 2, 16)),
        (DraftPlan(4, 3, 37), 2, 99, DraftPlan(4, 2, 21)),
    ],
)
def test_plan_shrinks_to_the_levels_and_the_nodes_there_are(
    plan: DraftPlan, levels: int, nodes: int, wanted: DraftPlan
) -> None:
    assert plan.within(levels, nodes) == wanted


@given(
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 300),
    st.integers(0, 9),
    st.integers(1, 99),
)
def test_plan_within_asks_for_no_more_nodes_than_can_exist(
    k: int, s: int, n: int, levels: int, nodes: int
) -> None:
    plan = DraftPlan(k, s, n).within(levels, nodes)
    assert 1 <= plan.verify_size <= min(n, nodes)
    assert 0 <= plan.steps <= min(s, levels)
    assert plan.verify_size <= (tree_pool_size(k, plan.steps) if plan.steps else 1)


def test_top_log_probs_gives_ties_to_the_lowest_id() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]], np.float32)
    for count, wanted in (
        (1, [[1], [0]]),
        (2, [[1, 2], [0, 1]]),
        (4, [[1, 2, 3, 0], [0, 1, 2, 3]]),
        (9, [[1, 2, 3, 0, 4], [0, 1, 2, 3, 4]]),
    ):
        assert top_log_probs(HostLogits(logits), count)[0].tolist() == wanted


@pytest.mark.parametrize("count", [1, 3, 50])
def test_top_log_probs_are_the_largest_of_the_softmax(count: int) -> None:
    logits = np.random.default_rng(0).normal(0, 8, (6, 50)).astype(np.float32)
    exact = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(
        1, keepdims=True
    )
    ids, log_probs = top_log_probs(HostLogits(logits), count)
    np.testing.assert_allclose(np.exp(log_probs), -np.sort(-exact, axis=1)[:, :count], rtol=1e-4)
    np.testing.assert_allclose(np.exp(log_probs), np.take_along_axis(exact, ids, 1), rtol=1e-4)


def test_log_probability_of_a_certain_token_is_not_above_zero() -> None:
    """Above 0 a child would score above its parent, and a tree could hold it without its
    ancestors."""
    logits = np.zeros((1, 300), np.float32)
    logits[0, 7] = 88.0
    for count in (1, 2):
        ids, log_probs = top_log_probs(HostLogits(logits), count)
        assert ids[0, 0] == 7
        assert -1e-6 < log_probs[0, 0] <= 0.0


def test_a_probability_of_the_pool_is_after_its_parent() -> None:
    pool = TreePool()
    first = pool.add_children(-1, np.array([1]), np.log(np.array([0.5], np.float32)))
    second = pool.add_children(first[0], np.array([2]), np.log(np.array([0.4], np.float32)))
    third = pool.add_children(second[0], np.array([3]), np.log(np.array([0.2], np.float32)))
    assert pool.probs(0) == pytest.approx([0.5, 0.4, 0.2])
    assert third == [2]
