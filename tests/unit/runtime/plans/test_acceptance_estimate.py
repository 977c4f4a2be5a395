"""What a sequence's own drafts say of the next ones, against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.runtime.plans.acceptance_estimate import AcceptanceEstimate
from edgespec.runtime.trees.tree import DraftTree


def chain(*probs: float) -> DraftTree:
    count = len(probs) + 1
    own = np.array([1.0, *probs], np.float32)
    return DraftTree(np.arange(count), np.arange(-1, count - 1), own)


def test_nothing_known_is_the_prior_at_each_depth() -> None:
    assert AcceptanceEstimate().rates(3) == pytest.approx([0.6, 0.6, 0.6])


def test_an_accepted_draft_speaks_for_its_depth_and_a_rejected_one_too() -> None:
    estimate = AcceptanceEstimate()
    estimate.learn(chain(0.5, 0.5, 0.5), [0, 1])
    # depth 1: (1 + 2 * 0.6) / 3; depth 2: (0 + 2 * that) / 3; depth 3 was not reached
    assert estimate.rates(4) == pytest.approx([0.7333333, 0.4888889, 0.4888889, 0.4888889])


def test_old_steps_count_less() -> None:
    estimate = AcceptanceEstimate()
    estimate.learn(chain(0.5), [0, 1])
    estimate.learn(chain(0.5), [0])
    # hits 0.95, tries 1.95
    assert estimate.rates(1) == pytest.approx([(0.95 + 1.2) / 3.95])


def test_a_probability_is_calibrated_by_the_drafts_that_had_about_as_much() -> None:
    estimate = AcceptanceEstimate()
    assert estimate.of_prob(0.8) == pytest.approx(0.8)
    estimate.learn(chain(0.8), [0, 1])
    # one of one accepted, beside four by 0.8 * (6 + 1) / (6 + 0.8)
    own, others = 7 / 6.8 * 0.8, 7 / 6.8 * 0.4
    assert estimate.of_prob(0.8) == pytest.approx((1 + 4 * own) / 5)
    assert estimate.of_prob(0.4) == pytest.approx(others)


def test_a_sibling_that_was_not_taken_was_rejected_and_what_is_behind_it_says_nothing() -> None:
    #     0 -> 1 -> 3,  0 -> 2 -> 4, of which 2 is accepted and 4 is not
    probs = np.array([1.0, 0.7, 0.2, 0.95, 0.5], np.float32)
    tree = DraftTree(np.arange(5), np.array([-1, 0, 0, 1, 2]), probs)
    estimate = AcceptanceEstimate()
    estimate.learn(tree, [0, 2])
    assert estimate.tries[1:4] == [1, 1, 0]
    assert estimate.hits[1:4] == [1, 0, 0]
    assert sum(estimate.bin_tries) == pytest.approx(3)  # not that of node 3
    assert sum(estimate.bin_hits) == pytest.approx(1)


def test_forced_drafts_say_nothing_and_those_behind_them_speak_for_their_depth() -> None:
    #     0 -> 1 -> 2 -> 3, of which 1 and 2 are forced
    probs = np.array([1.0, 0.1, 0.1, 0.7], np.float32)
    tree = DraftTree(np.arange(4), np.arange(-1, 3), probs, num_forced=2)
    estimate = AcceptanceEstimate()
    estimate.learn(tree, [0, 1, 2, 3])
    assert estimate.tries[1:4] == estimate.hits[1:4] == [0, 0, 1]
    assert sum(estimate.bin_tries) == sum(estimate.bin_hits) == pytest.approx(1)


def test_a_step_without_drafts_changes_nothing() -> None:
    estimate = AcceptanceEstimate()
    estimate.learn(DraftTree.root_only(3), [0])
    assert estimate.rates(2) == pytest.approx([0.6, 0.6])


def test_no_estimate_is_certain() -> None:
    estimate = AcceptanceEstimate()
    for _ in range(500):
        estimate.learn(chain(0.99), [0, 1])
    assert max(estimate.rates(1)[0], estimate.of_prob(1.0)) <= 0.995
    for _ in range(500):
        estimate.learn(chain(0.99), [0])
    assert 0.001 <= estimate.of_prob(0.99) < 0.05


def test_a_path_deeper_than_all_rates_is_taken_in() -> None:
    """Chains of n-grams go to hundreds of levels."""
    estimate = AcceptanceEstimate()
    estimate.learn(chain(*[0.5] * 104), list(range(105)))
    assert estimate.rates(104)[0] > 0.7
