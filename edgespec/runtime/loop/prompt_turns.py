"""Whose prompt is read next, and how many rows of it a step reads.

Knows sequences and stored costs, and counts turns. Asks no clock: the same requests that come
between the same steps are read in the same chunks, however busy the machine is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from edgespec.runtime.costs.cost_model import MAX_ROWS, CostModel
from edgespec.runtime.loop.sequence import SequenceState, rest

OLDEST_EVERY = 4  # turns, of which one is that of the prompt that has waited longest
# What a chunk may cost beside those that run, in their steps: with the step itself a gap between
# tokens is 2.5 times as long as without it, and what is not in the costs has room up to 3
CHUNK_STEPS = 1.5
# ... and in seconds in any case: so short a gap nobody notices, and prompts of a fast engine would
# be read in chunks of a few rows
CHUNK_S = 0.005
UNMEASURED_ROWS = 32  # of a chunk beside those that run, where no costs are known
MIN_ROWS = 8  # of such a chunk, whatever it costs: prompts come to an end
WHOLE_ROWS = (64, 128)  # chunks where nothing runs, if rows are as cheap as in larger ones
AS_CHEAP = 1.1


class PromptTurns:
    """`costs` None: nothing was measured. `most` are the rows of a prompt that a call takes."""

    def __init__(self, costs: CostModel | None, most: Callable[[], int]) -> None:
        self.costs, self.most = costs, most
        self.turns = 0  # in a row in which several prompts could have been read

    def choose(self, reading: Sequence[SequenceState]) -> SequenceState:
        """The prompt with the shortest rest, in chunks, of those with the lowest priority; each
        fourth time the one that came first. `reading` are in the order in which they came; those
        that follow another one wait for it."""
        reading = [seq for seq in reading if seq.follows not in reading]
        if len(reading) == 1:
            self.turns = 0
            return reading[0]
        self.turns += 1
        if self.turns % OLDEST_EVERY == 0:
            return reading[0]
        return min(reading, key=self.order)

    def order(self, seq: SequenceState) -> tuple[int, int]:
        """The lowest is read first."""
        return seq.priority, (rest(seq) - 1) // min(self.most(), WHOLE_ROWS[0])

    def rows(self, seq: SequenceState, running: Sequence[SequenceState]) -> int:
        """The rows of a prompt that a step reads beside those that run."""
        most = self.most()
        if not running:
            return self.whole_rows(seq)
        if self.costs is None:
            return min(UNMEASURED_ROWS, most)
        budget = max(CHUNK_S, CHUNK_STEPS * self.step_s(self.costs, running))
        seconds = chunk_s(self.costs, seq)
        rows = bisect_right(range(MAX_ROWS + 1), budget, key=seconds) - 1
        if rows == MAX_ROWS:
            rows += int((budget - seconds(MAX_ROWS)) / max(last_row_s(seconds), 1e-9))
        return min(max(rows, MIN_ROWS), most)

    def whole_rows(self, seq: SequenceState) -> int:
        """The rows of a prompt that a step reads where nothing runs: the fewest of those that take
        about as long a row as any, so that whoever comes meanwhile waits less."""
        most = self.most()
        if self.costs is None:
            return most
        seconds = chunk_s(self.costs, seq)
        slope = last_row_s(seconds)

        def row_s(rows: int) -> float:
            return (seconds(min(rows, MAX_ROWS)) + slope * max(0, rows - MAX_ROWS)) / rows

        sizes = [*(rows for rows in WHOLE_ROWS if rows < most), most]
        limit = AS_CHEAP * min(map(row_s, sizes))
        return next(rows for rows in sizes if row_s(rows) <= limit)

    def step_s(self, costs: CostModel, running: Sequence[SequenceState]) -> float:
        """What a step of those that run costs, if they draft as they last did."""
        count = len(running)
        sizes = [seq.last_step for seq in running]
        context = sum(len(seq.tokens) for seq in running) // count
        top_k = max(1 if seq.plan is None else seq.plan.top_k for seq in running)
        nodes = min(MAX_ROWS, max(size.nodes for size in sizes))
        at = costs.at(context, count, top_k)
        levels = min(max(size.levels for size in sizes), len(at.propose) - 1)
        if not levels:
            return at.passes[nodes]
        return at.step(nodes, levels, sum(size.committed for size in sizes) / count)


def chunk_s(costs: CostModel, seq: SequenceState) -> Callable[[int], float]:
    """Seconds of a chunk of a prompt by its rows, 0 to MAX_ROWS, with what its drafter reads of
    them."""
    at = costs.at(seq.num_read)
    if seq.drafter is None or not seq.drafter.needs_hidden_states:
        return at.passes.__getitem__
    return lambda rows: at.passes[rows] + at.observe[rows]


def last_row_s(seconds: Callable[[int], float]) -> float:
    """Seconds of a row more, where costs are known no further."""
    return seconds(MAX_ROWS) - seconds(MAX_ROWS - 1)
