"""JetSpec's tree is the one that grows by all children of its best leaf: in its order, with ties,
and whatever its size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.runtime.drafters.candidates import best_first
from edgespec.runtime.drafters.jetspec import grown_best_first
from edgespec.runtime.trees.tree import DraftTree, full_tree_size


def log_probs(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows, np.float32))


def test_all_children_of_the_best_leaf_are_added_at_once() -> None:
    """Below 0.6 stand 0.54 and 0.06; 0.06 goes in before the second level of 0.4 is looked at."""
    parents, chosen = grown_best_first(log_probs([0.6, 0.4], [0.9, 0.1]), 7)
    assert parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert chosen.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 0], [1, 1]]


def test_it_differs_from_the_most_probable_tree() -> None:
    rows = log_probs([0.9, 0.1], [0.9, 0.1], [0.9, 0.1])
    grown, probable = grown_best_first(rows, 5)[0], best_first(rows, 5)[0]
    assert grown.tolist() == [-1, 0, 0, 1, 1]
    assert probable.tolist() == [-1, 0, 1, 2, 0]


def test_the_deepest_chain_is_followed_first() -> None:
    parents, chosen = grown_best_first(log_probs([0.9, 0.05], [0.9, 0.05], [0.9, 0.05]), 7)
    assert parents.tolist() == [-1, 0, 0, 1, 1, 3, 3]
    assert [depth for depth, _ in chosen.tolist()] == [0, 0, 1, 1, 2, 2]


def test_equal_leaves_grow_in_the_order_in_which_they_came() -> None:
    parents, _ = grown_best_first(np.full((3, 2), np.log(np.float32(0.5))), 15)
    assert parents.tolist() == [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_leaves_at_the_last_slot_do_not_grow() -> None:
    """They are as good as any, and others grow instead."""
    parents, _ = grown_best_first(log_probs([0.5, 0.5], [1.0, 1.0]), 7)
    assert parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("size", "last"), [(2, [0]), (3, [0, 1]), (5, [0, 1]), (6, [0])])
def test_of_the_last_leaf_the_best_children_that_fit_are_added(size: int, last: list[int]) -> None:
    parents, chosen = grown_best_first(log_probs([0.6, 0.4], [0.9, 0.1]), size)
    assert len(parents) == size
    family = [chosen[i][1] for i in range(size - 1) if parents[i + 1] == parents[-1]]
    assert [int(rank) for rank in family] == last


def test_width_one_is_a_chain() -> None:
    parents, chosen = grown_best_first(log_probs([0.9], [0.5], [0.1]), 4)
    assert parents.tolist() == [-1, 0, 1, 2]
    assert chosen.tolist() == [[0, 0], [1, 0], [2, 0]]


def test_no_depth_is_no_draft() -> None:
    parents, chosen = grown_best_first(np.zeros((0, 3), np.float32), 5)
    assert parents.tolist() == [-1]
    assert chosen.shape == (0, 2)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.integers(0, 10**6), st.booleans()
)
def test_every_step_grows_the_best_leaf(
    depths: int, width: int, size: int, seed: int, rounded: bool
) -> None:
    """From the definition, by looking at all leaves; rounded numbers make ties."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.dirichlet(np.ones(width + 1), depths)[:, :width])[:, ::-1]
    found = np.log(np.maximum(np.round(rows, 1) if rounded else rows, 1e-3)).astype(np.float32)
    parents, chosen = grown_best_first(found, size)
    tree = DraftTree(np.arange(len(parents)), parents)
    assert len(parents) == full_tree_size(width, depths, size)
    score = [0.0]
    for node in range(1, len(parents)):
        depth, rank = chosen[node - 1]
        assert depth == tree.depths[node] - 1
        score.append(score[parents[node]] + float(found[depth, rank]))
    grew = list(dict.fromkeys(parents[1:].tolist()))
    grown: set[int] = set()
    for node in grew:
        there = [
            leaf
            for leaf in range(len(parents))
            if leaf not in grown
            and tree.depths[leaf] < depths
            and (leaf == 0 or int(parents[leaf]) in grown)
        ]
        assert node == max(there, key=lambda leaf: (score[leaf], -leaf))
        family = [int(chosen[c - 1][1]) for c in range(1, len(parents)) if parents[c] == node]
        assert family == list(range(len(family)))
        assert len(family) == width or node == grew[-1]
        grown.add(node)
