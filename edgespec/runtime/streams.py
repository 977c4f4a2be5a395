"""How a client gets its events: piece by piece or at the end, in a thread or in an event loop.

Knows handles and the queues behind them. Knows nothing of engines and prompts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from weakref import WeakKeyDictionary, finalize, ref

from edgespec.errors import EdgeSpecError
from edgespec.runtime.faults import as_error
from edgespec.runtime.loop.driver import Driver
from edgespec.runtime.loop.generation import Chunk, Event, Generation, Response

End = Response | EdgeSpecError
logger = logging.getLogger(__name__)


class Coming:
    """Stands for the handle of a request whose prompt is still made."""

    def __init__(self) -> None:
        self.handle: Generation | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """End the request as soon as it begins."""
        self.cancelled = True
        if self.handle is not None:
            self.handle.cancel()

    def becomes(self, handle: Generation) -> None:
        """The handle is there."""
        self.handle = handle
        if self.cancelled:
            handle.cancel()


class Ending:
    """What an iteration has seen of a request's end."""

    def __init__(self, driver: Driver, handle: Generation | Coming) -> None:
        self.driver, self.handle = driver, handle
        self.end: End | None = None
        self.is_over = False
        # A stream that is dropped ends its request; at the interpreter's exit there is no need
        finalize(self, handle.cancel).atexit = False

    def cancel(self) -> None:
        """End the request after the step that is under way; any thread may. The last Chunk still
        comes, with what the text held back, and the Response says `cancelled`."""
        self.handle.cancel()

    def chunk_of(self, event: Event) -> Chunk | None:
        """The event if it is a Chunk; else the request has ended with it. Raises its error."""
        if isinstance(event, Chunk):
            return event
        self.end, self.is_over = event, True
        if isinstance(event, EdgeSpecError):
            raise event
        return None

    def response(self) -> Response:
        """The Response, once the request has ended. Raises its error."""
        assert self.end is not None
        if isinstance(self.end, EdgeSpecError):
            raise self.end
        return self.end


class Stream(Ending):
    """A request as it is answered: iterate over its Chunks; `result` is the Response.

    The engine goes on whether or not the Chunks are read. A stream that is closed or dropped ends
    its request, and so does an exception in whoever waits for it, such as KeyboardInterrupt. Use it
    in a `with` block where the iteration may end early. One thread reads it; any may cancel it.
    """

    def __init__(self, driver: Driver, handle: Generation) -> None:
        super().__init__(driver, handle)
        self.events: SimpleQueue[Event] = SimpleQueue()
        handle.deliver = self.events.put
        driver.submit([handle])

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = None if self.is_over else self.next_chunk()
        if chunk is None:
            raise StopIteration
        return chunk

    def next_chunk(self) -> Chunk | None:
        """The next Chunk; None once the request has ended. Raises its error."""
        with cancelling([self.handle]):
            return self.chunk_of(self.events.get())

    def result(self) -> Response:
        """The Response, as soon as the request has ended; Chunks that were not read are dropped.
        Raises the request's error."""
        while self.end is None and self.next_chunk() is not None:
            pass
        return self.response()

    def close(self) -> None:
        """End the request after the step that is under way, and the iteration at once."""
        self.is_over = True
        self.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncStream(Ending):
    """A request as it is answered, in an event loop: `async for` over its Chunks, `await` for its
    `result`.

    What is said of Stream holds. A task that is cancelled while it waits for a Chunk ends the
    request. `make` makes its handle, in a thread: templates, tokenising and images take time. What
    it raises ends the iteration.
    """

    def __init__(self, driver: Driver, make: Callable[[], Generation]) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        coming = Coming()
        super().__init__(driver, coming)
        # Held as long as the stream is: the loop itself would not
        self.begun = asyncio.create_task(begin(driver, make, coming, self.events))

    async def begins(self) -> None:
        """Waits until the request waits for a lane. Raises the error that kept it from that."""
        await self.begun
        if isinstance(self.handle, Coming) and self.handle.handle is None:
            await self.next_chunk()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = None if self.is_over else await self.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def next_chunk(self) -> Chunk | None:
        """The next Chunk; None once the request has ended. Raises its error."""
        try:
            event = await self.events.get()
        except BaseException:  # whoever waited is gone
            self.handle.cancel()
            raise
        return self.chunk_of(event)

    async def result(self) -> Response:
        """The Response, as soon as the request has ended; Chunks that were not read are dropped.
        Raises the request's error."""
        while self.end is None and await self.next_chunk() is not None:
            pass
        return self.response()

    async def aclose(self) -> None:
        """End the request after the step that is under way, and the iteration at once."""
        self.is_over = True
        self.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


