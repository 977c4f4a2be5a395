"""Which request runs when: the queue in front of a session's lanes.

Knows requests that wait, those whose prompts are being read, and those that run. `step` is all that
whoever serves has to call; it may be called with nothing to do. One thread at a time calls it (see
`driver`); any thread may add requests and cancel them. How tokens come about is the session's.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from edgespec.backends.base import Interrupted
from edgespec.errors import QueueFull
from edgespec.prompts import CANCELLED, TIMEOUT
from edgespec.runtime.faults import FAULTS, as_error, shared
from edgespec.runtime.loop.generation import Event, Generation, GenerationRequest, nothing
from edgespec.runtime.loop.prompt_turns import PromptTurns
from edgespec.runtime.loop.sequence import SequenceState, StepOutput, rest
from edgespec.runtime.loop.session import Session
from edgespec.runtime.loop.stats import Counters, EngineStats
from edgespec.runtime.loop.waiting import ByKey, WaitingQueue

logger = logging.getLogger(__name__)

Prepare = Callable[[GenerationRequest], Generation]
Events = Iterator[tuple[Generation, Event]]


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows of a prompt that are being read, until `interrupt`."""

    seq: SequenceState
    rows: int
    interrupt: Callable[[], None]

    def make_way(self, handles: Sequence[Generation], turns: PromptTurns) -> None:
        """End it if one of those that come is shorter and is to be read before it."""
        order = turns.order(self.seq)
        if any(rest(one) <= self.rows and turns.order(one) < order for one in handles):
            self.interrupt()


