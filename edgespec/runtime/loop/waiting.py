"""Requests in the order of a priority or a deadline: constant work for each, however many wait.

Knows handles, priorities and times. Knows no lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from edgespec.runtime.loop.generation import Generation

SPARE = 64  # entries of those that are gone, which are not worth a heap made anew


class ByKey:
    """Handles by a key, and equal ones in the order in which they came. Those that are gone, as
    `is_there` says, stay until it is their turn or they are the most."""

    def __init__(self, is_there: Callable[[Generation], bool]) -> None:
        self.is_there, self.numbers = is_there, count()
        self.heap: list[tuple[float, int, Generation]] = []

    def add(self, key: float, handle: Generation, num_there: int) -> None:
        """One more, of `num_there` that are not gone."""
        if len(self.heap) > 2 * num_there + SPARE:
            self.heap = [entry for entry in self.heap if self.is_there(entry[2])]
            heapify(self.heap)
        heappush(self.heap, (key, next(self.numbers), handle))

    def up_to(self, most: float) -> Iterator[Generation]:
        """Takes out those with a key of up to so much, the least first."""
        while self.heap and self.heap[0][0] <= most:
            handle = heappop(self.heap)[2]
            if self.is_there(handle):
                yield handle


class WaitingQueue:
    """Requests by their priority, the lowest first, and then in the order in which they came."""

    def __init__(self) -> None:
        self.waiting: dict[Generation, None] = {}
        self.order = ByKey(self.waiting.__contains__)

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self.waiting)

    def add(self, handle: Generation) -> None:
        """One more waits."""
        self.waiting[handle] = None
        self.order.add(handle.priority, handle, len(self.waiting))

    def popleft(self) -> Generation:
        """The next one."""
        handle = next(self.order.up_to(float("inf")))
        del self.waiting[handle]
        return handle

    def remove(self, handle: Generation) -> bool:
        """Whether one waited, which does so no more."""
        return handle in self.waiting and self.waiting.pop(handle) is None
