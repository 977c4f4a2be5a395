"""Who steps the scheduler: one thread, as long as requests of any thread wait for their answers.

Knows requests that have not ended, whose turn a step is, and what they get when an engine is closed
or a step breaks. Knows no text and no engine.

The thread has three properties. No signal interrupts a step, because Python raises
KeyboardInterrupt in the main thread alone: whoever waits there is interrupted, and no other
request. It holds nothing of an engine while there is nothing to do, so an engine that is dropped is
freed. It ends when the engine is closed, and at the interpreter's exit after the step under way.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from weakref import WeakSet, ref

from edgespec.errors import (
    EdgeSpecError,
    EngineClosed,
    EnvironmentProblem,
    InternalError,
    LimitError,
    counted,
)
from edgespec.runtime.faults import shared
from edgespec.runtime.loop.generation import Chunk, Event, Generation, Response
from edgespec.runtime.loop.scheduler import Scheduler

logger = logging.getLogger(__name__)


class DriverWork:
    """What the thread and an engine share while the thread holds nothing else of it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.num_requests = 0  # for whose answers the thread steps
        self.closed = False
        self.thread: threading.Thread | None = None
        self.pid = os.getpid()

    def is_due(self) -> bool:
        """Whether the thread has to step, or to end."""
        return self.closed or self.num_requests > 0

    def close(self) -> None:
        """Let the thread end after its step, if it runs one."""
        if self.pid != os.getpid():
            return  # a fork: the thread is not here, and its lock may be taken for ever
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self.thread is not None and self.pid == os.getpid():
            self.thread.join()


class FairLock:
    """A lock that goes to whoever waits before the one that had it last gets it again."""

    def __init__(self) -> None:
        self.next, self.lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self.next:
            self.lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


