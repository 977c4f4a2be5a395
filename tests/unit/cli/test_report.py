"""What is shown is what the summary and the profile say, whole, and on the right stream."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from edgespec.cli import report
from edgespec.cli.tables import print_table
from edgespec.errors import RequestError
from edgespec.prompts import Message, Request, SamplingParams
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.lanes import stages
from edgespec.runtime.loop.generation import Chunk, Response
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.loop.sequence import StepOutput
from edgespec.runtime.requests.answers import Answer
from edgespec.runtime.requests.lossless_check import Difference
from edgespec.runtime.requests.profile import RunStats, profile, summary
from edgespec.runtime.trees.tree import DraftPlan

MEMORY = 300 * 2**20


def response(*steps: tuple[int, int, int], reused: int = 0) -> Response:
    """A response of verify steps (emitted, drafted, accepted), a tenth of a second each, after half
    a second."""
    metrics = RequestMetrics(7, 3, reused)
    metrics.add(StepOutput([1], verified=False), 0.5)
    for number, (emitted, drafted, accepted) in enumerate(steps, start=1):
        metrics.add(StepOutput([1] * emitted, drafted, accepted), 0.5 + number * 0.1)
    return Response("", [1] * metrics.completion_tokens, "max-length", metrics, None)


def request(index: int = 0, turns: tuple[str, ...] = ()) -> Request:
    return Request(index, (Message("user", "x"),), SamplingParams(), turns=turns)


PLAIN = [(1, 0, 0)] * 5
ONE = Answer(request(), response=response((4, 3, 3), (1, 3, 0)), speculative=True)
CHECKED = Answer(request(), response=ONE.response, speculative=True, plain=response(*PLAIN))
OTHER = Answer(request(1), response=response((2, 3, 1), reused=3), speculative=True)
UNDRAFTED = Answer(request(), response=response(*PLAIN))
FAILED = Answer(request(2), error=RequestError("it is too long", "Shorten it."))


def figures(*answers: Answer, batch_size: int = 1, check_wall_s: float | None = None) -> RunStats:
    passes = {
        stages.VERIFICATION: [0.2, 0.4],
        stages.DRAFT_PROPOSAL: [0.1, 0.1],
        stages.PREFILL: [0.7],
    }
    drafting = any(a.speculative for a in answers)
    return RunStats(
        answers, 2.0, passes, batch_size, drafting, check_wall_s, peak_cpu_memory_bytes=MEMORY
    )


def rows(table: Table) -> dict[str, list[str]]:
    """Label -> cells; a mean of requests is under the label above it as well."""
    labels, *columns = ([*column.cells] for column in table.columns)
    out: dict[str, list[str]] = {}
    above = ""
    for label, *cells in zip(labels, *columns, strict=True):
        name = f"{above}:mean" if label.startswith("  mean") else label
        above = label
        out[name] = cells
    return out


def shown(run: RunStats) -> dict[str, list[str]]:
    return rows(report.table(summary(run)))


def test_plain_stands_beside_speculative() -> None:
    run = figures(CHECKED)
    assert [column.header for column in report.table(summary(run)).columns] == [
        "",
        "plain",
        "speculative",
    ]
    assert shown(run) == {
        "tokens": ["6", "6"],
        "base passes after prefill": ["5", "2"],
        "tokens/s": ["10.0", "25.0"],
        "time to first token": ["0.500 s", "0.500 s"],
        "inter-token latency": ["0.1000 s", "0.0400 s"],
        "acceptance length": ["-", "2.50"],
        "acceptance rate": ["-", "0.50"],
        "per-position acceptance": ["", "0.50 0.50 0.50"],
        "peak memory": ["", "300 MB"],
        "base passes saved": ["", "60%"],
        "lossless": ["", "yes"],
    }


def test_throughput_of_the_run_is_shown_where_requests_are_several_or_side_by_side() -> None:
    label = "tokens/s of the whole run"
    assert label not in shown(figures(ONE))
    assert shown(figures(ONE, batch_size=2))[label] == ["3.0"]
    assert shown(figures(ONE, OTHER))[label] == ["4.5"]
    assert shown(figures(UNDRAFTED, UNDRAFTED))[label] == ["6.0"]
    assert shown(figures(CHECKED, OTHER))[label] == ["-", "4.5"]
    assert shown(figures(CHECKED, OTHER, check_wall_s=4.0))[label] == ["1.5", "4.5"]


def test_mean_of_requests_is_shown_where_it_reads_otherwise() -> None:
    found = shown(figures(ONE, OTHER))
    assert (found["acceptance length"], found["acceptance length:mean"]) == (["2.33"], ["2.25"])
    assert (found["acceptance rate"], found["acceptance rate:mean"]) == (["0.44"], ["0.42"])
    assert found["inter-token latency:mean"] == ["0.0450 s"]
    assert not [label for label in shown(figures(ONE, ONE)) if "mean" in label]


def test_steps_that_a_schedule_kept_from_drafting_are_said() -> None:
    run = figures(ONE, OTHER)
    assert not [line for line in report.explained(run) if "nothing was drafted" in line]
    answers = []
    for number, steps in enumerate((2, 3)):
        made = response(*[(1, 0, 0)] * steps)
        made.metrics.steps_without_drafts = steps
        answers.append(Answer(request(number), response=made, speculative=True))
    held_run, steps = figures(*answers, batch_size=2), 5
    (line,) = report.explained(held_run)
    assert line.startswith(f"nothing was drafted in {steps} of {steps} steps")
    assert "max_concurrency" in line
    assert summary(held_run)["steps_without_drafts"] == steps


def test_reuse_is_shown_where_there_was_any() -> None:
    assert shown(figures(ONE, OTHER))["reused prompt tokens"] == ["3 of 14"]
    assert "reused prompt tokens" not in shown(figures(ONE))


def test_plain_run_shows_nothing_of_drafts() -> None:
    found = shown(figures(UNDRAFTED))
    assert found["tokens"] == ["6"]
    assert not [label for label in found if "accept" in label or "lossless" in label]


def test_json_is_the_summary_on_stdout_and_failures_are_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    later = Answer(request(3, turns=("y", "z")), turn=2, error=RequestError("no", "yes"))
    run = figures(ONE, FAILED, later)
    report.show(run, as_json=True)
    said = capsys.readouterr()
    assert json.loads(said.out) == summary(run)
    wanted = ["request 2: it is too long", "  Shorten it.", "request 3, turn 2: no", "  yes"]
    assert said.err.splitlines() == [*wanted, "1 of 3 answered"]


def test_requests_that_fail_alike_are_one_block(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [replace(FAILED, request=request(i)) for i in range(6)]
    report.show(figures(*failed), as_json=False)
    assert capsys.readouterr().err.splitlines() == [
        "request 0 and 5 more: it is too long",
        "  Shorten it.",
        "0 of 6 answered",
    ]


def test_a_run_without_failures_says_nothing_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(figures(ONE), as_json=False)
    assert capsys.readouterr().err == ""


def test_a_slower_run_has_a_line_that_says_why_and_json_has_the_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick = RequestMetrics(7)
    quick.add(StepOutput([1], verified=False), 0.5)
    for number in range(1, 41):
        quick.add(StepOutput([1]), 0.5 + number * 0.02)
    long = response(*[(4, 3, 3), (1, 3, 0)] * 8)
    plainly = Response("", [1] * 41, "max-length", quick, None)
    slower = replace(CHECKED, response=long, plain=plainly)
    for answers, shown in (([slower], 1), ([CHECKED], 0), ([UNDRAFTED], 0)):
        report.show(figures(*answers), as_json=False)
        lines = capsys.readouterr().out.splitlines()
        found = [line for line in lines if line.startswith("slower than plain decoding (0.50x)")]
        assert len(found) == shown
    assert summary(figures(slower))["speedup"]["over_plain"] == pytest.approx(0.5)
    assert "speedup" not in summary(figures(UNDRAFTED))


def test_each_difference_has_a_line_and_what_is_not_explained_comes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    near = Difference(
        index=27,
        plain=1,
        speculative=2,
        apart=0.005,
        rounding=0.012,
        bound=2.4,
        texts=('"foo"', '"b\x1b"'),
    )
    answers = [
        replace(CHECKED, request=request(i), difference=replace(near, index=i)) for i in range(14)
    ]
    answers[12] = replace(
        answers[12], difference=replace(near, apart=3.1), request=request(12, turns=("y",))
    )
    report.show(figures(*answers, CHECKED), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if "differs at token" in line]
    tail = " one row and many rows differ by 0.012 there:"
    places = 'differs at token 27 ("foo" / "b\\x1b")', 'differs at token 0 ("foo" / "b\\x1b")'
    assert shown[:2] == [
        f"request 12, turn 0: {places[0]}, candidates 3.1 nats apart;{tail} NOT explained",
        f"request 0: {places[1]}, candidates 0.005 nats apart;{tail} explained",
    ]
    assert len(shown) == 10
    assert "4 more in the output file" in lines
    row, whole = [line for line in lines if line.startswith("lossless")]
    assert row.split("  ")[-1].strip() == "NO: 1 of 15 identical"
    assert whole == "lossless: NO: 1 of 15 identical; 14 differ, 1 NOT explained by rounding"


def test_long_chain_has_its_first_positions_alone() -> None:
    chain = Answer(request(), response=response((9, 59, 8), (60, 59, 59)), speculative=True)
    assert chain.response is not None
    chain.response.metrics.num_spec_tokens = 59
    (cell,) = shown(figures(chain))["per-position acceptance"]
    assert cell == "1.00 " * 8 + "..."


def test_table_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(figures(ONE, FAILED), as_json=False)
    said = capsys.readouterr()
    assert "acceptance length" in said.out
    assert "too long" in said.err
    assert "too long" not in said.out


def test_run_in_which_all_failed_shows_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(figures(FAILED), as_json=False)
    said = capsys.readouterr()
    assert said.out == ""
    assert "it is too long" in said.err


def test_answers_are_shown_with_their_place_and_what_would_act_on_a_terminal_is_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = response((1, 0, 0))
    later = Answer(
        request(1, turns=("y",)), turn=1, response=replace(told, text="two\nlines \x1b[2J \ud800")
    )
    answers = [Answer(request(), response=replace(told, text="one")), FAILED, later]
    report.show_output(answers)
    piped = capsys.readouterr().out
    assert piped.splitlines() == [
        "--- request 0 (max-length)",
        "one",
        "--- request 1, turn 1 (max-length)",
        "two",
        "lines \x1b[2J \\ud800",
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    report.show_output(answers)
    assert capsys.readouterr().out == piped.replace("\x1b", "\\x1b")


def test_profile_names_each_stage_whole_with_its_share_of_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    print_table(report.profile_table(profile(figures(ONE))))
    said = capsys.readouterr().out
    lines = {line.split("  ")[0]: line.split() for line in said.splitlines()[1:]}
    assert [*lines] == [
        stages.PREFILL,
        stages.DRAFT_PROPOSAL,
        stages.VERIFICATION,
        "outside the stages",
    ]
    assert lines[stages.VERIFICATION][1:] == ["2", "600.00", "300.00", "300.00", "390.00", "30.0%"]
    assert lines["outside the stages"][-2:] == ["500.00", "25.0%"]
    assert sum(float(cells[-1].rstrip("%")) for cells in lines.values()) == pytest.approx(100)


def test_profile_of_nothing_divides_by_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(report.profile_table(profile(RunStats([], 0.0, {}))))
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "outside",
        "the",
        "stages",
        "0.00",
        "-",
    ]


def test_bar_counts_every_turn_and_all_tokens() -> None:
    with report.TokenBar([request(), request(1, turns=("y", "z"))]) as bar:
        bar.add(Chunk([1, 2], ["a", "b"], 1, None))
        bar.add(Chunk([3], ["c"], 0, "max-length"))
        bar.finish(1)
    (task,) = bar.progress.tasks
    assert (task.total, task.completed, task.fields["tokens"]) == (4, 1, 3)


def test_bar_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert not Console(stderr=True).is_terminal
    with report.TokenBar([request()]) as bar:
        bar.finish(1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("plan", "chosen", "said"),
    [
        (
            DraftPlan(1, 3, 4),
            True,
            "drafting a chain: top-k 1, step 3, verify size 4 (the default on a CPU)",
        ),
        (DraftPlan(4, 3, 16), False, "drafting a tree: top-k 4, step 3, verify size 16"),
    ],
)
def test_plan_is_told_in_one_line(plan: DraftPlan, chosen: bool, said: str) -> None:
    assert report.plan_line(plan, chosen=chosen) == said


def test_a_lone_verify_size_is_said_to_be_a_chain() -> None:
    said = report.plan_line(DraftPlan(1, 59, 60), chosen=False, could_be_tree=True)
    assert said.startswith("drafting a chain: top-k 1, step 59, verify size 60 (")
    assert "--spec-draft-top-k and --spec-draft-step" in said


@pytest.mark.parametrize(
    ("sizes", "method", "wanted"),
    [
        ((None, None, 60), "eagle3", True),
        ((10, None, 60), "eagle3", False),
        ((None, 6, 60), "eagle3", False),
        ((None, None, None), "eagle3", False),
        ((None, None, 60), "mtp", False),
        ((None, None, 60), "dflash", False),
        ((None, None, 60), None, False),
    ],
)
def test_a_tree_is_hinted_at_where_one_could_be_meant(
    sizes: tuple[int | None, ...], method: str | None, wanted: bool
) -> None:
    assert report.could_be_tree(sizes, method) == wanted


def test_a_plan_that_verifies_no_draft_says_so() -> None:
    said = report.plan_line(DraftPlan(1, 1, 1), chosen=True)
    assert said.startswith("nothing is drafted: top-k 1, step 1, verify size 1")
    assert "--max-verify-tree-size" in said


def test_plan_says_what_drafts_where_it_is_no_draft_model() -> None:
    said = report.plan_line(DraftPlan(1, 3, 4), chosen=False, words=DRAFTERS["mtp"].words)
    assert said == "drafting a chain with the MTP head: top-k 1, step 3, verify size 4"


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (DraftPlan(1, 8, 9, adaptive=True), "up to 8 drafts in a chain"),
        (DraftPlan(3, 4, 16, adaptive=True), "up to 15 drafts in a tree of top-k 3, step 4"),
    ],
)
def test_an_adaptive_plan_is_told_by_the_most_that_it_drafts(plan: DraftPlan, said: str) -> None:
    line = report.plan_line(plan, chosen=True, can_adapt=True)
    assert line == f"drafting adaptively: {said}, each step as far as that pays"


def test_a_fixed_plan_says_so_where_it_could_be_adaptive() -> None:
    line = report.plan_line(DraftPlan(1, 3, 4), chosen=False, can_adapt=True)
    assert line == "drafting a chain: top-k 1, step 3, verify size 4 (fixed)"


def test_steps_that_paused_are_said_and_are_none_that_a_schedule_held_back() -> None:
    made = response((1, 2, 0), (1, 0, 0), (1, 0, 0))
    made.metrics.spec_policy, made.metrics.steps_paused = "adaptive", 2
    run = figures(Answer(request(), response=made, speculative=True), ONE)
    (line,) = [line for line in report.explained(run) if "adaptive" in line]
    assert line.startswith("adaptive drafting decoded plainly in 2 of 5 steps")
    found = summary(run)
    assert (found["spec_policy"], found["steps_paused"]) == ({"adaptive": 1, "fixed": 1}, 2)
    assert "steps_without_drafts" not in found
    assert "steps_paused" not in summary(figures(ONE))


def test_a_draft_that_is_no_better_than_chance_is_said_with_causes_and_the_next_step() -> None:
    made = Answer(request(), response=response(*[(1, 3, 0)] * 30), speculative=True)
    run = replace(figures(made), has_trained_draft=True)
    assert run.chance is not None
    said = "\n".join(report.explained(run))
    assert "0 of 30 first drafts accepted" in said
    assert "made for another base" in said
    assert "edgespec check BASE DRAFT --probe" in said
    assert summary(run)["no_better_than_chance"]["steps_with_drafts"] == 30
    # what drafts from the text itself is no pair that could be wrong
    untrained = figures(made)
    assert untrained.chance is None
    assert "no_better_than_chance" not in summary(untrained)
