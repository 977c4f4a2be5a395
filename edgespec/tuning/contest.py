"""The best few candidates and plain decoding, measured in turn: who is fastest beyond noise.

Knows speeds. Each candidate is compared with the plain run of the same prompts and the same repeat,
so that a machine that becomes slower is so for all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.benchmark.statistics import FASTER, NOISE, UNKNOWN, Figure, as_dict, figure, result_of
from edgespec.tuning.ranking import Ranked

PLAIN = "plain"
CLOSE = 0.03  # a simpler candidate is taken where it costs no more speed than this, and it is noise


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured run: a candidate's key, or PLAIN."""

    repeat: int
    key: str


def turns(repeats: int, keys: Sequence[str]) -> Iterator[Trial]:
    """In each repeat plain and all candidates, forward and backward by turns."""
    order = [PLAIN, *keys]
    for repeat in range(repeats):
        for key in reversed(order) if repeat % 2 else order:
            yield Trial(repeat, key)


@dataclass(frozen=True)
class Measured:
    """A candidate with its speed, also over plain decoding; None where no run had steps."""

    row: Ranked
    over_plain: Figure | None = None
    tokens_per_s: Figure | None = None

    @property
    def speed(self) -> float:
        """Over plain decoding; 0 where it is not known."""
        return 0.0 if self.over_plain is None else self.over_plain.median

    def to_dict(self) -> dict[str, Any]:
        """As a report has it."""
        over, tokens = as_dict(self.over_plain), as_dict(self.tokens_per_s)
        return {**self.row.to_dict(), "over_plain": over, "tokens_per_s": tokens}


@dataclass
class Speeds:
    """Tokens a second of each run so far; None where a run had no steps."""

    of: dict[Trial, float | None] = field(default_factory=dict)

    def over(self, key: str, other: str = PLAIN) -> Figure | None:
        """The speed of one over another, pair by pair; None where there is no pair."""
        return figure([*self.ratios(key, other)])

    def ratios(self, key: str, other: str) -> Iterator[float]:
        """The quotients of all pairs."""
        for turn, speed in self.of.items():
            beside = self.of.get(Trial(turn.repeat, other))
            if turn.key == key and speed and beside:
                yield speed / beside

    def tokens_per_s(self, key: str) -> Figure | None:
        """The speeds of one."""
        return figure([speed for turn, speed in self.of.items() if turn.key == key])

    def measured(self, row: Ranked) -> Measured:
        """A candidate with its speed."""
        key = row.candidate.key
        return Measured(row, self.over(key), self.tokens_per_s(key))


def result(ratio: Figure | None) -> str:
    """What a ratio of speeds says."""
    return result_of(None if ratio is None else ratio.interval)


def winner(speeds: Speeds, measured: Sequence[Measured]) -> Measured | None:
    """The fastest, or the simplest of those that are CLOSE to it and not slower beyond noise; None
    where none is faster than plain decoding beyond noise: drafts do not pay."""
    faster = [one for one in measured if result(one.over_plain) == FASTER]
    if not faster:
        return None
    best = max(faster, key=lambda one: one.speed)
    key = best.row.candidate.key
    near = [
        one
        for one in faster
        if one.speed >= (1 - CLOSE) * best.speed
        and (one is best or result(speeds.over(key, one.row.candidate.key)) in (NOISE, UNKNOWN))
    ]
    return min(near, key=lambda one: one.row.candidate.complexity)
