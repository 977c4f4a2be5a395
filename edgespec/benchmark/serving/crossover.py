"""At which concurrency speculative decoding stops paying. Knows rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgespec.benchmark.modes import SERVED_SPECULATIVE
from edgespec.benchmark.rows import Row
from edgespec.errors import counted


@dataclass(frozen=True, slots=True)
class Crossover:
    """`pays_up_to`: the most clients up to which drafts were faster at each concurrency that was
    measured; None: they were at none, not even the fewest. `at`: where the speed over plain passes
    1, interpolated over the logarithm of clients; None: it was never measured to."""

    pays_up_to: int | None
    at: float | None


def crossover(rows: Sequence[Row]) -> Crossover | None:
    """Of the rows of a load; None where plain and speculative were not both measured."""
    points = sorted(
        (row.cell.batch_size, row.over_plain.median)
        for row in rows
        if row.mode == SERVED_SPECULATIVE and row.over_plain is not None
    )
    if not points:
        return None
    if points[0][1] <= 1:
        return Crossover(None, None)
    for (few, above), (many, below) in pairwise(points):
        if below <= 1:
            part = (above - 1) / (above - below)
            return Crossover(few, few * (many / few) ** part)
    return Crossover(points[-1][0], None)


def in_words(crossing: Crossover) -> str:
    """A sentence of it."""
    if crossing.pays_up_to is None:
        return "drafts were not faster, not even with the fewest clients"
    faster = f"drafts were faster with up to {counted(crossing.pays_up_to, 'client')}"
    if crossing.at is None:
        return f"{faster}: at all that were measured"
    return f"{faster}; plain decoding overtakes them at about {crossing.at:.0f}"
