"""Exact intervals by ranks, against cases that were computed by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from edgespec.benchmark.statistics import (
    FASTER,
    NOISE,
    SLOWER,
    UNKNOWN,
    Interval,
    figure,
    median_interval,
    rank_sum_counts,
    ratio_estimate,
    ratio_interval,
    result_of,
)


@pytest.mark.parametrize(
    ("count", "ranks", "confidence"),
    [
        (6, (1, 6), 1 - 2 / 64),
        (8, (1, 8), 1 - 2 / 256),
        (9, (2, 8), 1 - 2 * 10 / 512),
        (10, (2, 9), 1 - 2 * 11 / 1024),
        (12, (3, 10), 1 - 2 * (1 + 12 + 66) / 4096),
    ],
)
def test_median_lies_between_two_order_statistics(
    count: int, ranks: tuple[int, int], confidence: float
) -> None:
    samples = [float(value) for value in range(count, 0, -1)]  # each is its own rank
    assert median_interval(samples) == Interval(*map(float, ranks), confidence)


def test_five_samples_say_nothing_at_95_percent() -> None:
    assert median_interval([1, 2, 3, 4, 5]) is None
    assert median_interval([1, 2, 3, 4, 5], 0.9) == Interval(1, 5, 1 - 2 / 32)
    assert median_interval([]) is None


def test_figure_has_the_samples_in_their_order() -> None:
    found = figure([3.0, None, 1.0, 2.0])
    assert found is not None
    assert found.to_dict() == {
        "median": 2.0,
        "low": None,
        "high": None,
        "confidence": None,
        "samples": [3.0, 1.0, 2.0],
    }
    assert figure([None]) is None


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 3), (3, 3), (4, 2), (5, 4)])
def test_rank_sum_counts_are_those_of_all_orders(first: int, second: int) -> None:
    places = range(first + second)
    wanted = [0] * (first * second + 1)
    for chosen in combinations(places, first):
        others = [place for place in places if place not in chosen]
        wanted[sum(a > b for a in chosen for b in others)] += 1
    assert rank_sum_counts(first, second) == wanted


def test_ratio_of_two_runs() -> None:
    """Four samples against four: the 95 % interval leaves out nothing but the extreme order, with
    2 of 70 orders outside."""
    before, after = [1.0, 2.0, 4.0, 8.0], [3.0, 6.0, 12.0, 24.0]
    found = ratio_interval(before, after)
    assert found == Interval(3 / 8, 24.0, 1 - 2 / 70)
    assert ratio_estimate(before, after) == 3.0
    assert ratio_interval([1, 2, 3], [1, 2, 3]) is None  # 2 of 20 orders: 90 %
    # six against six: of 924 orders 1, 1, 2, 3, 5 and 7 have the least six values
    six = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    narrower = ratio_interval(six, [2 * value for value in six])
    assert narrower is not None
    assert narrower.confidence == pytest.approx(1 - 2 * 19 / 924)
    ratios = sorted(2 * b / a for a in six for b in six)
    assert (narrower.low, narrower.high) == (ratios[5], ratios[-6])


def test_result_by_whether_one_is_inside() -> None:
    assert result_of(Interval(0.99, 1.2, 0.95)) == NOISE
    assert result_of(Interval(1.01, 1.2, 0.95)) == FASTER
    assert result_of(Interval(0.8, 0.9, 0.95)) == SLOWER
    assert result_of(Interval(0.8, 0.9, 0.95), larger_is_faster=False) == FASTER
    assert result_of(Interval(1.1, 1.9, 0.95), larger_is_faster=False) == SLOWER
    assert result_of(None) == UNKNOWN


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.2), (0.8, 1.0)])
def test_an_interval_that_ends_at_1_is_noise(low: float, high: float) -> None:
    assert result_of(Interval(low, high, 0.95)) == NOISE
