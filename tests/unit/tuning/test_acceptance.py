"""Acceptance by depth and rank, counted on trees that are made by hand."""

from __future__ import annotations

import pytest

from edgespec.tuning.acceptance import by_depth, by_depth_and_rank
from edgespec.tuning.steps import SampledStep

#        root 0
#   1 (r0)    2 (r1)   3 (r2)
#  4   5       6
PARENTS = (-1, 0, 0, 0, 1, 1, 2)


def step(*path: int, parents: tuple[int, ...] = PARENTS) -> SampledStep:
    return SampledStep(parents, None, path, 10)


def test_each_rank_is_counted_where_its_parent_was_accepted() -> None:
    steps = [step(0, 1, 4), step(0, 1), step(0, 2, 6), step(0)]
    rates = by_depth_and_rank(steps, 3, fewest=1)
    # four steps at depth 1: rank 0 twice, rank 1 once; behind them three: rank 0 twice
    assert rates == [[2 / 4, 1 / 4, 0.0], [2 / 3, 0.0, 0.0]]


def test_a_leaf_says_nothing_of_the_depth_behind_it() -> None:
    rates = by_depth_and_rank([step(0, 3), step(0, 1, 5)], 2, fewest=1)
    assert rates == [[0.5, 0.0], [0.0, 1.0]]


def test_a_depth_that_few_steps_reached_is_left_out() -> None:
    assert by_depth_and_rank([step(0, 1, 4)] + [step(0)] * 4, 1, fewest=2) == [[0.2]]


def test_plain_steps_count_nothing() -> None:
    assert by_depth_and_rank([SampledStep((-1,), None, (0,), 5)], 4, fewest=1) == []


@pytest.mark.parametrize(
    ("lengths", "levels", "rates"),
    [([2, 1, 0, 2], 2, [3 / 4, 2 / 3]), ([0, 0], 2, [0.0]), ([], 3, [])],
)
def test_acceptance_by_depth_alone(lengths: list[int], levels: int, rates: list[float]) -> None:
    assert by_depth(lengths, levels, fewest=1) == rates


def test_ranks_are_places_among_siblings() -> None:
    assert step(0, 2, 6).ranks == (1, 0)
    assert step(0, 1, 5).ranks == (0, 1)
    assert step(0).ranks == ()


def test_a_step_survives_its_journal() -> None:
    whole = SampledStep((-1, 0, 1), (1.0, 0.5, 0.25), (0, 1), 33)
    assert SampledStep.of_list(whole.to_list()) == whole
