"""What decoders with memory share: an engine whose cache has lanes, and how much of each is
committed.

Knows lanes and rows. What a call reads stands in each decoder's file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from edgespec.backends.base import (
    Interruptible,
    LaneRows,
    Runner,
    SeveralCapacities,
    Table,
    noop,
)
from edgespec.rope import RopeTable


@dataclass
class Lane:
    """`length` counts committed rows. What follows them has `offset` added to its position for its
    rope position."""

    length: int = 0
    offset: int = 0

    @property
    def end(self) -> int:
        """The next slot to be written."""
        return self.length


class LanePart(Protocol):
    """One lane's part of a call."""

    @property
    def lane(self) -> int:
        """The lane."""


LaneT = TypeVar("LaneT", bound=Lane)
PartT = TypeVar("PartT", bound=LanePart)


class LaneDecoder(Generic[LaneT]):
    """As many sequences in one engine as it has lanes. `empty` makes a lane by its length."""

    def __init__(
        self, runner: Runner, embedding: Table, rope: RopeTable, empty: Callable[[int], LaneT]
    ) -> None:
        self.runner, self.embedding, self.rope, self.empty = runner, embedding, rope, empty
        self.lanes = [empty(0) for _ in range(runner.lanes)]

    @property
    def capacity(self) -> int:
        """Rows of a lane, one a token."""
        return self.runner.capacity

    @property
    def prefill_chunk(self) -> int:
        """Rows of a prompt that one call reads at most."""
        return self.runner.prefill_chunk

    @property
    def engine_s(self) -> float:
        """Seconds spent inside the engine so far."""
        return self.runner.engine_s

    def room(self, lane: int) -> int:
        """Rows of a lane that can still be written."""
        return self.capacity - self.lanes[lane].end

    def reserve(self, lane: int, tokens: int) -> None:
        """A lane's sequence will come to so many tokens, or to the capacity. EnvironmentProblem
        where there is an engine for that, and no memory for it."""
        if isinstance(self.runner, SeveralCapacities):
            self.runner.reserve(lane, tokens)

    def interruptible(self) -> AbstractContextManager[Callable[[], None]]:
        """Inside, what it gives ends calls, which raise Interrupted, where the engine can do so."""
        if isinstance(self.runner, Interruptible):
            return self.runner.interruptible()
        return nullcontext(noop)

    def hold(self, lane: int, length: int) -> None:
        """Let a lane be so long; its rows are what memory holds."""
        self.lanes[lane] = self.empty(length)

    def reset(self, lane: int) -> None:
        """Forget a lane's sequence. Old rows stay in memory and are not seen."""
        self.hold(lane, 0)
        self.runner.free(lane)

    def zero(self, lane: int) -> None:
        """Forget a lane's sequence, whose rows may hold NaN or Inf."""
        self.hold(lane, 0)
        self.runner.zero(lane)

    def snapshot(self, lane: int, count: int) -> LaneRows:
        """A copy of the first `count` committed rows, or of as many as there are; of recurrent
        layers, only of all of them."""
        return self.runner.read_rows(lane, min(count, self.lanes[lane].length))

    def restore(self, lane: int, rows: LaneRows) -> None:
        """Begin a lane with rows that `snapshot` took. What is read next says its positions."""
        self.runner.write_rows(lane, rows)
        self.hold(lane, len(rows))

    def move(self, source: int, target: int) -> None:
        """Let a lane's sequence, which has no uncommitted rows, go on in another lane."""
        state = self.lanes[source]
        assert state.end == state.length
        self.runner.copy_lane(source, target, state.length)
        self.lanes[target] = state
        self.reset(source)


def adjacent(parts: Sequence[PartT], idle: Callable[[int], PartT]) -> list[PartT]:
    """The parts of a call by lane, with an idle one for each lane between them that takes no
    part."""
    of = {part.lane: part for part in parts}
    return [of.get(lane) or idle(lane) for lane in range(min(of), max(of) + 1)]
