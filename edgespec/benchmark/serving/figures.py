"""The figures of a load, by the names and formulas of aiperf: of each answer, and of each run.

Knows answers and runs. Times are milliseconds, as aiperf exports them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from edgespec.benchmark.report_fields import ReportFields
from edgespec.benchmark.serving.client import Answer
from edgespec.benchmark.serving.load import Run

TTFT, ITL, LATENCY = "time_to_first_token", "inter_token_latency", "request_latency"
THROUGHPUT = "output_token_throughput"
MAX_REASONS = 20  # for which failed requests are listed


@dataclass(frozen=True, slots=True)
class Distribution:
    """How a figure is distributed; `std` is that of all values, percentiles are interpolated."""

    unit: str
    avg: float
    min: float
    max: float
    p50: float
    p90: float
    p99: float
    std: float

    @classmethod
    def of(cls, unit: str, values: Sequence[float]) -> Self | None:
        """None where there is no value."""
        if not values:
            return None
        p50, p90, p99 = map(float, np.percentile(values, (50, 90, 99)))
        ends, avg, std = (min(values), max(values)), float(np.mean(values)), float(np.std(values))
        return cls(unit, avg, *ends, p50, p90, p99, std)


@dataclass(frozen=True, slots=True)
class Served:
    """What clients saw of all runs of one way of decoding at one concurrency. `errors` counts the
    requests that failed by their reasons."""

    requests: int
    errors: Mapping[str, int]
    metrics: Mapping[str, Distribution]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Self:
        """Of all runs pooled; throughputs are distributed over the runs."""
        answers = [answer for run in runs for answer in run.answered]
        reasons = Counter(reason for run in runs for reason in run.failures)
        values = {
            name: (unit, [value for answer in answers for value in of(answer)])
            for name, (unit, of) in OF_ANSWER.items()
        } | {
            name: (unit, [value for run in runs for value in of(run)])
            for name, (unit, of) in OF_RUN.items()
        }
        known = {name: Distribution.of(*one) for name, one in values.items()}
        return cls(
            len(answers) + reasons.total(),
            dict(reasons.most_common(MAX_REASONS)),
            {name: one for name, one in known.items() if one is not None},
        )

    @classmethod
    def read(cls, fields: ReportFields) -> Self:
        """From a report. Raises BundleError."""
        errors, metrics = fields.section("errors"), fields.section("metrics")
        return cls(
            fields.required_whole("requests"),
            {reason: errors.required_whole(reason) for reason in errors.raw},
            {
                name: Distribution(**metrics.section(name).values(Distribution))
                for name in metrics.raw
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """As a report has it."""
        return asdict(self)


# ---- of one answer


def ttft_ms(answer: Answer) -> list[float]:
    """Until the first piece of text."""
    return [1000 * (at - answer.started_s) for at in answer.pieces_s[:1]]


def latency_ms(answer: Answer) -> list[float]:
    """Until the last piece of text."""
    return [1000 * (at - answer.started_s) for at in answer.pieces_s[-1:]]


def itl_ms(answer: Answer) -> list[float]:
    """From the first piece to the last one, a token behind the first."""
    spans = zip(latency_ms(answer), ttft_ms(answer), strict=True)
    tokens = answer.completion_tokens
    return [(whole - first) / (tokens - 1) for whole, first in spans if tokens > 1]


OF_ANSWER: Mapping[str, tuple[str, Callable[[Answer], Sequence[float]]]] = {
    TTFT: ("ms", ttft_ms),
    ITL: ("ms", itl_ms),
    "inter_chunk_latency": (
        "ms",
        lambda answer: [1000 * (b - a) for a, b in pairwise(answer.pieces_s)],
    ),
    LATENCY: ("ms", latency_ms),
    "output_token_throughput_per_user": (
        "tokens/sec/user",
        lambda answer: [1000 / value for value in itl_ms(answer) if value > 0],
    ),
    "output_sequence_length": ("tokens", lambda answer: [answer.completion_tokens]),
    "input_sequence_length": ("tokens", lambda answer: [answer.prompt_tokens]),
}


# ---- of one run


def per_second(count: int, run: Run) -> list[float]:
    """Over the time from the first request to the last answer."""
    return [count / run.duration_s] if run.duration_s > 0 else []


def median_of(name: str, run: Run) -> float | None:
    """The median of a figure over the answers of a run."""
    values = [value for answer in run.answered for value in OF_ANSWER[name][1](answer)]
    return float(np.median(values)) if values else None


OF_RUN: Mapping[str, tuple[str, Callable[[Run], Sequence[float]]]] = {
    THROUGHPUT: (
        "tokens/sec",
        lambda run: per_second(sum(a.completion_tokens for a in run.answered), run),
    ),
    "request_throughput": ("requests/sec", lambda run: per_second(len(run.answered), run)),
}
