"""Counts add up, under the field's names and by its definitions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.runtime.lanes.stages import StageTimes
from edgespec.runtime.loop.metrics import Pooled, RequestMetrics
from edgespec.runtime.loop.sequence import StepOutput

LEVELS = 4


def request(
    *steps: tuple[int, int, int], prefill_s: float = 0.5, step_s: float = 0.1
) -> RequestMetrics:
    """A request of verify steps (emitted, drafted, accepted), after one token by prefill."""
    metrics = RequestMetrics(prompt_tokens=7, num_spec_tokens=3, reused_tokens=2)
    metrics.add(StepOutput([1], verified=False), prefill_s)
    for number, (emitted, drafted, accepted) in enumerate(steps, start=1):
        metrics.add(StepOutput([1] * emitted, drafted, accepted), prefill_s + number * step_s)
    return metrics


ONE = request((4, 3, 3), (1, 3, 0), (3, 3, 2), (1, 0, 0))
OTHER = request((2, 10, 1), step_s=0.3)
ENDED_IN_PREFILL = request()


def test_prefill_s_token_counts_as_completion_but_not_as_a_step() -> None:
    assert (ONE.completion_tokens, ONE.decode_tokens, ONE.steps) == (10, 9, 4)


def test_histogram_counts_steps_by_their_accepted_drafts() -> None:
    block = ONE.speculative_decoding()
    assert block["acceptance_histogram"] == [2, 0, 1, 1]
    assert block["acceptance_histogram_by_draft_length"] == {"0": [1, 0, 0, 0], "3": [1, 0, 1, 1]}
    assert block["num_spec_tokens"] == 3
    assert sum(block["acceptance_histogram"]) == block["num_spec_steps"] == 4
    assert (
        sum(a * n for a, n in enumerate(block["acceptance_histogram"]))
        == block["num_accepted_draft_tokens"]
        == 5
    )


def test_acceptance_length_counts_the_bonus_and_rate_is_accepted_over_drafted() -> None:
    block, told = ONE.speculative_decoding(), ONE.to_dict(speculative=True)
    assert block["mean_acceptance_length"] == told["acceptance_length"] == pytest.approx(9 / 4)
    assert block["draft_acceptance_rate"] == told["acceptance_rate"] == pytest.approx(5 / 9)
    assert block["num_draft_tokens"] == sum(block["per_step_drafted"]) == 9
    assert block["per_step_accepted"] == [3, 0, 2, 0]


def test_stop_inside_a_step_shortens_our_acceptance_length_and_leaves_vllm_s() -> None:
    told = request((4, 3, 3), (2, 3, 2)).to_dict(speculative=True)  # the last step emits no bonus
    assert told["acceptance_length"] == pytest.approx(6 / 2)
    assert told["speculative_decoding"]["mean_acceptance_length"] == pytest.approx(1 + 5 / 2)


def test_request_that_ended_in_prefill_has_no_rates_and_divides_by_nothing() -> None:
    block = ENDED_IN_PREFILL.speculative_decoding()
    assert (block["mean_acceptance_length"], block["draft_acceptance_rate"]) == (None, None)
    assert (block["acceptance_histogram"], block["num_spec_steps"]) == ([0] * 4, 0)
    told = ENDED_IN_PREFILL.to_dict(speculative=True)
    undefined = (
        "inter_token_latency_s",
        "tokens_per_s",
        "step_latency_p50_s",
        "acceptance_length",
        "acceptance_rate",
    )
    assert [told[name] for name in undefined] == [None] * 5
    assert told["per_position_acceptance"] == []
    assert told["output_tokens_per_s"] == pytest.approx(1 / 0.5)


@pytest.mark.parametrize("requests", [[], [ENDED_IN_PREFILL], [ENDED_IN_PREFILL] * 2])
def test_pool_without_a_step_has_no_rates_either(requests: list[RequestMetrics]) -> None:
    told = Pooled(requests).to_dict(speculative=True)
    known = {name for name, value in told.items() if value not in (None, [])}
    first = {"queue_time_s", "time_to_first_token_s", "time_to_first_token_without_queue_s"}
    times = first if requests else set()
    times |= (
        {"time_to_first_token_p50_s", "time_to_first_token_p95_s"} if len(requests) > 1 else set()
    )
    assert known == {"completion_tokens", "base_passes_after_prefill"} | times


def test_request_that_ended_in_prefill_does_not_pull_the_means_down() -> None:
    alone, beside = (Pooled(r).to_dict(speculative=True) for r in ([ONE], [ONE, ENDED_IN_PREFILL]))
    for name in ("acceptance_length", "acceptance_rate"):
        assert beside[f"{name}_mean_of_requests"] == beside[name] == alone[name]
    assert beside["inter_token_latency_mean_of_requests_s"] == pytest.approx(
        ONE.inter_token_latency
    )


def test_times_exclude_prefill_from_the_rate_of_tokens_but_not_from_the_output_s() -> None:
    assert ONE.time_to_first_token == 0.5
    assert ONE.request_latency == pytest.approx(0.9)
    assert ONE.inter_token_latency == pytest.approx(0.4 / 9)
    told = ONE.to_dict(speculative=False)
    assert told["tokens_per_s"] == pytest.approx(9 / 0.4)
    assert told["output_tokens_per_s"] == pytest.approx(10 / 0.9)


def test_latency_of_a_step_is_not_that_of_a_token() -> None:
    metrics = request((4, 3, 3))
    metrics.add(StepOutput([1] * 2, 3, 1), 0.5 + 0.1 + 0.3)
    told = metrics.to_dict(speculative=True)
    assert told["step_latency_p50_s"] == pytest.approx(0.2)
    assert told["step_latency_p95_s"] == pytest.approx(0.29)
    assert told["inter_token_latency_s"] == pytest.approx(0.4 / 6)


def test_prompt_is_what_was_reused_and_what_was_computed() -> None:
    told = ONE.to_dict(speculative=False)
    assert (told["prompt_tokens"], told["reused_tokens"], told["computed_tokens"]) == (7, 2, 5)
    assert (Pooled([ONE, OTHER]).reused_tokens, Pooled([ONE, OTHER]).computed_tokens) == (4, 10)


def test_host_time_is_what_the_stages_spent_outside_engines() -> None:
    metrics = request()
    metrics.stages = StageTimes(prefill=1.0, draft=0.5, verify=2.0, commit=0.25, engine=3.0)
    told = metrics.to_dict(speculative=False)
    assert told["stages_s"] == pytest.approx(
        {"prefill": 1.0, "draft": 0.5, "verify": 2.0, "commit": 0.25}
    )
    assert (told["engine_s"], told["host_s"]) == pytest.approx((3.0, 0.75))


def test_plain_request_says_nothing_of_speculation() -> None:
    assert not {k for k in ONE.to_dict(speculative=False) if "accept" in k or "specul" in k}
    assert not {
        k for k in Pooled([ONE]).to_dict(speculative=False) if "accept" in k or "specul" in k
    }


def test_pool_is_sums_over_sums_and_the_means_say_that_they_are_means() -> None:
    told = Pooled([ONE, OTHER]).to_dict(speculative=True)
    assert told["acceptance_length"] == pytest.approx((9 + 2) / (4 + 1))
    assert told["acceptance_length_mean_of_requests"] == pytest.approx((9 / 4 + 2) / 2)
    assert told["acceptance_rate"] == pytest.approx((5 + 1) / (9 + 10))
    assert told["acceptance_rate_mean_of_requests"] == pytest.approx((5 / 9 + 1 / 10) / 2)
    assert told["tokens_per_s"] == pytest.approx(11 / 0.7)
    assert told["inter_token_latency_s"] == pytest.approx(0.7 / 11)
    assert told["inter_token_latency_mean_of_requests_s"] == pytest.approx((0.4 / 9 + 0.3 / 2) / 2)
    assert told["time_to_first_token_s"] == pytest.approx(0.5)


def test_percentiles_over_requests_are_given_where_there_is_more_than_one() -> None:
    several = Pooled([ONE, OTHER, request((1, 0, 0), prefill_s=0.9)]).to_dict(speculative=False)
    assert several["time_to_first_token_p50_s"] == pytest.approx(0.5)
    assert several["time_to_first_token_p95_s"] == pytest.approx(0.86)
    assert several["inter_token_latency_p50_s"] == pytest.approx(0.1)
    only = Pooled([ONE]).to_dict(speculative=False)
    assert not {"time_to_first_token_p50_s", "inter_token_latency_p95_s"} & set(only)


def test_level_at_which_nothing_was_accepted_is_shown() -> None:
    assert request((1, 3, 0)).to_dict(speculative=True)["per_position_acceptance"] == [0, 0, 0]


# Any run: the figures against each other, and against the steps that were put in.


@dataclass(frozen=True)
class Case:
    """Verify steps (emitted, drafted, accepted) and the seconds before the first token and each
    step."""

    steps: list[tuple[int, int, int]]
    seconds: list[float]

    def metrics(self) -> RequestMetrics:
        metrics, elapsed = RequestMetrics(9, LEVELS), self.seconds[0]
        metrics.add(StepOutput([0], verified=False), elapsed)
        for (emitted, drafted, accepted), seconds in zip(self.steps, self.seconds[1:], strict=True):
            elapsed += seconds
            metrics.add(StepOutput([0] * emitted, drafted, accepted), elapsed)
        return metrics


@st.composite
def cases(draw: st.DrawFn) -> Case:
    steps = []
    for _ in range(draw(st.integers(0, 8))):
        drafted = draw(st.integers(0, 12))
        accepted = draw(st.integers(0, min(drafted, LEVELS)))
        steps.append((accepted + 1, drafted, accepted))
    if steps and draw(st.booleans()):  # a stop inside the last step: session.ended
        emitted, drafted, accepted = steps[-1]
        left = draw(st.integers(1, emitted))
        steps[-1] = (left, drafted, min(accepted, left))
    return Case(steps, [draw(st.floats(1e-4, 2)) for _ in range(len(steps) + 1)])


@given(cases())
def test_lists_histograms_positions_and_lengths_of_a_request_say_the_same(case: Case) -> None:
    told = case.metrics().to_dict(speculative=True)
    block, steps = told["speculative_decoding"], len(case.steps)
    assert block["per_step_drafted"] == [d for _, d, _ in case.steps]
    assert block["per_step_accepted"] == [a for _, _, a in case.steps]
    assert dict(enumerate(block["acceptance_histogram"])) == {
        a: sum(accepted == a for _, _, accepted in case.steps) for a in range(LEVELS + 1)
    }
    by_length = block["acceptance_histogram_by_draft_length"]
    assert [sum(column) for column in zip(*by_length.values(), strict=True)] == (
        block["acceptance_histogram"] if steps else []
    )
    assert {int(length): sum(row) for length, row in by_length.items()} == Counter(
        d for _, d, _ in case.steps
    )
    assert told["completion_tokens"] == 1 + sum(e for e, _, _ in case.steps)
    assert told["base_passes_after_prefill"] == block["num_spec_steps"] == steps
    if not steps:
        return
    positions, histogram = told["per_position_acceptance"], block["acceptance_histogram"]
    # Steps without drafts say nothing of the draft
    drafting = sum(drafted > 0 for _, drafted, _ in case.steps)
    assert positions == [
        pytest.approx(sum(histogram[k:]) / drafting) for k in range(1, LEVELS + 1) if drafting
    ]
    assert positions == sorted(positions, reverse=True)
    mean_length = 1 + sum(positions) * drafting / steps
    assert block["mean_acceptance_length"] == pytest.approx(mean_length)
    missing = (block["mean_acceptance_length"] - told["acceptance_length"]) * steps
    assert missing == pytest.approx(0, abs=1e-9) or missing == pytest.approx(1)


@given(cases())
def test_times_of_a_request_add_up_to_its_latency(case: Case) -> None:
    metrics = case.metrics()
    told = metrics.to_dict(speculative=True)
    assert told["request_latency_s"] == pytest.approx(sum(case.seconds))
    assert metrics.per_step_s == pytest.approx(case.seconds[1:])
    assert sum(metrics.per_step_s) == pytest.approx(metrics.decode_s)
    assert told["output_tokens_per_s"] * told["request_latency_s"] == pytest.approx(
        told["completion_tokens"]
    )
    if case.steps:
        spent = told["inter_token_latency_s"] * (told["completion_tokens"] - 1)
        assert told["time_to_first_token_s"] + spent == pytest.approx(told["request_latency_s"])
        assert told["tokens_per_s"] * told["inter_token_latency_s"] == pytest.approx(1)
        assert told["step_latency_p50_s"] == pytest.approx(median(case.seconds[1:]))
        assert told["step_latency_p50_s"] <= told["step_latency_p95_s"] <= max(metrics.per_step_s)


def mean_of(told: list[dict[str, Any]], name: str) -> float | None:
    known = [one[name] for one in told if one[name] is not None]
    return pytest.approx(fmean(known)) if known else None


@given(st.lists(cases(), max_size=5))
def test_pool_is_all_steps_as_one_request_and_its_means_are_those_of_the_output_file(
    all_cases: list[Case],
) -> None:
    requests = [case.metrics() for case in all_cases]
    steps = [step for case in all_cases for step in case.steps]
    pool, told = Pooled(requests), [r.to_dict(speculative=True) for r in requests]
    found = pool.to_dict(speculative=True)
    json.dumps(found, allow_nan=False)
    if steps:
        assert found["acceptance_length"] == pytest.approx(sum(e for e, _, _ in steps) / len(steps))
        drafting = sum(drafted > 0 for _, drafted, _ in steps)
        assert found["per_position_acceptance"] == [
            pytest.approx(sum(a >= k for _, _, a in steps) / drafting)
            for k in range(1, LEVELS + 1)
            if drafting
        ]
        assert found["inter_token_latency_s"] * found["tokens_per_s"] == pytest.approx(1)
    if drafted := sum(d for _, d, _ in steps):
        assert found["acceptance_rate"] == pytest.approx(sum(a for _, _, a in steps) / drafted)
    for name in ("completion_tokens", "base_passes_after_prefill"):
        assert found[name] == sum(one[name] for one in told)
    for name in ("acceptance_length", "acceptance_rate"):
        assert found[f"{name}_mean_of_requests"] == mean_of(told, name)
    assert found["inter_token_latency_mean_of_requests_s"] == mean_of(told, "inter_token_latency_s")
    assert found["time_to_first_token_s"] == mean_of(told, "time_to_first_token_s")


@given(cases())
def test_pool_of_one_is_the_request(case: Case) -> None:
    metrics = case.metrics()
    one, pool = metrics.to_dict(speculative=True), Pooled([metrics]).to_dict(speculative=True)
    shared = set(one) & set(pool)
    assert {
        "acceptance_length",
        "per_position_acceptance",
        "tokens_per_s",
        "step_latency_p95_s",
    } <= shared
    assert {name: pool[name] for name in shared} == {name: one[name] for name in shared}
