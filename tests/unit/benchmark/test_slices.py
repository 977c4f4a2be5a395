"""Figures of a batch, against cases that were computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgespec.benchmark.cases import Cell, DecodingVariant
from edgespec.benchmark.passes import PassSize
from edgespec.benchmark.rows import Collected, conditional_acceptance, pass_rows
from edgespec.benchmark.schedule import Turn
from edgespec.benchmark.slices import Slice, steps_of, window
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.trees.tree import DraftPlan

DRAFTED = DecodingVariant(DraftPlan(1, 2, 3))


def answered(
    first_s: float, accepted: Sequence[int], step_s: Sequence[float], tokens: int | None = None
) -> RequestMetrics:
    """A request whose first token came after `first_s`; each step accepted so many drafts."""
    completed = 1 + sum(accepted) + len(accepted) if tokens is None else tokens
    return RequestMetrics(
        prompt_tokens=10,
        num_spec_tokens=2,
        completion_tokens=completed,
        time_to_first_token=first_s,
        request_latency=first_s + sum(step_s),
        per_step_accepted=[*accepted],
        per_step_drafted=[2] * len(accepted),
        per_step_s=[*step_s],
    )


def a_slice(*metrics: RequestMetrics, ids: Sequence[int] = (1, 2)) -> Slice:
    responses = [Response("", [*ids], "max-length", m, None) for m in metrics]
    return Slice(
        responses, [[2] * m.steps for m in metrics], max(m.request_latency for m in metrics)
    )


def test_one_request_has_the_speed_of_its_metrics() -> None:
    metrics = answered(0.5, [2, 0, 1], [0.1, 0.1, 0.2])
    assert steps_of(metrics) == (pytest.approx([0.6, 0.7, 0.9]), [3, 1, 2])
    assert window([metrics]) == (6, pytest.approx(0.4))
    found = a_slice(metrics)
    assert found.tokens_per_s == pytest.approx(metrics.tokens_per_s) == pytest.approx(15)
    assert found.output_tokens_per_s == pytest.approx(7 / 0.9)
    assert found.step_s == pytest.approx(0.4 / 3)


def test_last_step_counts_the_tokens_of_the_answer_alone() -> None:
    """An answer that ends in the middle of what was accepted."""
    metrics = answered(0.5, [2, 2], [0.1, 0.1], tokens=5)
    assert steps_of(metrics)[1] == [3, 1]
    assert window([metrics])[0] == 4


def test_batch_is_measured_while_all_of_it_decodes() -> None:
    """The second prompt is read after the first: what the first makes before is left out, and so is
    what the second makes after the first has ended. Sequences of a step end in turn."""
    first = answered(0.5, [0, 1, 2], [0.6, 0.1, 0.1])  # steps end at 1.1, 1.2, 1.3
    second = answered(1.0, [1, 1, 0, 0], [0.1001, 0.1, 0.1, 0.1])  # at 1.1001, ... 1.4001
    tokens, seconds = window([first, second])
    assert tokens == (1 + 2 + 3) + (2 + 2 + 1)
    assert seconds == pytest.approx(0.3001)


def test_batch_that_never_decodes_together_has_no_speed() -> None:
    first, second = answered(0.5, [0], [0.1]), answered(2.0, [0], [0.1])
    assert window([first, second]) == (0, 0.0)
    assert a_slice(first, second).tokens_per_s is None
    assert a_slice(answered(0.5, [], [])).tokens_per_s is None


def test_conditional_acceptance_counts_what_was_drafted_so_deep() -> None:
    metrics = [answered(0.1, [0, 1, 2, 0], [0.1] * 4)]
    # the last step drafted nothing, the second one level
    assert conditional_acceptance(metrics, [[2, 1, 2, 0]]) == [pytest.approx(2 / 3), 1.0]
    assert conditional_acceptance(metrics, [[2, 2, 2, 2]]) == [0.5, 0.5]
    assert conditional_acceptance([answered(0.1, [0], [0.1])], [[0]]) == []


def test_speed_over_plain_is_that_of_pairs() -> None:
    """A machine that becomes twice as slow between the repeats: each pair says 1.5."""
    collected = Collected(Cell(8, 4, 1))
    for repeat, slow in enumerate((1.0, 2.0, 3.0)):
        plain = a_slice(answered(0.1, [0, 0, 0], [0.1 * slow] * 3))
        fast = a_slice(answered(0.1, [1, 1, 1], [0.4 / 3 * slow] * 3), ids=(1, 2 + repeat // 2))
        collected.add(Turn(repeat, 0, 0, DecodingVariant()), plain)
        collected.add(Turn(repeat, 0, 0, DRAFTED), fast)
    # one without its plain run: a run that was interrupted
    collected.add(Turn(3, 0, 0, DRAFTED), a_slice(answered(0.1, [1], [9.0])))
    plain_row, row = (r.to_dict() for r in collected.rows(lambda *_: 1.25))
    assert row["speed_over_plain"]["samples"] == pytest.approx([1.5, 1.5, 1.5])
    assert (row["answers"], row["answers_equal_to_plain"]) == (4, 2)
    assert row["predicted_speed_over_plain"] == 1.25
    assert row["speculation"]["per_position_acceptance"] == [1.0, 0.0]
    assert row["speculation"]["levels_per_step"] == 2
    assert (plain_row["mode"], plain_row["speed_over_plain"]) == ("decode", None)
    assert plain_row["speculation"] is None
    assert len(plain_row["figures"]["tokens_per_s"]["samples"]) == 3


def test_passes_are_compared_with_one_row_of_the_same_repeat() -> None:
    times = [
        (PassSize(16, 1, rows), seconds)
        for rows, seconds in [(1, 0.1), (4, 0.15), (4, 0.3), (1, 0.2), (1, 0.1)]
    ]
    one, four = (row.to_dict() for row in pass_rows(times))
    assert four["figures"]["pass_s"]["samples"] == [0.15, 0.3]
    assert four["cost_over_one_row"]["samples"] == pytest.approx([1.5, 1.5])
    assert (one["rows"], four["rows"], one["input_tokens"]) == (1, 4, 16)
    (alone,) = (row.to_dict() for row in pass_rows([(PassSize(16, 2, 8), 0.1)]))
    assert alone["cost_over_one_row"] is None
    assert alone["speed_over_plain"] is None
