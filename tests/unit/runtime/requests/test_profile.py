"""A run's figures agree with the passes behind them: real sessions over `hash_model`, alone and
side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.errors import RequestError
from edgespec.prompts import CANCELLED, ERROR, Message, Request, SamplingParams
from edgespec.runtime.lanes import stages
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.loop.prefix import PrefixCache
from edgespec.runtime.loop.sequence import SequenceState, StepOutput
from edgespec.runtime.loop.session import Session
from edgespec.runtime.requests.answers import Answer
from edgespec.runtime.requests.lossless_check import Difference
from edgespec.runtime.requests.memory import peak_bytes
from edgespec.runtime.requests.profile import SHARED, RunStats, profile, summary
from edgespec.runtime.trees.tree import DraftPlan
from edgespec.runtime.vision.image_stats import ImageStats
from tests.lossless.drafters import ScriptedDrafter
from tests.unit.runtime.hash_model import GREEDY, VOCAB, begin, decoder_of, plainly

PLAN = DraftPlan(3, 4, 9)
HEAD = [1, 2, 3, 4, 5]


def answer(
    metrics: RequestMetrics,
    reason: str = "max-length",
    *,
    speculative: bool = True,
    plain: RequestMetrics | None = None,
) -> Answer:
    def response(metrics: RequestMetrics) -> Response:
        return Response("", [0] * metrics.completion_tokens, reason, metrics, None)

    return Answer(
        request(disable_spec_decode=not speculative),
        response=response(metrics),
        speculative=speculative,
        cancelled=reason == CANCELLED,
        plain=None if plain is None else response(plain),
    )


def request(**more: Any) -> Request:
    return Request(0, (Message("user", "x"),), SamplingParams(), **more)


def tasks_of(*lengths: int, plan: DraftPlan | None = PLAN) -> list[SequenceState]:
    return [
        SequenceState([*HEAD, 9 + i], GREEDY, n, plan=plan, keep=len(HEAD))
        for i, n in enumerate(lengths)
    ]


def served(tasks: Sequence[SequenceState], lanes: int) -> RunStats:
    """The tasks through a session, `lanes` at a time; each step begins a second after the one
    before."""
    scripts = [(t.prompt, plainly(t.prompt, t.sampler, t.max_new_tokens + 8)[0]) for t in tasks]
    session = Session(
        decoder_of(40, lanes=lanes), ScriptedDrafter(scripts, VOCAB, 0.7), PrefixCache(2**20)
    )
    found: list[Answer] = []
    active: dict[SequenceState, RequestMetrics] = {}
    queue = deque(replace(task) for task in tasks)

    def take(seq: SequenceState, step: StepOutput) -> None:
        metrics = active[seq]
        metrics.add(step, 1.0 + len(metrics.per_step_accepted))
        if step.finish_reason is not None:
            metrics.stages, metrics.reused_tokens = seq.times, seq.num_reused
            speculative = seq.plan is not None
            found.append(answer(active.pop(seq), step.finish_reason, speculative=speculative))

    while queue or active:
        while queue and len(active) < lanes:
            seq = queue.popleft()
            active[seq] = RequestMetrics(len(seq.prompt), seq.plan.steps if seq.plan else 0)
            take(seq, begin(session, seq))
        for seq, step in session.step() if active else ():
            take(seq, step)
    wall_s = sum(sum(seconds) for seconds in session.log.passes.values()) + 1.0
    return RunStats(found, wall_s, session.log.passes, lanes, spec_decode=True)


def stage(found: dict[str, Any], stage_id: str) -> dict[str, Any]:
    (one,) = [one for one in found["stages"] if one["stage_id"] == stage_id]
    return one  # type: ignore[no-any-return]


def metrics_of(run: RunStats) -> list[RequestMetrics]:
    return [a.response.metrics for a in run.answers if a.response]


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=5)
plans = st.lists(st.booleans(), min_size=5, max_size=5)


def mixture(lengths: list[int], drafts: list[bool]) -> list[SequenceState]:
    plans = [PLAN if drafting else None for drafting in drafts]
    return [tasks_of(n, plan=plan)[0] for n, plan in zip(lengths, plans, strict=False)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths, plans, st.integers(1, 3))
def test_stages_sum_to_the_log_and_to_what_the_requests_say(
    lengths: list[int], drafts: list[bool], lanes: int
) -> None:
    run = served(mixture(lengths, drafts), lanes)
    found = profile(run)
    json.dumps(found, allow_nan=False)
    assert {one["stage_id"] for one in found["stages"]} == set(run.passes)
    coarse = dict.fromkeys(stages.COARSE.values(), 0.0)
    for one in found["stages"]:
        seconds, stats = run.passes[one["stage_id"]], one["gpu_time_stats"]
        assert one["total_runs"] == stats["count"] == len(seconds)
        assert one["total_gpu_time_ms"] == pytest.approx(1000 * sum(seconds))
        assert one["average_time_per_run_ms"] * one["total_runs"] == pytest.approx(
            one["total_gpu_time_ms"]
        )
        assert stats["mean_ms"] == one["average_time_per_run_ms"]
        order = [stats[name] for name in ("min_ms", "median_ms", "p95_ms", "p99_ms", "max_ms")]
        assert order == sorted(order)
        assert (stats["min_ms"], stats["max_ms"]) == pytest.approx(
            (1000 * min(seconds), 1000 * max(seconds))
        )
        coarse[stages.COARSE[one["stage_id"]]] += sum(seconds)
    for name, seconds in coarse.items():
        of_requests = sum(getattr(m.stages, name) for m in metrics_of(run))
        assert (
            seconds == pytest.approx(of_requests) if lanes == 1 else seconds <= of_requests + 1e-9
        )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths, plans, st.integers(1, 3))
def test_blocks_count_the_tokens_and_iterations_of_the_answers(
    lengths: list[int], drafts: list[bool], lanes: int
) -> None:
    run = served(mixture(lengths, drafts), lanes)
    found, all_metrics = profile(run), metrics_of(run)
    before = found["prefill"]
    assert before["total_runs"] == len(lengths)
    assert before["reused_tokens"] + before["computed_tokens"] == sum(
        m.prompt_tokens for m in all_metrics
    )
    assert before["average_tokens_per_run"] * before["total_runs"] == pytest.approx(
        before["computed_tokens"]
    )
    assert before["tokens_per_second"] * before["average_time_per_token_ms"] == pytest.approx(1000)
    total_ms = stage(found, stages.PREFILL)["total_gpu_time_ms"]
    assert before["average_time_per_run_ms"] * before["total_runs"] == pytest.approx(total_ms)
    tokens = 0
    if block := found.get("eagle_generation"):
        drafted = [m for a, m in zip(run.answers, all_metrics, strict=True) if a.speculative]
        assert block["total_iterations"] == sum(m.steps for m in drafted)
        assert block["average_acceptance_rate"] * block["total_iterations"] == pytest.approx(
            block["total_generated_tokens"]
        )
        assert block["average_tokens_per_run"] * block["total_runs"] == pytest.approx(
            block["total_generated_tokens"]
        )
        assert block["average_acceptance_rate"] == (
            found["edgespec"]["speculative"]["acceptance_length"] or 0.0
        )
        tokens += block["total_generated_tokens"]
    if block := found.get("generation"):
        assert block["average_tokens_per_run"] * block["total_runs"] == pytest.approx(
            block["generated_tokens"]
        )
        tokens += block["generated_tokens"]
    assert tokens == sum(m.completion_tokens - 1 for m in all_metrics)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths, plans)
def test_one_after_the_other_every_pass_is_paid_for_by_the_block_that_made_it(
    lengths: list[int], drafts: list[bool]
) -> None:
    run = served(mixture(lengths, drafts), 1)
    found, paid = profile(run), 0.0
    if (block := found.get("generation")) and block["generated_tokens"]:
        paid += block["generated_tokens"] / block["tokens_per_second"]
        assert block["tokens_per_second"] * block["average_time_per_token_ms"] == pytest.approx(
            1000
        )
    block = found.get("eagle_generation")
    speed = block["overall_tokens_per_second_excluding_base_prefill"] if block else 0.0
    if block and speed:
        paid += block["total_generated_tokens"] / speed
    elif block:  # all ended in prefill: no token, and the draft's prefill was for nothing
        paid += run.seconds(stages.DRAFT_PREFILL)
    assert paid == pytest.approx(
        sum(sum(seconds) for name, seconds in run.passes.items() if name != stages.PREFILL)
    )


def test_batch_shares_passes_but_not_iterations() -> None:
    found = profile(served(tasks_of(12, 12, 12), lanes=3))
    verified = stage(found, stages.VERIFICATION)["total_runs"]
    assert verified < found["eagle_generation"]["total_iterations"] <= 3 * verified
    alone = profile(served(tasks_of(12, 12, 12), lanes=1))
    assert (
        stage(alone, stages.VERIFICATION)["total_runs"]
        == alone["eagle_generation"]["total_iterations"]
    )


def test_drafted_and_plain_sequences_in_one_batch_leave_no_speed_to_the_plain_ones() -> None:
    tasks = [*tasks_of(12), *tasks_of(12, plan=None)]
    block = profile(served(tasks, 2))["generation"]
    assert block["generated_tokens"] == 11
    assert (block["tokens_per_second"], block["average_time_per_token_ms"]) == (None, None)
    assert SHARED in profile(served(tasks, 2))["notes"]
    for apart in (served(tasks, 1), served(tasks_of(12, 9, plan=None), 2)):
        assert profile(apart)["generation"]["tokens_per_second"] > 0
        assert SHARED not in profile(apart)["notes"]
    assert SHARED not in profile(served(tasks_of(12, 9), 2))["notes"]


def test_reused_tokens_make_prefill_no_faster() -> None:
    run = served(tasks_of(2, 2, 2, plan=None), lanes=1)
    block = profile(run)["prefill"]
    assert (block["reused_tokens"], block["computed_tokens"]) == (10, 8)
    assert block["tokens_per_second"] == pytest.approx(8 / sum(run.passes[stages.PREFILL]))
    assert summary(run)["reused_tokens"] == 10


def test_profile_has_the_keys_of_tensorrt_edge_llm() -> None:
    found = profile(served([*tasks_of(12), *tasks_of(12, plan=None)], 1))
    assert [*found] == [
        "device",
        "notes",
        "prefill",
        "generation",
        "eagle_generation",
        "stages",
        "peak_cpu_memory_bytes",
        "peak_cpu_memory_mb",
        "edgespec",
    ]
    assert [*found["prefill"]] == [
        "total_runs",
        "reused_tokens",
        "computed_tokens",
        "average_tokens_per_run",
        "average_time_per_run_ms",
        "tokens_per_second",
        "average_time_per_token_ms",
    ]
    assert [*found["generation"]] == [
        "total_runs",
        "generated_tokens",
        "average_tokens_per_run",
        "tokens_per_second",
        "average_time_per_token_ms",
    ]
    assert [*found["eagle_generation"]] == [
        "total_runs",
        "total_iterations",
        "total_generated_tokens",
        "average_tokens_per_run",
        "average_acceptance_rate",
        "overall_tokens_per_second_excluding_base_prefill",
    ]
    one = found["stages"][0]
    assert [*one] == [
        "stage_id",
        "total_runs",
        "total_gpu_time_ms",
        "average_time_per_run_ms",
        "gpu_time_stats",
    ]
    assert [*one["gpu_time_stats"]] == [
        "count",
        "min_ms",
        "max_ms",
        "mean_ms",
        "median_ms",
        "p95_ms",
        "p99_ms",
        "stddev_ms",
    ]
    assert found["device"] == "cpu"


def test_stage_s_statistics_are_the_textbook_s() -> None:
    passes = {stages.PREFILL: [0.001, 0.002, 0.003, 0.006]}
    stats = stage(profile(RunStats([], 1.0, passes)), stages.PREFILL)["gpu_time_stats"]
    assert stats == pytest.approx(
        {
            "count": 4,
            "min_ms": 1,
            "max_ms": 6,
            "mean_ms": 3,
            "median_ms": 2.5,
            "p95_ms": 5.55,
            "p99_ms": 5.91,
            "stddev_ms": 3.5**0.5,
        }
    )


def test_run_in_which_nothing_was_answered_divides_by_nothing() -> None:
    failed = Answer(request(), error=RequestError("no", "yes"))
    for answers in ([], [failed]):
        run = RunStats(answers, 0.0, {}, spec_decode=True)
        found = profile(run)
        assert not {"prefill", "generation", "eagle_generation"} & set(found)
        assert found["stages"] == []
        assert found["edgespec"]["output_tokens_per_s"] is None
        assert not {"plain", "speculative", "lossless"} & set(found["edgespec"])


# The summary


def counted(emitted: int, *, prompt: int = 4) -> RequestMetrics:
    """A request of steps that each emit one token, one a second."""
    metrics = RequestMetrics(prompt)
    metrics.add(StepOutput([0], verified=False), 1.0)
    for number in range(1, emitted):
        metrics.add(StepOutput([0], 1, 0), 1.0 + number)
    return metrics


ENDED = [
    answer(counted(5), "end-of-sequence"),
    answer(counted(3), "max-length"),
    answer(counted(2), "max-length", speculative=False),
    answer(counted(1), CANCELLED),
    Answer(request(), cancelled=True),
    Answer(request(), error=RequestError("no", "yes")),
]


def test_every_request_has_one_reason_why_it_ended() -> None:
    found = summary(RunStats(ENDED, 2.0, {}, spec_decode=True))
    assert found["finish_reasons"] == {
        CANCELLED: 2,
        "end-of-sequence": 1,
        ERROR: 1,
        "max-length": 2,
    }
    assert sum(found["finish_reasons"].values()) == found["requests"] == 6
    assert (found["cancelled"], found["failed"]) == (2, 1)


def test_throughput_of_the_run_is_all_tokens_over_its_wall_time() -> None:
    found = summary(RunStats(ENDED, 2.0, {}, 4, spec_decode=True))
    assert (found["wall_s"], found["batch_size"]) == (2.0, 4)
    assert found["completion_tokens"] == 5 + 3 + 2 + 1
    assert found["output_tokens_per_s"] == pytest.approx(11 / 2.0)
    assert found["speculative"]["tokens_per_s"] == pytest.approx(1.0)  # what each user saw


def test_speculative_figures_are_over_those_that_drafted_and_plain_ones_over_the_others() -> None:
    found = summary(RunStats(ENDED, 2.0, {}, spec_decode=True))
    assert found["without_drafts"] == 1
    assert found["speculative"]["completion_tokens"] == 5 + 3 + 1
    assert (
        found["plain"]["completion_tokens"] + found["speculative"]["completion_tokens"]
        == found["completion_tokens"]
    )


def test_plain_run_has_plain_figures_alone() -> None:
    disabled = [answer(counted(2), speculative=False), answer(counted(3), speculative=False)]
    plainly = [replace(a, request=request()) for a in disabled]
    for answers, spec_decode in ((plainly, False), (disabled, True)):
        found = summary(RunStats(answers, 1.0, {}, spec_decode=spec_decode))
        assert found["plain"]["completion_tokens"] == 5
        assert found["without_drafts"] == 2
        assert "speculative" not in found


def test_check_compares_the_same_requests_in_both_columns() -> None:
    both = [answer(counted(5), plain=counted(9)), answer(counted(2), plain=counted(2))]
    run = RunStats(
        [*both, answer(counted(7)), ENDED[2]], 2.0, {}, spec_decode=True, check_wall_s=11.0
    )
    found = summary(run)
    assert (found["plain"]["completion_tokens"], found["speculative"]["completion_tokens"]) == (
        11,
        7,
    )
    assert found["base_passes_saved"] == 0  # a pass a token in both, though one is shorter
    assert found["lossless"] == "yes"
    assert found["check_output_tokens_per_s"] == pytest.approx(11 / 11.0)
    assert found["output_tokens_per_s"] == pytest.approx((5 + 2 + 7 + 2) / 2.0)


def test_base_passes_saved_are_a_token_where_answers_have_other_lengths() -> None:
    """24 exact tokens beside 4 of another answer are no saving; two tokens a pass are."""
    lossy = counted(1)
    for number in range(3):
        lossy.add(StepOutput([0, 0], 1, 1), 2.0 + number)
    found = summary(RunStats([answer(lossy, plain=counted(24))], 1.0, {}, spec_decode=True))
    assert found["base_passes_saved"] == pytest.approx(0.5)
    shorter = summary(RunStats([answer(counted(4), plain=counted(24))], 1.0, {}, spec_decode=True))
    assert shorter["base_passes_saved"] == 0
    alone = summary(RunStats([answer(counted(1), plain=counted(1))], 1.0, {}, spec_decode=True))
    assert alone["base_passes_saved"] is None


def differing(apart: float, rounding: float = 0.01, bound: float = 2.0) -> Difference:
    return Difference(index=27, plain=1, speculative=2, apart=apart, rounding=rounding, bound=bound)


@pytest.mark.parametrize(
    ("apart", "said"),
    [
        ([], "yes"),
        ([0.005], "1 of 2 identical; 1 differs, explained by rounding"),
        ([0.005, 0.0], "1 of 3 identical; 2 differ, explained by rounding"),
        ([0.005, 1.0], "NO: 1 of 3 identical; 2 differ, 1 NOT explained by rounding"),
        ([1.0], "NO: 1 of 2 identical; 1 differs, NOT explained by rounding"),
    ],
)
def test_lossless_is_yes_only_where_every_answer_is_equal(apart: list[float], said: str) -> None:
    one = answer(counted(2), plain=counted(2))
    others = [replace(one, difference=differing(nats)) for nats in apart]
    uncompared = answer(counted(2))
    found = summary(RunStats([one, *others, uncompared], 1.0, {}, spec_decode=True))
    assert found["lossless"] == said
    check = found["lossless_check"]
    assert (check["compared"], check["identical"]) == (1 + len(apart), 1)
    assert check["explained"] + check["unexplained"] == len(apart) == len(check["differences"])
    assert check["unexplained"] == apart.count(1.0)
    assert all(place["token_index"] == 27 for place in check["differences"])


def test_rounding_beyond_what_the_engine_was_measured_with_explains_nothing() -> None:
    assert differing(0.005).explained
    assert differing(0.01, 0.01).explained
    assert not differing(0.011, 0.01).explained
    assert not differing(0.005, 3.0, bound=2.0).explained
    assert not differing(float("nan")).explained
    assert not differing(0.005, float("nan")).explained
    assert "beyond the 2 of this engine" in differing(0.005, 3.0).words


def test_an_answer_that_ended_elsewhere_is_never_explained() -> None:
    ended = replace(differing(float("inf")), speculative=None)
    assert not ended.explained
    assert (
        ended.words == "the speculative run ended after 27 tokens, the other went on: NOT explained"
    )
    assert ended.to_dict()["candidates_apart_nats"] is None  # JSON has no infinity
    assert json.loads(json.dumps(ended.to_dict(), allow_nan=False))["explained"] is False


# Memory

SMALL_CHILD = "from edgespec.runtime.requests.memory import peak_bytes; print(peak_bytes())"
LARGE_PARENT = f"""
import subprocess, sys
held = b"x" * 2**28
print(subprocess.run([sys.executable, "-c", {SMALL_CHILD!r}], capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux can tell")
def test_peak_is_this_process_s_own_not_its_parent_s() -> None:
    said = subprocess.run(
        [sys.executable, "-c", LARGE_PARENT], capture_output=True, text=True, check=True
    ).stdout
    assert 2**20 < int(said) < 2**27


HELD_ONCE = f"""
from edgespec.runtime.requests.memory import peak_bytes
before = peak_bytes()
held = b"x" * (before + {2**26})
grown = peak_bytes()
del held
print(grown - before, peak_bytes() - before)
"""


def test_peak_stays_when_the_memory_is_gone() -> None:
    said = subprocess.run(
        [sys.executable, "-c", HELD_ONCE], capture_output=True, text=True, check=True
    ).stdout
    assert all(int(grown) >= 2**26 for grown in said.split())
    assert len(said.split()) == 2


def test_peak_is_the_high_water_mark_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.write_text("Name:\tpython\nVmHWM:\t   2048 kB\nVmRSS:\t   1024 kB\n")
    assert peak_bytes(path) == 2 * 2**20


@pytest.mark.parametrize("status", [None, "Name:\tpython\nVmRSS:\t 10 kB\n"])
def test_where_the_system_keeps_no_such_account_another_is_asked(
    tmp_path: Path, status: str | None
) -> None:
    path = tmp_path / "status"
    if status is not None:
        path.write_text(status)
    assert 2**20 < peak_bytes(path) < 2**40


def test_peak_is_told_in_bytes_and_in_megabytes() -> None:
    found = profile(RunStats([], 1.0, {}, peak_cpu_memory_bytes=3 * 2**20))
    for place in (found, found["edgespec"]):
        assert (place["peak_cpu_memory_bytes"], place["peak_cpu_memory_mb"]) == (3 * 2**20, 3.0)
    assert RunStats([], 1.0, {}).peak_cpu_memory_bytes >= 2**20


def test_images_have_their_own_part_where_there_are_some() -> None:
    metrics = RequestMetrics(7, per_step_accepted=[0])
    done = ImageStats(3, 48, 0.5, 2, 32, 1.0)
    passes = {stages.VISION_ENCODER: [0.4, 0.6], stages.MULTIMODAL: [0.1, 0.1, 0.3]}
    run = RunStats([answer(metrics, speculative=False)], 2.0, passes, images=done)
    found = profile(run)
    assert found["multimodal"] == {
        "total_images": 3,
        "total_image_tokens": 48,
        "average_tokens_per_image": 16.0,
        "tokens_per_second": 32.0,
        "average_time_per_token_ms": 31.25,
    }
    assert [one["stage_id"] for one in found["stages"]] == [
        "multimodal_processing",
        "vision_encoder",
    ]
    assert [one["total_runs"] for one in found["stages"]] == [3, 2]
    assert found["edgespec"]["images"]["encoded"] == 2
    without = profile(replace(run, passes={}, images=ImageStats()))
    assert "multimodal" not in without
    assert "images" not in without["edgespec"]
    assert len(without["notes"]) == len(found["notes"]) - 1


def test_acceptance_has_specdec_benchs_names_too() -> None:
    metrics = RequestMetrics(7, 3, per_step_accepted=[0, 2], per_step_drafted=[3, 3])
    run = RunStats([answer(metrics), replace(answer(metrics), turn=1)], 1.0, {}, spec_decode=True)
    found = summary(run)["specdec_bench"]
    assert found["Request_AL"] == {"0": {"0": 2.0, "1": 2.0}}
    assert found["Acceptance_Length_Histogram"] == {"1": 2, "3": 2}
