"""The figures of a load by hand, and where drafts stop paying."""

from __future__ import annotations

import re
from typing import Any

import pytest

from edgespec.benchmark.serving.client import Answer
from edgespec.benchmark.serving.figures import Crossover, Served, figures_of
from edgespec.benchmark.serving.load import Run
from tests.unit.benchmark.reports import figure, report, row


def answer(started_s: float, *pieces_s: float, tokens: int = 5) -> Answer:
    usage = {"prompt_tokens": 10, "completion_tokens": tokens}
    return Answer(started_s, [*pieces_s], usage=usage)


def test_figures_have_the_formulas_of_aiperf() -> None:
    """First token 100 and 300 ms; 400 ms more for 4 tokens, 200 for 4; all in 2 s."""
    first = Run({(0, 0): answer(1.0, 1.1, 1.4, 1.5), (1, 0): answer(2.5, 2.8, 3.0)}, ["x"])
    served = Served.of([first])
    assert (served.requests, served.errors) == (3, {"x": 1})
    figures = {name: one and one.samples for name, one in figures_of([first]).items()}
    assert figures == {
        "output_token_throughput": (5.0,),
        "request_throughput": (1.0,),
        "time_to_first_token": (pytest.approx(200.0),),
        "inter_token_latency": (pytest.approx(75.0),),
        "request_latency": (pytest.approx(500.0),),
    }
    averages = {name: round(one.avg, 6) for name, one in served.metrics.items()}
    assert averages == {
        "time_to_first_token": 200.0,
        "inter_token_latency": 75.0,
        "request_latency": 500.0,
    }
    told = served.metrics["time_to_first_token"]
    assert [round(value, 6) for value in (told.p50, told.p90, told.p99)] == [200.0, 280.0, 298.0]


def test_answers_without_text_or_of_one_token_have_no_latency() -> None:
    one = Served.of([Run({(0, 0): answer(0.0), (1, 0): answer(0.0, 0.5, tokens=1)})])
    assert one.metrics["time_to_first_token"].p99 == 500.0
    assert "inter_token_latency" not in one.metrics
    assert Served.of([Run(failures=["x"])]).metrics == {}


def served(clients: int, *over: float) -> dict[str, Any]:
    return row("serve_speculative", batch_size=clients, speed_over_plain=figure(*over))


@pytest.mark.parametrize(
    ("rows", "found", "said"),
    [
        ([], None, ""),
        ([(4, 0.9)], Crossover(None, None), "not faster with the fewest"),
        ([(4, 1.5), (1, 2.0)], Crossover(4, None), "up to 4 clients: at all"),
        ([(1, 2.0), (4, 1.5), (16, 0.5)], Crossover(4, 8.0), "up to 4 clients; .* at about 8"),
    ],
)
def test_the_crossover_lies_where_speed_over_plain_passes_1(
    rows: list[tuple[int, float]], found: Crossover | None, said: str
) -> None:
    crossover = report(*(served(clients, over) for clients, over in rows)).crossover
    assert crossover == found
    assert crossover is None or re.search(said, str(crossover))
