"""Which request runs when: the queue in front of a session's lanes.

Knows requests that wait, those whose prompts are being read, and those that run. `step` is all that
whoever serves has to call; it may be called with nothing to do. One thread at a time calls it (see
`driver`); any thread may add requests and cancel them. How tokens come about is the session's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from edgespec.prompts import CANCELLED
from edgespec.runtime.faults import FAULTS, as_error, shared
from edgespec.runtime.loop.generation import Event, Generation, GenerationRequest
from edgespec.runtime.loop.prompt_turns import PromptTurns
from edgespec.runtime.loop.sequence import SequenceState, StepOutput, rest
from edgespec.runtime.loop.session import Session

logger = logging.getLogger(__name__)

Prepare = Callable[[GenerationRequest], Generation]
Events = Iterator[tuple[Generation, Event]]


class Scheduler:
    """The requests of one session, at most `max_num_seqs` at a time, in the order in which they
    came.

    `prepare` checks a request and makes its handle.
    """

    def __init__(self, session: Session, prepare: Prepare, max_num_seqs: int) -> None:
        self.session, self.prepare, self.max_num_seqs = session, prepare, max_num_seqs
        self.added: deque[Generation] = deque()  # by any thread, since the last step
        self.waiting: deque[Generation] = deque()
        self.active: list[Generation] = []  # those with a lane
        costs = None if session.policy is None else session.policy.model
        self.turns = PromptTurns(costs, lambda: session.base.prefill_chunk)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.added or self.waiting or self.active)

    def add(self, request: GenerationRequest) -> Generation:
        """Let a request wait for a lane; returns its handle. Raises what `prepare` raises: for the
        engine's, LimitError or RequestError where it cannot be answered."""
        handle = self.prepare(request)
        self.enqueue([handle])
        return handle

    def enqueue(self, handles: Iterable[Generation]) -> None:
        """Let requests wait for a lane, which the next step finds all at once."""
        self.added.extend(handles)

    def queued(self) -> set[Generation]:
        """Those that wait for a lane."""
        return {*self.added, *self.waiting}

    def step(self) -> list[tuple[Generation, Event]]:
        """One chunk of a prompt, then one decode step of all that run; returns what came of it.

        Each request has its Chunks and at last its Response, or the error that it met. While a
        batch forms the decode step is left out: see `is_forming`.
        """
        try:
            while self.added:
                self.waiting.append(self.added.popleft())
            events = [*self.drop_cancelled(), *self.admit_waiting()]
            running = [*self.session.running]
            chosen = self.turns.choose(self.session.reading) if self.session.reading else None
            if chosen is not None and self.is_forming(chosen):
                running = []
            if chosen is not None:
                events += self.read_chunk(chosen, self.turns.rows(chosen, running))
            if running:
                events += self.decode()
            return events
        except BaseException:
            self.restart()
            raise

    def restart(self) -> None:
        """Forget the requests that have a lane, whatever they were in the middle of; those that
        wait for one still wait."""
        self.active.clear()
        self.session.restart()

    # ---- the parts of a step

    def drop_cancelled(self) -> Events:
        """The last events of cancelled requests; their lanes are free afterwards."""
        for handle in [handle for handle in self.waiting if handle.cancelled]:
            self.waiting.remove(handle)
            yield from self.cancelled(handle)
        for handle in [handle for handle in self.active if handle.cancelled]:
            self.session.end(handle)
            self.active.remove(handle)
            yield from self.cancelled(handle)

    def cancelled(self, handle: Generation) -> Events:
        """An empty last Chunk and the Response with what there is, both `cancelled`."""
        yield handle, handle.chunk(StepOutput([], finish_reason=CANCELLED))
        yield handle, handle.response(CANCELLED)

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
            yield handle, as_error(error)
        else:
            self.active.append(handle)
            logger.debug(
                "%s has lane %d after %.3f s", handle, handle.slot, handle.metrics.queue_time
            )

    def read_chunk(self, handle: SequenceState, rows: int) -> Events:
        """Reads a chunk of a prompt; events once it is read, or the error that it met alone."""
        assert isinstance(handle, Generation)
        try:
            output = self.session.prefill(handle, rows)
        except Exception as error:  # of whatever kind, it is this request's own
            self.session.fail(handle)
            self.active.remove(handle)
            yield handle, as_error(error)
        else:
            if output is not None:
                yield from self.report(handle, output)

    def decode(self) -> Events:
        """One step of all that run. Where the engine itself fails all that have a lane have
        failed."""
        try:
            outputs = self.session.step() if self.session.running else []
        except FAULTS as error:
            failed, self.active = self.active, []
            self.session.restart()
            yield from ((handle, shared(error)) for handle in failed)
            return
        for seq, output in outputs:
            assert isinstance(seq, Generation)
            yield from self.report(seq, output)

    def report(self, handle: Generation, output: StepOutput) -> Events:
        """The Chunk of a step, and at the end the Response or the sequence's error."""
        if output.finish_reason is not None:
            self.active.remove(handle)
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
                self.active.remove(handle)
            yield handle, as_error(error)
        else:
            yield from ((handle, event) for event in events)
