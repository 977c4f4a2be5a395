"""What an estimate of acceptance begins with."""

from __future__ import annotations

import pytest

from edgespec.runtime.plans.acceptance_estimate import PRIOR, AcceptanceEstimate


def test_without_a_prior_all_depths_are_alike() -> None:
    assert AcceptanceEstimate().rates(3) == [PRIOR] * 3
    assert AcceptanceEstimate().rates(0) == []


def test_it_begins_with_the_prior_of_each_depth() -> None:
    rates = AcceptanceEstimate((0.8, 0.4)).rates(4)
    assert rates == pytest.approx([0.8, 0.4, 0.4, 0.4])


def test_a_depth_without_samples_moves_with_the_one_before() -> None:
    estimate = AcceptanceEstimate((0.8, 0.4))
    for _ in range(200):
        estimate.count(1, hit=False)
    first, second = estimate.rates(2)
    assert first < 0.1
    assert second == pytest.approx(first / 2)


def test_samples_outweigh_a_prior() -> None:
    estimate = AcceptanceEstimate((0.05,))
    for _ in range(200):
        estimate.count(1, hit=True)
    assert estimate.rates(1)[0] > 0.9


def test_rates_of_0_and_1_are_moved_inside() -> None:
    low, high = AcceptanceEstimate((0.0, 1.0)).rates(2)
    assert 0 < low < 0.01
    assert 0.9 < high < 1
