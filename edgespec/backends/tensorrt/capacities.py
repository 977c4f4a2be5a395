"""The engines of one role for several capacities, as one runner: a step costs by the capacity of
its engine, so all lanes are in the smallest one that holds what they may come to.

Knows capacities, what lanes have asked for, and how lanes move from engine to engine. How an engine
is opened is the backend's.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from edgespec.backends.base import LaneRows, Runner, SeveralCapacities, noop
from edgespec.backends.call import Call, Ids, Result
from edgespec.backends.machine import available_bytes
from edgespec.errors import EnvironmentProblem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CapacityEngine:
    """An engine for up to `capacity` tokens of a sequence, in lanes of `slots` rows. `size_bytes`
    are those of its file; `open` raises EnvironmentProblem where it cannot be opened."""

    capacity: int
    slots: int
    size_bytes: int
    open: Callable[[], Runner]


class VariantRunner(SeveralCapacities):
    """A runner that calls one of several engines, which have the same weights, lanes and tree
    sizes.

    `reserve` says how many tokens a lane will come to; lanes move where that asks for another
    engine. A call that the engine in use has no room for moves them too. An engine is opened when
    it is first needed, and stays open while memory does. None below `least` tokens is chosen.
    `closing` is called at the end.
    """

    def __init__(
        self, variants: Iterable[CapacityEngine], closing: Callable[[], None] = noop
    ) -> None:
        self.variants = {row.capacity: row for row in sorted(variants, key=lambda r: r.capacity)}
        self.closing, self.closed = closing, False
        self.capacity, self.least = max(self.variants), 0
        self.capacities = tuple(self.variants)
        self.runners: OrderedDict[int, Runner] = OrderedDict()  # the least recently used first
        self.engine_s = 0.0
        least = min(self.variants)
        self.runners[least] = self.variants[least].open()
        self.go_on(least)
        self.lanes = self.runner.lanes
        self.reserved = [0] * self.lanes  # tokens
        self.written, self.committed = [0] * self.lanes, [0] * self.lanes  # rows

    def go_on(self, capacity: int) -> None:
        """Let an engine that is open be the one in use."""
        self.in_use = capacity
        self.contract, self.table = self.runner.contract, self.runner.table
        self.prefill_chunk, self.max_rows = self.runner.prefill_chunk, self.runner.max_rows

    @property
    def runner(self) -> Runner:
        """The engine in use. EnvironmentProblem where memory did not do to open it again."""
        runner = self.runners.get(self.in_use)
        if runner is None:
            message = (
                f"the engine for up to {self.in_use} tokens was closed and cannot be opened again"
            )
            raise EnvironmentProblem(message, "Close other programs, and start anew.")
        return runner

    # ---- which engine

    def reserve(self, lane: int, tokens: int) -> None:
        """A lane will come to so many tokens, or to the capacity. EnvironmentProblem where the
        engine for it cannot be opened; the lanes are then as they were, and this one asks for
        nothing."""
        self.reserved[lane] = tokens
        try:
            self.use(self.wanted())
        except BaseException:
            self.reserved[lane] = 0
            raise

    def wanted(self, slots: int = 0) -> int:
        """The smallest engine with room for all lanes, of at least so many slots; else the
        largest."""
        tokens, rows = max(self.least, *self.reserved), max(slots, *self.written)
        fitting = (
            row.capacity
            for row in self.variants.values()
            if row.capacity >= tokens and row.slots >= rows
        )
        return next(fitting, self.capacity)

    def use(self, capacity: int, *, keep: bool = False) -> None:
        """Let another engine go on with what the lanes hold. With `keep` the one in use stays open.
        EnvironmentProblem where the other one cannot be opened: the lanes stay where they are."""
        if capacity == self.in_use and capacity in self.runners:
            return
        rows = self.copies()
        self.open(capacity, rows, keep=keep)
        before = self.in_use
        self.go_on(capacity)
        for lane, copy in rows.items():
            self.runner.write_rows(lane, copy)
        logger.debug("%d lanes moved from %d to %d tokens", len(rows), before, capacity)

    def copies(self) -> dict[int, LaneRows]:
        """What the lanes hold. Rows that are not committed are copied where they are in slots of
        their own; recurrent layers run them again."""
        recurrent = self.contract.shape.recurrent is not None
        counts = self.committed if recurrent else self.written
        return {lane: self.runner.read_rows(lane, n) for lane, n in enumerate(counts) if n}

    # ---- which engines are open

    def open(self, capacity: int, rows: Mapping[int, LaneRows], *, keep: bool) -> None:
        """Open an engine where it is not: beside the others, then without those that are not in
        use, and at last, unless that one is to be kept, alone; `rows` are what the lanes hold."""
        if capacity in self.runners:
            self.runners.move_to_end(capacity)
            return
        failure, variant, free = None, self.variants[capacity], available_bytes()
        if free is not None and free < variant.size_bytes:
            self.close_idle()
        try:
            self.runners[capacity] = variant.open()
        except EnvironmentProblem as error:
            # Its traceback would keep what was opened in part
            failure = error.with_traceback(None)
            logger.info("the engine for up to %d tokens: %s", capacity, error.what)
        else:
            logger.info("opened the engine for up to %d tokens", capacity)
            return
        if self.close_idle():
            self.open(capacity, rows, keep=keep)
        elif self.in_use in self.runners and not keep:
            self.open_alone(variant, rows)
        else:
            raise failure

    def close_idle(self) -> bool:
        """Close the engines that are not in use; whether there were any."""
        idle = [capacity for capacity in self.runners if capacity != self.in_use]
        for capacity in idle:
            self.close_one(capacity)
        return bool(idle)

    def close_one(self, capacity: int) -> None:
        """Close an engine."""
        self.runners.pop(capacity).close()
        logger.info("closed the engine for up to %d tokens: memory is short", capacity)

    def open_alone(self, variant: CapacityEngine, rows: Mapping[int, LaneRows]) -> None:
        """Open an engine in the place of the one in use, which is opened again where that
        fails."""
        before = self.variants[self.in_use]
        self.close_one(self.in_use)
        try:
            self.runners[variant.capacity] = variant.open()
        except EnvironmentProblem:
            self.runners[before.capacity] = before.open()
            for lane, copy in rows.items():
                self.runner.write_rows(lane, copy)
            raise

    # ---- a runner

    def run(self, call: Call) -> list[Result]:
        """Run one call in the engine in use, or in a larger one where it has no room for it."""
        ends = call.write_indices + call.written
        if ends.max() > self.variants[self.in_use].slots:
            # Hidden states of its own are in the memory of the engine that gave them
            self.use(self.wanted(int(ends.max())), keep="draft_hidden" in call.extras)
        began_s = self.runner.engine_s
        results = self.runner.run(call)
        self.engine_s += self.runner.engine_s - began_s
        for lane, end in enumerate(ends.tolist(), start=call.first_lane):
            self.written[lane] = end
        return results

    def keep_rows(self, lane: int, slots: Ids, start: int) -> None:
        """Commit rows of a lane."""
        self.runner.keep_rows(lane, slots, start)
        self.written[lane] = self.committed[lane] = start + len(slots)

    def read_rows(self, lane: int, count: int) -> LaneRows:
        """A copy of the first rows of a lane."""
        return self.runner.read_rows(lane, count)

    def write_rows(self, lane: int, rows: LaneRows) -> None:
        """Begin a lane with a copy that an engine of any capacity made."""
        if len(rows) > self.variants[self.in_use].slots:
            self.use(self.wanted(len(rows)))
        self.runner.write_rows(lane, rows)
        self.written[lane] = self.committed[lane] = len(rows)

    def free(self, lane: int) -> None:
        """Drop all rows of a lane. Where others go on, they do so in the smallest engine that is
        open and does for them."""
        if self.in_use in self.runners:
            self.runner.free(lane)
        self.forget(lane)
        wanted = self.wanted()
        if any(self.reserved) and wanted in self.runners:
            self.use(wanted)

    def zero(self, lane: int) -> None:
        """Drop all rows of a lane and make them zeros."""
        self.runner.zero(lane)
        self.forget(lane)

    def forget(self, lane: int) -> None:
        """A lane holds nothing and asks for nothing."""
        self.reserved[lane] = self.written[lane] = self.committed[lane] = 0

    def copy_lane(self, source: int, target: int, count: int) -> None:
        """Copy the first rows of one lane to another, which asks for what that one asks for."""
        self.runner.copy_lane(source, target, count)
        self.written[target] = self.committed[target] = count
        self.reserved[target] = self.reserved[source]

    def close(self) -> None:
        """Release all engines; closing twice is harmless."""
        if self.closed:
            return
        self.closed = True
        for runner in self.runners.values():
            runner.close()
        self.closing()
