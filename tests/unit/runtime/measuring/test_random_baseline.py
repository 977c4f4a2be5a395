"""Drafts that are no better than one guess are told from those that are."""

from __future__ import annotations

from math import comb

import pytest

from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.measuring.random_baseline import CAUSES, NoBetterThanChance, at_least

MIXED = [[1] * 10 + [*range(2, 42)]]  # the most frequent token is a fifth of 50


def request(*steps: tuple[int, int]) -> RequestMetrics:
    """Of steps that drafted and accepted so many."""
    made = RequestMetrics(3, 3)
    made.per_step_drafted = [drafted for drafted, _ in steps]
    made.per_step_accepted = [accepted for _, accepted in steps]
    return made


def steps(count: int, hits: int) -> RequestMetrics:
    return request(*[(3, 2)] * hits, *[(3, 0)] * (count - hits))


@pytest.mark.parametrize(("hits", "tries", "prob"), [(3, 10, 0.2), (1, 24, 0.05), (24, 24, 0.9)])
def test_tail_of_the_binomial_is_its_sum(hits: int, tries: int, prob: float) -> None:
    terms = [comb(tries, k) * prob**k * (1 - prob) ** (tries - k) for k in range(hits, tries + 1)]
    assert at_least(hits, tries, prob) == pytest.approx(sum(terms))


@pytest.mark.parametrize(
    ("hits", "tries", "prob", "wanted"), [(0, 9, 0.1, 1), (1, 9, 0, 0), (9, 9, 1, 1)]
)
def test_tail_at_its_ends(hits: int, tries: int, prob: float, wanted: float) -> None:
    assert at_least(hits, tries, prob) == wanted


def test_acceptance_is_held_against_the_most_frequent_token_s_share() -> None:
    """Of 50 tries at 0.2 at least 18 succeed with a probability of 0.6 %, 17 with 1.4 %."""
    found = NoBetterThanChance.of([steps(50, 17)], MIXED)
    assert found is not None
    assert (found.steps, found.accepted, found.guess) == (50, 17, 0.2)
    assert NoBetterThanChance.of([steps(50, 18)], MIXED) is None


def test_few_steps_say_nothing() -> None:
    assert NoBetterThanChance.of([steps(23, 0)], MIXED) is None
    assert NoBetterThanChance.of([steps(12, 0), steps(12, 0)], MIXED) is not None


def test_steps_without_drafts_are_not_counted() -> None:
    """A policy that stopped drafting must not make a draft look worse, nor a run long enough."""
    paused = request(*[(3, 0)] * 20, *[(0, 0)] * 100)
    assert NoBetterThanChance.of([paused], MIXED) is None
    good = request(*[(3, 2)] * 20, *[(3, 0)] * 20, *[(0, 0)] * 400)
    assert NoBetterThanChance.of([good], MIXED) is None


def test_drafts_that_are_mostly_accepted_are_good_however_uniform_the_answers_are() -> None:
    assert NoBetterThanChance.of([steps(50, 49)], [[7] * 50]) is None


def test_causes_and_the_next_step_are_in_text_and_json() -> None:
    found = NoBetterThanChance.of([steps(30, 0)], MIXED)
    assert found is not None
    assert all(cause in "\n".join(found.lines) for cause in CAUSES)
    assert found.to_dict()["likely_causes"] == [*CAUSES]
    assert "--probe" in found.lines[-1]
    assert "--probe" in found.to_dict()["next"]
