"""Requests that wait in a queue, answered so many at a time by the thread that asks.

Knows the driver and events. What a request is, and where it comes from, stands elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from edgespec.errors import InternalError
from edgespec.runtime.faults import FAULTS, as_error
from edgespec.runtime.loop.driver import Driver
from edgespec.runtime.loop.generation import Chunk, Event, Generation, GenerationRequest


class RequestSource(Protocol):
    """Requests that wait, such as a deque; it may still grow while it is emptied."""

    def __len__(self) -> int: ...

    def popleft(self) -> GenerationRequest | None:
        """The next one; None where it could not be asked."""


def run_queue(
    driver: Driver, queue: RequestSource, batch_size: int, stopping: Callable[[], bool]
) -> Iterator[tuple[GenerationRequest, Event]]:
    """What `Engine.run_queue` yields and raises, for a batch size that the engines take."""
    scheduler, inbox = driver.scheduler, deque[tuple[Generation, Event]]()
    active = list[Generation]()

    def submitted(request: GenerationRequest) -> Generation:
        """The handle of a request for which the caller steps; its events go into the inbox."""
        handle = scheduler.prepare(request)
        handle.deliver = lambda event: inbox.append((handle, event))
        driver.submit([handle], by_thread=False)
        return handle

    def cancel_all() -> None:
        """After its step each yields a Response with `cancelled`."""
        for handle in active:
            handle.cancel()

    try:
        while queue or active:
            while queue and len(active) < batch_size:
                request = queue.popleft()
                if request is None:
                    continue
                try:
                    active.append(submitted(request))
                except FAULTS as error:
                    yield request, as_error(error)
            if active and not inbox:
                driver.step(unless=lambda: inbox)
            while inbox:
                handle, event = inbox.popleft()
                if not isinstance(event, Chunk):
                    active.remove(handle)
                if isinstance(event, InternalError) and event.__cause__ is not None:
                    raise event.__cause__  # a bug ends a run over a file
                yield handle.request, event
            if stopping():
                cancel_all()
    finally:
        cancel_all()
