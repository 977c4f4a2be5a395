"""The best few candidates and plain decoding, measured in turn: who is fastest beyond noise.

Knows speeds. Each candidate is compared with the plain run of the same prompts and the same repeat,
so that a machine that becomes slower is so for all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.benchmark.statistics import Figure, figure
from edgespec.tuning.ranking import Ranked

PLAIN = "plain"
CLOSE = 0.03  # a simpler candidate is taken where it costs no more speed than this, and it is noise


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured run: a candidate's key, or PLAIN."""

    repeat: int
    group: int  # of the prompts
    key: str


def turns(repeats: int, groups: int, keys: Sequence[str]) -> Iterator[Trial]:
    """Each repeat of each group of prompts: plain and all candidates, forward and backward by
    turns."""
    backward = False
    for repeat in range(repeats):
        for group in range(groups):
            order = [PLAIN, *keys]
            for key in reversed(order) if backward else order:
                yield Trial(repeat, group, key)
            backward = not backward


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
            beside = self.of.get(Trial(turn.repeat, turn.group, other))
            if turn.key == key and speed and beside:
                yield speed / beside

    def tokens_per_s(self, key: str) -> Figure | None:
        """The speeds of one."""
        return figure([speed for turn, speed in self.of.items() if turn.key == key])


def is_above(ratio: Figure | None) -> bool:
    """Whether a ratio is above 1 beyond noise."""
    return ratio is not None and ratio.interval is not None and ratio.interval.low > 1


def is_noise(ratio: Figure | None) -> bool:
    """Whether a ratio may as well be 1."""
    if ratio is None or ratio.interval is None:
        return True
    return ratio.interval.low <= 1 <= ratio.interval.high


def winner(speeds: Speeds, measured: Sequence[Ranked]) -> Ranked | None:
    """The fastest, or the simplest of those that are CLOSE to it and not slower beyond noise; None
    where none is faster than plain decoding beyond noise: drafts do not pay."""
    ratios = {row.candidate.key: speeds.over(row.candidate.key) for row in measured}
    faster = [row for row in measured if is_above(ratios[row.candidate.key])]
    if not faster:
        return None

    def median_of(row: Ranked) -> float:
        over = ratios[row.candidate.key]
        return 0.0 if over is None else over.median

    best = max(faster, key=median_of)
    near = [
        row
        for row in faster
        if median_of(row) >= (1 - CLOSE) * median_of(best)
        and (row is best or is_noise(speeds.over(best.candidate.key, row.candidate.key)))
    ]
    return min(near, key=lambda row: row.candidate.complexity)


def row_dict(row: Ranked, speeds: Speeds) -> dict[str, Any]:
    """A measured candidate as a report has it."""
    over, speed = speeds.over(row.candidate.key), speeds.tokens_per_s(row.candidate.key)
    return {
        **row.to_dict(),
        "over_plain": None if over is None else over.to_dict(),
        "tokens_per_s": None if speed is None else speed.to_dict(),
    }
