"""When a sequence may draft, and how deep: by how many sequences run, and by how well drafts were
accepted before.

Knows counts. A clock is not asked, and what is emitted does not depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """Levels of a draft by the number of sequences that run: `steps` are pairs of the largest
    number and the levels up to it, in ascending order; above the last one nothing is drafted."""

    steps: tuple[tuple[int, int], ...]

    def levels(self, num_running: int) -> int:
        """The levels that may be drafted while so many run; 0 is no draft."""
        return next((levels for most, levels in self.steps if num_running <= most), 0)


class AcceptanceGate:
    """Ends drafting for good once the last `window` answers accepted fewer drafts a step, on
    average, than `threshold`."""

    def __init__(self, window: int, threshold: float) -> None:
        self.window, self.threshold = window, threshold
        self.lengths: deque[float] = deque(maxlen=window)
        self.num_answers = 0
        self.stopped: str | None = None  # why, once it has

    def record(self, per_step_accepted: Sequence[int]) -> None:
        """Take in an answer: how many drafts each of its steps accepted. One without a step says
        nothing."""
        if not per_step_accepted or self.stopped is not None:
            return
        self.num_answers += 1
        self.lengths.append(sum(per_step_accepted) / len(per_step_accepted))
        average = sum(self.lengths) / len(self.lengths)
        if len(self.lengths) == self.window and average < self.threshold:
            self.stopped = (
                f"drafting stopped at answer {self.num_answers}: the last {self.window} accepted"
                f" {average:.2f} drafts a step, below the acceptance_length_threshold of"
                f" {self.threshold:g}"
            )


@dataclass(frozen=True, slots=True)
class Gates:
    """What limits the drafts of a sequence. None: no such limit."""

    schedule: Schedule | None = None
    acceptance: AcceptanceGate | None = None

    @property
    def stopped(self) -> bool:
        """Whether drafting has ended for good."""
        return self.acceptance is not None and self.acceptance.stopped is not None

    def record(self, per_step_drafted: Sequence[int], per_step_accepted: Sequence[int]) -> None:
        """Take in an answer, by the steps that drafted."""
        if self.acceptance is not None:
            steps = zip(per_step_drafted, per_step_accepted, strict=True)
            self.acceptance.record([accepted for drafted, accepted in steps if drafted])

    def levels(self, num_running: int) -> int:
        """The levels that may be drafted while so many sequences run; 0 is no draft."""
        if self.stopped:
            return 0
        return NO_LIMIT if self.schedule is None else self.schedule.levels(num_running)
