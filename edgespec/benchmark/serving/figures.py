"""The figures of a load, by the names and formulas of aiperf, and where drafts stop paying.

Knows answers and runs. Times are milliseconds, as aiperf exports them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from edgespec.benchmark.report_fields import ReportFields
from edgespec.benchmark.serving.client import Answer
from edgespec.benchmark.serving.load import Run
from edgespec.benchmark.statistics import Figure, figure
from edgespec.errors import counted

TTFT, ITL, LATENCY = "time_to_first_token", "inter_token_latency", "request_latency"
THROUGHPUT, REQUESTS = "output_token_throughput", "request_throughput"
MAX_REASONS = 20  # for which failed requests are listed


def times_ms(answer: Answer) -> dict[str, float]:
    """Until the first and the last piece of text, and between them a token behind the first; those
    that there are."""
    if not answer.pieces_s:
        return {}
    ends = answer.pieces_s[0], answer.pieces_s[-1]
    first, last = (1000 * (at - answer.started_s) for at in ends)
    more = answer.tokens("completion") - 1
    return {TTFT: first, LATENCY: last} | ({ITL: (last - first) / more} if more > 0 else {})


def values(name: str, runs: Sequence[Run]) -> list[float]:
    """A time of all answers that have it."""
    times = (times_ms(answer) for run in runs for answer in run.answers.values())
    return [one[name] for one in times if name in one]


def throughput(run: Run) -> float | None:
    """Tokens a second, of all clients; None where nothing was answered."""
    return per_second(sum(one.tokens("completion") for one in run.answers.values()), run)


def per_second(count: int, run: Run) -> float | None:
    """Over the time from the first request to the last answer."""
    return count / run.duration_s if run.duration_s > 0 else None


def figures_of(runs: Sequence[Run]) -> dict[str, Figure | None]:
    """A sample a run: throughputs, and medians over its answers."""
    medians = {
        name: figure([float(np.median(own)) for run in runs if (own := values(name, [run]))])
        for name in (TTFT, ITL, LATENCY)
    }
    return {
        THROUGHPUT: figure([throughput(run) for run in runs]),
        REQUESTS: figure([per_second(len(run.answers), run) for run in runs]),
        **medians,
    }


@dataclass(frozen=True, slots=True)
class Percentiles:
    """How a figure is distributed over answers, in ms; percentiles are interpolated."""

    avg: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Of at least one."""
        return cls(float(np.mean(samples)), *map(float, np.percentile(samples, (50, 90, 99))))


@dataclass(frozen=True, slots=True)
class Served:
    """What clients saw of all runs of one way of decoding at one concurrency. `errors` counts the
    requests that failed by their reasons."""

    requests: int
    errors: Mapping[str, int]
    metrics: Mapping[str, Percentiles]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Self:
        """Of all runs pooled."""
        reasons = Counter(reason for run in runs for reason in run.failures)
        pooled = {name: values(name, runs) for name in (TTFT, ITL, LATENCY)}
        return cls(
            sum(len(run.answers) + len(run.failures) for run in runs),
            dict(reasons.most_common(MAX_REASONS)),
            {name: Percentiles.of(own) for name, own in pooled.items() if own},
        )

    @classmethod
    def read(cls, fields: ReportFields) -> Self:
        """From a report. Raises BundleError."""
        errors, metrics = fields.section("errors"), fields.section("metrics")
        return cls(
            fields.required_whole("requests"),
            {reason: errors.required_whole(reason) for reason in errors.raw},
            {
                name: Percentiles(**metrics.section(name).values(Percentiles))
                for name in metrics.raw
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """As a report has it."""
        return asdict(self)


# ---- where drafts stop paying


@dataclass(frozen=True, slots=True)
class Crossover:
    """`pays_up_to`: the most clients up to which drafts were faster at each concurrency that was
    measured; None: they were at none, not even the fewest. `at`: where the speed over plain passes
    1, interpolated over the logarithm of clients; None: it was never measured to."""

    pays_up_to: int | None
    at: float | None

    @classmethod
    def of(cls, speeds: Mapping[int, float]) -> Self | None:
        """Of speeds over plain by the number of clients; None where none was measured."""
        points = sorted(speeds.items())
        if not points:
            return None
        if points[0][1] <= 1:
            return cls(None, None)
        for (few, above), (many, below) in pairwise(points):
            if below <= 1:
                return cls(few, few * (many / few) ** ((above - 1) / (above - below)))
        return cls(points[-1][0], None)

    def __str__(self) -> str:
        if self.pays_up_to is None:
            return "drafts were not faster with the fewest clients"
        faster = f"drafts were faster with up to {counted(self.pays_up_to, 'client')}"
        if self.at is None:
            return f"{faster}: at all that were measured"
        return f"{faster}; plain decoding overtakes them at about {self.at:.0f}"
