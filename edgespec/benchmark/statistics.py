"""Medians with exact intervals, by ranks alone: nothing is assumed of how times are distributed.

Knows numbers. The interval of a median is made of order statistics (Thompson 1936), that of a
ratio between two runs of the rank-sum distribution (Mann and Whitney 1947, Hodges and Lehmann
1963).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import comb
from statistics import median
from typing import Any

CONFIDENCE = 0.95
FASTER, SLOWER, NOISE, UNKNOWN = "faster", "slower", "noise", "too few samples"


@dataclass(frozen=True, slots=True)
class Interval:
    """From `low` to `high` with at least `confidence`, which is exact for continuous samples."""

    low: float
    high: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured several times. `interval` is that of the median; None where the samples
    are too few for 95 %."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one, or the mean of the two in the middle."""
        return median(self.samples)

    @property
    def interval(self) -> Interval | None:
        """Of the median."""
        return median_interval(self.samples)

    def to_dict(self) -> dict[str, Any]:
        """As a report has it."""
        return {"median": self.median, **ends(self.interval), "samples": [*self.samples]}


def as_dict(value: Figure | None) -> dict[str, Any] | None:
    """As a report has it; null where there is none."""
    return None if value is None else value.to_dict()


def ends(interval: Interval | None) -> dict[str, float | None]:
    """As a report has it; all null where there is none."""
    low, high, confidence = (None, None, None) if interval is None else astuple(interval)
    return {"low": low, "high": high, "confidence": confidence}


def figure(samples: Sequence[float | None]) -> Figure | None:
    """The figure of the samples that are defined; None where none is."""
    known = tuple(value for value in samples if value is not None)
    return Figure(known) if known else None


# ---- one sample


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The narrowest pair of order statistics x(k), x(n+1-k) that holds the median with this
    confidence; None for fewer than 6 samples at 95 %."""
    ordered, count = sorted(samples), len(samples)
    best, outside = None, 0.0
    for k in range(1, count // 2 + 1):
        outside += comb(count, k - 1) / 2**count  # P(fewer than k samples lie below the median)
        if 1 - 2 * outside < confidence:
            break
        best = Interval(ordered[k - 1], ordered[count - k], 1 - 2 * outside)
    return best


# ---- two samples


def rank_sum_counts(first: int, second: int) -> list[int]:
    """How many of the orders of `first` and `second` samples have each value 0 to first*second of
    the Mann-Whitney statistic: the coefficients of the Gaussian binomial."""
    counts = [1] + [0] * (first * second)
    for i in range(1, first + 1):
        step = second + i
        for u in range(len(counts) - 1, step - 1, -1):
            counts[u] -= counts[u - step]
        for u in range(i, len(counts)):
            counts[u] += counts[u - i]
    return counts


def ratio_interval(
    before: Sequence[float], after: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """By how much the samples of `after` are a multiple of those of `before`: of all quotients
    those between two ranks. None where the samples are too few for this confidence.

    All samples are above 0.
    """
    ratios = sorted(b / a for a in before for b in after)
    counts = rank_sum_counts(len(before), len(after))
    total, outside, best = sum(counts), 0, None
    for k in range(1, len(ratios) // 2 + 1):
        outside += counts[k - 1]
        if total - 2 * outside < confidence * total:
            break
        best = Interval(ratios[k - 1], ratios[-k], 1 - 2 * outside / total)
    return best


def ratio_estimate(before: Sequence[float], after: Sequence[float]) -> float:
    """The median of all quotients of `after` over `before`."""
    return median(b / a for a in before for b in after)


def result_of(interval: Interval | None, *, larger_is_faster: bool = True) -> str:
    """What an interval of a ratio says: `faster`, `slower`, or `noise` where 1 is in it."""
    if interval is None:
        return UNKNOWN
    if interval.low <= 1 <= interval.high:
        return NOISE
    return FASTER if (interval.low > 1) == larger_is_faster else SLOWER
