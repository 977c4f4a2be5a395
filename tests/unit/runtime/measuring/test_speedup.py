"""Why a run with drafts was slower: the cause by the figures, and the figures by the definition."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgespec.runtime.acceptance.base import Lossless
from edgespec.runtime.lanes.stages import StageTimes
from edgespec.runtime.loop.metrics import Pooled, RequestMetrics
from edgespec.runtime.loop.sequence import StepOutput
from edgespec.runtime.measuring.speedup import Speedup, StepCost


def decoded(
    steps: int, accepted: int, draft: float, verify: float, commit: float, other: float
) -> RequestMetrics:
    """A request of equal steps; times in milliseconds of one."""
    metrics = RequestMetrics(4, num_spec_tokens=3 if draft else 0)
    metrics.add(StepOutput([0], verified=False), 1.0)
    step_s = (draft + verify + commit + other) / 1000
    for number in range(1, steps + 1):
        output = StepOutput([0] * (accepted + 1), 3 if draft else 0, accepted)
        metrics.add(output, 1.0 + number * step_s)
    metrics.stages = StageTimes(0.9, *(steps * ms / 1000 for ms in (draft, verify, commit)))
    return metrics


PLAIN = decoded(40, 0, 0, 10, 0, 0)


def speedup(drafted: RequestMetrics, *, batch_size: int = 1, plain: bool = True) -> Speedup:
    found = Speedup.of([drafted], [PLAIN] if plain else [], batch_size)
    assert found is not None
    return found


# draft, verify, commit, other ms of a step that accepts so many of three; batch size; cause, words
CASES = {
    "a draft as large as its base": (2, (30, 11, 0, 1), 1, "draft_cost", "base is too small"),
    "many rows of a lone request": (1, (3, 28, 0, 0), 1, "verify_cost", "too many rows"),
    "many rows of a batch": (1, (3, 28, 0, 0), 4, "verify_cost", "4 requests at a time"),
    "few drafts accepted": (0, (6, 11, 0, 0), 1, "acceptance", "Too few of the 3 drafts"),
    "work of the host": (1, (3, 11, 4, 15), 1, "host_cost", "outside the engines"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_slower_run_is_explained_by_its_largest_cost_or_by_acceptance(case: str) -> None:
    accepted, times, batch_size, cause, words = CASES[case]
    drafted = decoded(20, accepted, *times)
    found = speedup(drafted, batch_size=batch_size)
    assert found.slower_because == cause
    assert found.break_even == pytest.approx(sum(times) / 10)
    line = found.line
    assert line is not None
    assert words in line
    assert "\n" not in line
    assert f"acceptance length of {sum(times) / 10:.2f}, and it was {accepted + 1:.2f}" in line
    ratio = Pooled([drafted]).tokens_per_s / Pooled([PLAIN]).tokens_per_s
    assert found.over_plain == pytest.approx(ratio)
    assert f"({ratio:.2f}x)" in line


def test_a_faster_run_needs_no_explanation_and_has_its_figures() -> None:
    found = speedup(decoded(20, 2, 5, 11, 0.5, 0.5))
    assert (found.line, found.slower_because) == (None, None)
    said = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert said["over_plain"] == pytest.approx(3 / 1.7)
    parts = [said[f"step_{part}_s"] for part in ("draft", "verify", "commit", "other")]
    assert sum(parts) == pytest.approx(said["step_s"]) == pytest.approx(0.017)
    assert said["plain_step_s"] == pytest.approx(0.01)
    assert said["break_even_acceptance_length"] == pytest.approx(1.7)


def by_the_way(drafted: RequestMetrics, plain_ms: float) -> Speedup:
    found = Speedup.of([drafted], [], 1, StepCost(0.0, plain_ms / 1000, 0.0, 0.0))
    assert found is not None
    return found


def test_a_few_plain_steps_at_the_end_say_that_drafts_did_not_pay() -> None:
    found = by_the_way(decoded(20, 1, 15, 11, 0, 0), 10.0)
    line = found.line
    assert line is not None
    assert line.startswith("slower than plain decoding (about 0.77x)")
    assert line.endswith("`check_lossless` measures whole requests.")
    assert found.to_dict()["plain_steps_of"] == "end"
    assert speedup(decoded(20, 1, 15, 11, 0, 0)).to_dict()["plain_steps_of"] == "requests"


@pytest.mark.parametrize("lossless", ["no", "distribution"])
def test_answers_that_a_check_refuses_are_measured_by_their_quality(lossless: Lossless) -> None:
    drafted = replace(decoded(20, 1, 15, 11, 0, 0), lossless=lossless)
    line = by_the_way(drafted, 10.0).line
    assert line is not None
    assert line.endswith("`compare_quality` measures whole requests.")
    both = Speedup.of([drafted, decoded(20, 1, 15, 11, 0, 0)], [], 2, StepCost(0.0, 0.01, 0.0, 0.0))
    assert both is not None
    assert "`compare_quality`" in (both.line or "")


def test_a_run_that_too_many_requests_kept_from_drafting_is_not_called_slow() -> None:
    held = decoded(20, 0, 15, 11, 0, 0)
    assert speedup(held).line is not None
    held.steps_without_drafts = held.steps
    assert Speedup.of([held], [PLAIN], 4) is None


def test_a_few_plain_steps_are_too_uncertain_for_a_small_difference() -> None:
    drafted = decoded(20, 1, 9.7, 11, 0, 0)  # 0.97 times as fast
    assert by_the_way(drafted, 10.0).line is None
    assert speedup(drafted).line is not None


@pytest.mark.parametrize("plain", [True, False])
def test_a_handful_of_steps_says_nothing_of_speed(plain: bool) -> None:
    assert speedup(decoded(15, 0, 30, 11, 0, 0), plain=plain).line is None


def test_without_plain_steps_nothing_is_claimed() -> None:
    found = speedup(decoded(20, 1, 30, 11, 0, 0), plain=False)
    said = found.to_dict()
    assert (found.line, said["plain_steps_of"]) == (None, None)
    assert said["step_s"] > 0
    assert said["over_plain"] is said["plain_step_s"] is said["slower_because"] is None


def test_drafts_of_a_tree_are_counted_and_not_its_levels() -> None:
    drafted = decoded(20, 0, 6, 11, 0, 0)
    drafted.per_step_drafted = [19] * 20
    line = speedup(drafted).line
    assert line is not None
    assert "Too few of the 19 drafts of a tree of 3 levels are accepted." in line


def test_without_a_drafted_step_there_is_nothing_to_say() -> None:
    none = RequestMetrics(4, 3)
    assert Speedup.of([], [PLAIN], 1) is None
    assert Speedup.of([none], [PLAIN], 1) is None
    none.add(StepOutput([0], verified=False), 1.0)
    assert Speedup.of([none], [PLAIN], 1) is None