class Scheduler:
    """The requests of one session, at most `max_num_seqs` at a time, by priority and then in the
    order in which they came.

    `prepare` checks a request and makes its handle. No more than `max_queue` wait for a lane.
    """

    def __init__(
        self,
        session: Session,
        prepare: Prepare,
        max_num_seqs: int,
        max_queue: int | None = None,
    ) -> None:
        self.session, self.prepare, self.max_num_seqs = session, prepare, max_num_seqs
        self.max_queue, self.counters = max_queue, Counters()
        self.added: deque[Generation] = deque()  # by any thread, since the last step
        self.cancels: deque[Generation] = deque()  # by any thread; they may have ended
        self.waiting = WaitingQueue()
        self.deadlines = ByKey(lambda handle: not handle.is_over)
        self.active: list[Generation] = []  # those with a lane
        costs = None if session.policy is None else session.policy.model
        self.turns = PromptTurns(costs, lambda: session.base.prefill_chunk)
        self.chunk: PromptChunk | None = None  # that may be ended
        self.ended: tuple[SequenceState, int] | None = None  # whose chunk last was, and where

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.added or self.waiting or self.active)

    def add(self, request: GenerationRequest) -> Generation:
        """Let a request wait for a lane; returns its handle. Raises what `prepare` raises: for the
        engine's, LimitError or RequestError where it cannot be answered; QueueFull."""
        handle = self.prepare(request)
        self.check_room(1)
        self.enqueue([handle])
        return handle

    def check_room(self, count: int) -> None:
        """QueueFull where so many more would let more than `max_queue` wait."""
        if self.max_queue is None:
            return
        waiting = len(self.added) + len(self.waiting)
        if waiting + count > self.max_queue + max(0, self.max_num_seqs - len(self.active)):
            message = f"{waiting} requests wait for the engine, of {self.max_queue} that may"
            raise QueueFull(message)

    def enqueue(self, handles: Sequence[Generation]) -> None:
        """Let requests wait for a lane, which the next step finds all at once."""
        for handle in handles:
            handle.on_cancel = partial(self.cancels.append, handle)
        self.added.extend(handles)
        chunk = self.chunk  # once: a step may write it meanwhile
        if chunk is not None and len(self.active) < self.max_num_seqs:
            chunk.make_way(handles, self.turns)

    def stats(self) -> EngineStats:
        """What was done so far; any thread may ask."""
        waiting = len(self.added) + len(self.waiting)
        return self.counters.stats(len(self.active), waiting, self.session.prefixes.size_bytes)

    def queued(self) -> set[Generation]:
        """Those that wait for a lane."""
        return {*self.added, *self.waiting}

    def step(self) -> list[tuple[Generation, Event]]:
        """One chunk of a prompt, then one decode step of all that run; returns what came of it.

        Each request has its Chunks and at last its Response, or the error that it met. While a
        batch forms the decode step is left out: see `is_forming`.
        """
        try:
            self.take_added()
            events = [*self.drop_due(), *self.admit_waiting()]
            running = [*self.session.running]
            chosen = self.turns.choose(self.session.reading) if self.session.reading else None
            if chosen is not None and self.is_forming(chosen):
                running = []
            if chosen is not None:
                rows = self.turns.rows(chosen, running)
                events += self.read_chunk(chosen, rows, alone=not running)
            if running:
                events += self.decode()
            self.counters.end_iteration()
            return events
        except BaseException:
            self.restart()
            raise

    def restart(self) -> None:
        """Forget the requests that have a lane, whatever they were in the middle of; those that
        wait for one still wait."""
        for handle in [*self.active]:
            self.leave(handle)
        self.session.restart()

    # ---- the parts of a step

    def take_added(self) -> None:
        """Let those that came since the last step wait."""
        while self.added:
            handle = self.added.popleft()
            self.waiting.add(handle)
            if handle.cancelled:
                self.cancels.append(handle)
            if (timeout_s := handle.request.timeout_s) is not None:
                num_there = len(self.waiting) + len(self.active)
                self.deadlines.add(handle.arrived_s + timeout_s, handle, num_there)

    def drop_due(self) -> Events:
        """The last events of requests that were cancelled, and of those whose deadline has passed;
        their lanes are free afterwards."""
        while self.cancels:
            yield from self.drop(self.cancels.popleft(), CANCELLED)
        if self.deadlines.heap:
            for handle in self.deadlines.up_to(time.perf_counter()):
                yield from self.drop(handle, TIMEOUT)

    def drop(self, handle: Generation, reason: str) -> Events:
        """An empty last Chunk and the Response with what there is; nothing of one that has
        ended."""
        if handle in self.active:
            self.session.end(handle)
            self.leave(handle)
        elif self.waiting.remove(handle):
            self.over(handle)
        else:
            return
        yield handle, handle.chunk(StepOutput([], finish_reason=reason))
        yield handle, handle.response(reason)

    def leave(self, handle: Generation) -> None:
        """One has its lane no more."""
        self.active.remove(handle)
        self.over(handle)

    def over(self, handle: Generation) -> None:
        """One has ended: nothing is to be held for it."""
        handle.is_over, handle.on_cancel = True, nothing

    def is_forming(self, chosen: SequenceState) -> bool:
        """Whether those that run have not decoded yet, and the rest of the next prompt is no longer
        than a chunk: then it is read first, so that requests that come together decode together."""
        if any(seq.num_emitted > 1 for seq in self.session.running):
            return False
        return rest(chosen) <= self.turns.whole_rows(chosen)

    def admit_waiting(self) -> Events:
        """Let those that wait have the lanes that are free."""
        while self.can_admit():
            yield from self.admit(self.waiting.popleft())

    def can_admit(self) -> bool:
        """Whether a request waits and a sequence slot is free."""
        return bool(self.waiting) and len(self.active) < self.max_num_seqs

    def admit(self, handle: Generation) -> Events:
        """Give a request a lane; the event of its error where it cannot have one."""
        handle.begun()
        try:
            self.session.admit(handle)
        except Exception as error:  # of whatever kind, it is this request's own
            self.session.free_reading(handle)
            self.over(handle)
            yield handle, as_error(error)
        else:
            self.active.append(handle)
            logger.debug(
                "%s has lane %d after %.3f s", handle, handle.slot, handle.metrics.queue_time
            )

    def read_chunk(self, handle: SequenceState, rows: int, *, alone: bool) -> Events:
        """Reads a chunk of a prompt; events once it is read, or the error that it met alone. Where
        nothing runs it is ended, once, if one comes that is to be read before it."""
        assert isinstance(handle, Generation)
        place, computed = (handle, handle.num_read), handle.num_read - handle.num_reused
        try:
            with self.session.base.interruptible() as interrupt:
                if alone and self.ended != place:
                    self.chunk = PromptChunk(handle, rows, interrupt)
                output = self.session.prefill(handle, rows)
        except Interrupted:
            self.ended = place
        except Exception as error:  # of whatever kind, it is this request's own
            self.session.fail(handle)
            self.leave(handle)
            yield handle, as_error(error)
        else:
            self.counters.tokens += handle.num_read - handle.num_reused - computed
            if output is not None:
                yield from self.report(handle, output)
        finally:
            self.chunk = None

    def decode(self) -> Events:
        """One step of all that run. Where the engine itself fails all that have a lane have
        failed."""
        try:
            outputs = self.session.step() if self.session.running else []
            self.counters.steps += bool(outputs)
        except FAULTS as error:
            failed = [*self.active]
            self.restart()
            yield from ((handle, shared(error)) for handle in failed)
            return
        for seq, output in outputs:
            assert isinstance(seq, Generation)
            yield from self.report(seq, output)

    def report(self, handle: Generation, output: StepOutput) -> Events:
        """The Chunk of a step, and at the end the Response or the sequence's error."""
        self.counters.add(output, len(handle.prompt), handle.num_reused)
        if output.finish_reason is not None:
            self.leave(handle)
        if output.error is not None:
            yield handle, output.error
            return
        try:
            events: list[Event] = [handle.chunk(output)]
            if output.finish_reason is not None:
                events.append(handle.response(output.finish_reason))
        except Exception as error:  # of whatever kind, it is this request's own
            if handle in self.active:
                self.session.fail(handle)
                self.leave(handle)
            yield handle, as_error(error)
        else:
            yield from ((handle, event) for event in events)