class Driver:
    """The requests of one scheduler, from any thread, until they end.

    Those of `submit` are answered by a thread that steps for them. With `by_thread` False the
    caller promises to call `step` until they end, so that only what the caller does decides which
    requests share a step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.turn = FairLock()  # of a step, and of whatever else touches the session
        self.work = DriverWork()
        self.pending: dict[Generation, bool] = {}  # whether the thread steps for it
        self.numbers = count(1)

    # ---- any thread

    def submit(self, handles: Sequence[Generation], *, by_thread: bool = True) -> None:
        """Let requests wait for a lane; the events go to their `deliver`, in the thread that steps.

        The next step finds all of them. Raises EngineClosed; EnvironmentProblem in a fork of the
        process, or where no thread can be started; LimitError from inside a step; QueueFull.
        """
        self.check_process()
        work = self.work
        if work.thread is threading.current_thread():
            message = "an engine was asked from inside one of its own steps"
            raise LimitError(message, "Ask another engine, or from another thread.")
        with work.changed:
            self.check_open()
            self.scheduler.check_room(len(handles))
            if by_thread and work.thread is None:
                work.thread = started(work, ref(self))
            for handle in handles:
                handle.number = next(self.numbers)
                self.pending[handle] = by_thread
            self.scheduler.enqueue(handles)
            if by_thread:
                work.num_requests += len(handles)
                work.changed.notify()
        for handle in handles:
            tokens, plan = counted(len(handle.prompt), "prompt token"), handle.plan or "no drafts"
            logger.debug("%s: %s, %s", handle, tokens, plan)

    def step(self, unless: Callable[[], object] = lambda: False) -> None:
        """One step, no matter whose requests it serves; none if `unless` says so once it is this
        caller's turn. Raises EngineClosed, and what breaks the step."""
        with self.turn:
            if unless():
                return
            self.check_open()
            try:
                self.deliver_all(self.scheduler.step())
            except BaseException as error:
                self.scheduler.restart()
                self.drop_lost(error)
                raise
            if self.pending and not self.scheduler.has_work:
                self.drop_lost(InternalError("the scheduler has lost this request"))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No step runs inside. Raises EngineClosed; EnvironmentProblem in a fork."""
        self.check_process()
        with self.turn:
            self.check_open()
            yield

    def close(self) -> None:
        """End the thread after its step; requests that have not ended get EngineClosed. Closing
        twice, or in a fork, is harmless."""
        self.work.close()
        if not self.is_own_process:
            return
        with self.turn:
            message = "the engine was closed before this request ended"
            self.deliver_all([(handle, EngineClosed(message)) for handle in self.pending])
        if self.work.thread is not threading.current_thread():
            self.work.join()

    @property
    def is_own_process(self) -> bool:
        """Whether this is no fork of the process that opened the engine."""
        return self.work.pid == os.getpid()

    def check_open(self) -> None:
        """Raises EngineClosed."""
        if self.work.closed:
            raise EngineClosed("this engine is closed")

    def check_process(self) -> None:
        """Raises EnvironmentProblem in a fork of the process that opened the engine: the threads
        of ONNX Runtime and this one are not in it."""
        if not self.is_own_process:
            message = f"this engine was opened by process {self.work.pid}, of which this is a fork"
            remedy = "Open an engine after the fork (edgespec.load), or start processes by spawn."
            raise EnvironmentProblem(message, remedy)

    # ---- the thread

    def work_off(self) -> None:
        """Steps as long as requests wait for it. What breaks a step is the error of the requests
        that were in it."""
        while self.work.num_requests and not self.work.closed:
            try:
                self.step(lambda: not self.work.num_requests or self.work.closed)
            except BaseException:  # the thread goes on with what waits
                logger.exception("a step broke")

    # ---- how requests end

    def deliver_all(self, events: Iterable[tuple[Generation, Event]]) -> None:
        """Hand events to whoever waits for them; who waits elsewhere is woken once for all."""
        wakes = dict[Callable[[], None], None]()
        try:
            for handle, event in events:
                if (wake := self.deliver(handle, event)) is not None:
                    wakes[wake] = None
        finally:
            for wake in wakes:
                wake()

    def deliver(self, handle: Generation, event: Event) -> Callable[[], None] | None:
        """Hand an event to whoever waits for it, and give what wakes them; nothing to a request
        that has ended."""
        if handle not in self.pending:
            return None
        if not isinstance(event, Chunk):
            with self.work.changed:
                self.work.num_requests -= self.pending.pop(handle)
            if not isinstance(event, Response):  # never its text
                is_bug = isinstance(event, InternalError)  # what was raised may hold a text
                why = type(event.__cause__).__name__ if is_bug else event.what
                logger.warning("%s failed: %s", handle, why)
            elif logger.isEnabledFor(logging.INFO):
                words = event.metrics.in_words()
                logger.info("%s: %s, %s", handle, event.finish_reason, words)
        return handle.deliver(event)

    def drop_lost(self, error: BaseException) -> None:
        """Tell the requests that a broken step has dropped: all that no longer wait for a lane."""
        with self.work.changed:
            waiting = self.scheduler.queued()
            lost = [handle for handle in self.pending if handle not in waiting]
        self.deliver_all([(handle, dropped(error)) for handle in lost])


def dropped(error: BaseException) -> EdgeSpecError:
    """The error of a request that a broken step has dropped."""
    if isinstance(error, Exception):
        return shared(error)
    return EnvironmentProblem("this request was dropped: a step was interrupted", "Ask again.")


# ---- threads

RUNNING: WeakSet[DriverWork] = WeakSet()  # to be ended before the interpreter is


def started(work: DriverWork, driver: ref[Driver]) -> threading.Thread:
    """The thread that steps for a driver. EnvironmentProblem where none can be started."""
    thread = threading.Thread(target=run, args=(work, driver), name="edgespec", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        remedy = "Close other programs, or raise the limits of memory and processes (ulimit -a)."
        raise EnvironmentProblem(f"no thread can be started: {error}", remedy) from error
    RUNNING.add(work)
    return thread


def run(work: DriverWork, reference: ref[Driver]) -> None:
    """The thread: steps while there is something to do, and holds no engine while there is not."""
    while True:
        with work.changed:
            work.changed.wait_for(work.is_due)
        driver = reference()
        if work.closed or driver is None:
            return
        driver.work_off()
        del driver


@atexit.register
def end_threads() -> None:
    """Ends all threads before the interpreter ends: one that comes back from an engine afterwards
    would crash it."""
    running = list(RUNNING)
    for work in running:
        work.close()
    for work in running:
        work.join()
