"""Answers of the engine to one HTTP request: one or several, as they come.

Knows the engine's streams, and that each must end when nobody reads it any more. Knows no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from edgespec.errors import LimitError, RequestError
from edgespec.prompts import TIMEOUT, SamplingParams
from edgespec.runtime.loop.generation import Chunk, Response
from edgespec.runtime.streams import AsyncStream
from edgespec.runtime.trees.tree import PLAIN
from edgespec.serve.errors import Refusal
from edgespec.serve.service import Service, Ticket

Event = tuple[int, Chunk | Response]  # the answer's index, and what came of it


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt's ids, with the rows of its images, and how it is to be continued."""

    prompt: Sequence[int]
    sampling: SamplingParams
    drafts: bool = True
    keep: bool = False  # the KV rows, for a next turn
    priority: int = 0
    cache_salt: str = ""
    form: str = ""  # the field that says the answer's, as errors call it


@contextmanager
def naming(form: str) -> Iterator[None]:
    """Names the field that says an answer's form in errors of that form."""
    try:
        yield
    except (RequestError, LimitError) as error:
        if error.param != "guided":
            raise
        told = error.spelled({"guided": f"request: {form}"})
        told.param = form.partition(" ")[0]
        raise told from error


class Answers:
    """The answers to some asks, which the engine begins at once. `close` ends what has not ended
    and gives the ticket back; it must be called."""

    def __init__(self, service: Service, asks: Sequence[Ask], ticket: Ticket) -> None:
        self.service, self.asks, self.ticket = service, asks, ticket
        self.streams: list[AsyncStream] = []
        self.watches = [service.metrics.watch(ask) for ask in asks]
        try:
            for ask in asks:
                plan = None if ask.drafts else PLAIN
                stream = service.engine.astream(
                    ask.prompt,
                    ask.sampling,
                    plan,
                    keep=ask.keep,
                    priority=ask.priority,
                    cache_salt=ask.cache_salt,
                    timeout_s=service.limits.request_timeout_s,
                )
                self.streams.append(stream)
        except BaseException:
            self.close()
            raise

    async def begin(self) -> None:
        """Waits until all wait for a lane. Raises the error of one that cannot, and ends all."""
        try:
            for ask, stream in zip(self.asks, self.streams, strict=True):
                with naming(ask.form):
                    await stream.begins()
        except BaseException:
            self.close()
            raise

    async def events(self) -> AsyncIterator[Event]:
        """Each Chunk, and at the end of each answer its Response. Raises the first error."""
        if len(self.streams) == 1:
            async for event in self.of_one(0):
                yield event
            return
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self.pump(i, queue)) for i in range(len(self.streams))]
        try:
            left = len(tasks)
            while left:
                got = await queue.get()
                if isinstance(got, Exception):
                    raise got
                left -= isinstance(got[1], Response)
                yield got
        finally:
            for task in tasks:
                task.cancel()

    async def of_one(self, index: int) -> AsyncIterator[Event]:
        """The events of one answer, which are counted on their way. Raises Refusal where its time
        was over."""
        stream, watch = self.streams[index], self.watches[index]
        try:
            with naming(self.asks[index].form):
                async for chunk in stream:
                    watch.step(chunk)
                    yield index, chunk
                response = stream.response()
            if response.finish_reason == TIMEOUT:
                most_s = self.service.limits.request_timeout_s
                raise Refusal(504, f"The answer took longer than {most_s:g} s.", code="timeout")
        except BaseException as error:
            watch.failed(error)
            raise
        watch.ended(response)
        yield index, response

    async def pump(self, index: int, queue: asyncio.Queue[Event | Exception]) -> None:
        """Puts the events of one answer into a queue, an error too."""
        try:
            async for event in self.of_one(index):
                queue.put_nowait(event)
        except Exception as error:
            queue.put_nowait(error)

    async def ended(self) -> list[Response]:
        """All Responses, in the order of the asks."""
        found = {i: event async for i, event in self.events() if isinstance(event, Response)}
        return [found[index] for index in range(len(self.asks))]

    def close(self) -> None:
        """Ends what has not ended, after the step that is under way."""
        for stream in self.streams:
            stream.cancel()
        self.ticket.give_back()
