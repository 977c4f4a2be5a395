"""Counts add up, under the field's names and by its definitions."""

from __future__ import annotations

import pytest

from edgespec.runtime.metrics import Pooled, RequestMetrics
from edgespec.runtime.session import StageTimes, Step


def request(*steps: tuple[int, int, int], prefill_s: float = 0.5, step_s: float = 0.1) -> RequestMetrics:
    """A request of verify steps (emitted, drafted, accepted), after one token by prefill."""
    metrics = RequestMetrics(prompt_tokens=7, num_spec_tokens=3)
    metrics.add(Step([1], verified=False), prefill_s)
    for number, (emitted, drafted, accepted) in enumerate(steps, start=1):
        metrics.add(Step([1] * emitted, drafted, accepted), prefill_s + number * step_s)
    return metrics


ONE = request((4, 3, 3), (1, 3, 0), (3, 3, 2), (1, 0, 0))
OTHER = request((2, 10, 1), step_s=0.3)


def test_prefill_s_token_counts_as_completion_but_not_as_a_step() -> None:
    assert (ONE.completion_tokens, ONE.decode_tokens, ONE.steps) == (10, 9, 4)


def test_histogram_counts_steps_by_their_accepted_drafts() -> None:
    block = ONE.speculative_decoding()
    assert block["acceptance_histogram"] == [2, 0, 1, 1]
    assert block["acceptance_histogram_by_draft_length"] == {"0": [1, 0, 0, 0], "3": [1, 0, 1, 1]}
    assert block["num_spec_tokens"] == 3
    assert sum(block["acceptance_histogram"]) == block["num_spec_steps"] == 4
    assert sum(a * n for a, n in enumerate(block["acceptance_histogram"])) == block["num_accepted_draft_tokens"] == 5


def test_acceptance_length_counts_the_bonus_and_rate_is_accepted_over_drafted() -> None:
    block = ONE.speculative_decoding()
    assert block["mean_acceptance_length"] == pytest.approx(9 / 4)
    assert block["draft_acceptance_rate"] == pytest.approx(5 / 9)
    assert block["num_draft_tokens"] == sum(block["per_step_drafted"]) == 9
    assert block["per_step_accepted"] == [3, 0, 2, 0]


def test_request_that_ended_in_prefill_has_no_rates_and_divides_by_nothing() -> None:
    ended = request()
    block = ended.speculative_decoding()
    assert (block["mean_acceptance_length"], block["draft_acceptance_rate"]) == (None, None)
    assert (block["acceptance_histogram"], block["num_spec_steps"]) == ([0] * 4, 0)
    told = ended.to_dict(speculative=True)
    assert (told["inter_token_latency_s"], told["output_tokens_per_s"]) == (0.0, 0.0)
    assert Pooled([ended]).acceptance_length is None
    assert (Pooled([]).time_to_first_token, Pooled([]).tokens_per_s) == (0.0, 0.0)


def test_times_exclude_prefill_from_the_rate_of_tokens() -> None:
    assert ONE.time_to_first_token == 0.5
    assert ONE.request_latency == pytest.approx(0.9)
    assert ONE.inter_token_latency == pytest.approx(0.4 / 9)
    assert ONE.to_dict(speculative=False)["output_tokens_per_s"] == pytest.approx(9 / 0.4)


def test_host_time_is_what_the_stages_spent_outside_engines() -> None:
    metrics = request()
    metrics.stages = StageTimes(prefill=1.0, draft=0.5, verify=2.0, commit=0.25, engine=3.0)
    assert metrics.to_dict(speculative=False)["stages_s"]["host"] == pytest.approx(0.75)


def test_plain_request_has_no_block_of_speculation() -> None:
    assert "speculative_decoding" not in ONE.to_dict(speculative=False)


def test_pool_is_sums_over_sums_not_a_mean_of_means() -> None:
    pool = Pooled([ONE, OTHER])
    assert pool.acceptance_length == pytest.approx((9 + 2) / (4 + 1))
    assert pool.acceptance_rate == pytest.approx((5 + 1) / (9 + 10))
    assert pool.tokens_per_s == pytest.approx(11 / 0.7)
    assert pool.inter_token_latency == pytest.approx(0.7 / 11)
    assert pool.time_to_first_token == pytest.approx(0.5)


def test_per_position_acceptance_sums_to_the_mean_of_accepted_drafts() -> None:
    pool = Pooled([ONE, OTHER])  # accepted: 3 0 2 0 1
    assert pool.per_position_acceptance == pytest.approx([3 / 5, 2 / 5, 1 / 5])
    assert 1 + sum(pool.per_position_acceptance) == pytest.approx(pool.acceptance_length)
