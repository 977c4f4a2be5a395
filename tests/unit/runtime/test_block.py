"""Plans of block drafts are what the draft and the engines can do; trees of a block are its most
probable paths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.ort.backend import BACKEND
from edgespec.errors import LimitError
from edgespec.runtime.drafters.dflash import BlockLimits, best_first
from edgespec.runtime.tree import BlockPlan, DraftPlan, DraftTree, full_tree_size

HINTS = BACKEND.plan_hints
LIMITS = BlockLimits(max_verify_tree_size=60, block_size=16, draft_vocab_size=1000)


@pytest.mark.parametrize(
    ("given_sizes", "plan"),
    [
        ((None, None, None), BlockPlan(1, 7, 8)),
        ((1, 1, 16), BlockPlan(1, 15, 16)),
        ((None, None, 4), BlockPlan(1, 3, 4)),
        ((None, None, 1), BlockPlan(1, 1, 1)),
        ((2, None, None), BlockPlan(2, 15, 60)),
        ((8, 1, 32), BlockPlan(8, 15, 32)),
        ((3, None, 5), BlockPlan(3, 4, 5)),
    ],
)
def test_open_sizes_follow_from_those_given(
    given_sizes: tuple[int | None, ...], plan: BlockPlan
) -> None:
    assert LIMITS.plan(*given_sizes, HINTS) == plan


def test_only_open_sizes_shrink_to_the_engines() -> None:
    small = BlockLimits(max_verify_tree_size=6, block_size=4, draft_vocab_size=1000)
    assert small.plan(None, None, None, HINTS) == BlockPlan(1, 3, 4)
    assert small.plan(4, None, None, HINTS) == BlockPlan(4, 3, 6)
    tiny = BlockLimits(max_verify_tree_size=60, block_size=2, draft_vocab_size=1000)
    assert tiny.plan(3, None, None, HINTS) == BlockPlan(3, 1, 4)


@pytest.mark.parametrize(
    ("limits", "sizes", "said"),
    [
        (LIMITS, (1, 2, None), "one step"),
        (LIMITS, (9, 1, None), "8 children"),
        (LIMITS, (0, None, None), "at least 1"),
        (LIMITS, (1, None, 0), "at least 1"),
        (LIMITS, (1, None, 17), "16 nodes at most"),
        (LIMITS, (2, None, 61), "--max-verify-tree-size 61"),
        (BlockLimits(400, 16, 1000), (8, None, 129), "128 nodes"),
        (BlockLimits(60, 16, 1000), (8, None, 200), "128 or less"),
        (BlockLimits(60, 3, 1000), (2, None, 8), "7 nodes at most"),
        (BlockLimits(60, 16, 4), (5, None, None), "vocabulary"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    limits: BlockLimits, sizes: tuple[int | None, ...], said: str
) -> None:
    with pytest.raises(LimitError, match=said):
        limits.plan(*sizes, HINTS)


def test_plans_of_a_users_own_are_checked() -> None:
    LIMITS.check(DraftPlan(1, 3, 4))
    with pytest.raises(LimitError, match="15 levels"):
        LIMITS.check(DraftPlan(2, 16, 20))


@pytest.mark.parametrize(
    ("top_k", "levels", "most", "size"),
    [(1, 7, 60, 8), (2, 2, 60, 7), (2, 15, 60, 60), (8, 0, 60, 1), (3, 1, 2, 2)],
)
def test_size_of_the_tree_of_all_paths(top_k: int, levels: int, most: int, size: int) -> None:
    assert full_tree_size(top_k, levels, most) == size


def test_a_plan_shrinks_to_the_room_and_the_length_left() -> None:
    plan = BlockPlan(2, 15, 60)
    assert plan.within(levels=3, nodes=100) == BlockPlan(2, 3, 15)
    assert plan.within(levels=15, nodes=20) == BlockPlan(2, 15, 20)
    assert plan.within(levels=0, nodes=20) == BlockPlan(2, 0, 1)
    assert BlockPlan(1, 7, 8).within(levels=4, nodes=8) == BlockPlan(1, 4, 5)


# Trees


def test_a_chain_has_the_first_rank_of_each_depth() -> None:
    parents, chosen = best_first(np.log(np.array([[0.9], [0.5], [0.1]], np.float32)), 3)
    assert parents.tolist() == [-1, 0, 1]
    assert chosen.tolist() == [[0, 0], [1, 0]]


def test_nodes_of_a_depth_share_their_candidates() -> None:
    parents, chosen = best_first(np.log(np.array([[0.6, 0.4], [0.9, 0.1]], np.float32)), 7)
    assert parents.tolist() == [-1, 0, 1, 0, 3, 1, 3]
    assert chosen.tolist() == [[0, 0], [1, 0], [0, 1], [1, 0], [1, 1], [1, 1]]


def test_ties_go_to_the_earlier_parent_and_then_to_the_better_rank() -> None:
    parents, chosen = best_first(np.full((2, 2), np.log(np.float32(0.5))), 7)
    assert parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert chosen.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 0], [1, 1]]


def test_no_depth_is_no_draft() -> None:
    parents, chosen = best_first(np.zeros((0, 3), np.float32), 5)
    assert parents.tolist() == [-1]
    assert chosen.shape == (0, 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
def test_a_tree_is_the_most_probable_paths_and_their_ancestors(
    depths: int, width: int, size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    log_probs = np.sort(
        np.log(rng.dirichlet(np.ones(width + 1), depths).astype(np.float32))[:, :width]
    )[:, ::-1]
    parents, chosen = best_first(log_probs, size)
    tree = DraftTree(np.arange(len(parents)), parents)
    assert all(parent < node for node, parent in enumerate(parents))
    paths = []
    for node in range(1, len(parents)):
        ancestors = np.flatnonzero(tree.mask[node])[1:]
        assert [int(chosen[a - 1][0]) for a in ancestors] == list(range(len(ancestors)))
        paths.append(tuple(int(chosen[a - 1][1]) for a in ancestors))
    every = [
        ranks
        for depth in range(1, depths + 1)
        for ranks in itertools.product(range(width), repeat=depth)
    ]
    score = {
        ranks: sum(float(log_probs[level, rank]) for level, rank in enumerate(ranks))
        for ranks in every
    }
    assert len(set(paths)) == len(paths) == min(size - 1, len(every))
    if paths:
        cut = sorted(score.values(), reverse=True)[len(paths) - 1]
        assert min(score[path] for path in paths) >= cut - 1e-5