async def begin(
    driver: Driver, make: Callable[[], Generation], coming: Coming, events: asyncio.Queue[Event]
) -> None:
    """Make a request's handle in a thread, and submit it; an error becomes its only event."""
    try:
        handle = await asyncio.to_thread(make)
        handle.deliver = in_loop(handle, events.put_nowait)
        coming.becomes(handle)
        driver.submit([handle])
    except asyncio.CancelledError:  # the loop ends
        coming.cancel()
        raise
    except Exception as error:
        events.put_nowait(as_error(error))


# ---- the ends alone


class Ends:
    """The ends of several requests, as they come. No thread is woken for what comes before."""

    def __init__(self, handles: Sequence[Generation]) -> None:
        self.handles = handles
        self.events: SimpleQueue[tuple[int, End]] = SimpleQueue()
        for index, handle in enumerate(handles):
            handle.deliver = partial(self.take, index)

    def take(self, index: int, event: Event) -> None:
        """Called with each event of a request."""
        if not isinstance(event, Chunk):
            self.events.put((index, event))

    def __iter__(self) -> Iterator[tuple[int, End]]:
        """Each request's index and its end."""
        for _ in self.handles:
            yield self.events.get()


def future_end(handle: Generation) -> asyncio.Future[Response]:
    """A request's Response, or its error, as a future of the running event loop."""
    future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    deliver = in_loop(handle, partial(settle, future))

    def take(event: Event) -> Callable[[], None] | None:
        return None if isinstance(event, Chunk) else deliver(event)

    handle.deliver = take
    return future


def settle(future: asyncio.Future[Response], event: Event) -> None:
    """Give a future what its request came to, unless it is cancelled."""
    if future.done():
        return
    if isinstance(event, EdgeSpecError):
        future.set_exception(event)
    elif isinstance(event, Response):
        future.set_result(event)


Put = Callable[[Event], object]
LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMail] = WeakKeyDictionary()


class LoopMail:
    """The events for one event loop, which is woken once for all of a step; once it is closed,
    their requests end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.waiting = ref(loop), deque[tuple[Generation, Put, Event]]()

    def send(self) -> None:
        """Wake the loop; any thread may."""
        try:
            if (loop := self.loop()) is not None:
                loop.call_soon_threadsafe(self.take)
                return
        except RuntimeError:
            logger.debug("an event loop was closed before its requests ended")
        while self.waiting:
            self.waiting.popleft()[0].cancel()

    def take(self) -> None:
        """Called in the loop."""
        while self.waiting:
            _, put, event = self.waiting.popleft()
            put(event)


def in_loop(handle: Generation, put: Put) -> Callable[[Event], Callable[[], None]]:
    """What hands events over to the running event loop: what it gives sends them."""
    loop = asyncio.get_running_loop()
    mail = LOOPS.get(loop)
    if mail is None:
        mail = LOOPS[loop] = LoopMail(loop)
    waiting, send = mail.waiting, mail.send

    def deliver(event: Event) -> Callable[[], None]:
        waiting.append((handle, put, event))
        return send

    return deliver


@contextmanager
def cancelling(handles: Sequence[Generation | Coming]) -> Iterator[None]:
    """An exception inside ends these requests: whoever waited for them is gone."""
    try:
        yield
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
