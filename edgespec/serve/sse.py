"""Server-sent events: an answer as it comes, a comment where nothing comes, an error as the last
event.

Knows HTTP and time. Knows no protocol's events.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.types import Receive, Scope, Send

from edgespec.serve.waiting import ClientGone, attended

logger = logging.getLogger(__name__)
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies hold events back otherwise
]
COMMENT = b": still here\n\n"
DONE = b"data: [DONE]\n\n"


TO_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def event(value: object) -> bytes:
    """A value as an event."""
    return b"data: " + TO_JSON.encode(value).encode() + b"\n\n"


class TextEvent:
    """Events that differ in one text alone. `make` gives the value with a text; the rest is written
    once."""

    def __init__(self, make: Callable[[str], object]) -> None:
        mark = "\x00"  # in JSON it is written \u0000, which is nowhere else
        self.before, self.after = event(make(mark)).split(TO_JSON.encode(mark).encode())

    def of(self, text: str) -> bytes:
        """The event with a text."""
        return self.before + TO_JSON.encode(text).encode() + self.after


def typed(value: dict[str, Any]) -> bytes:
    """A value as an event under the name of its type."""
    return f"event: {value['type']}\n".encode() + event(value)


class EventStream:
    """A response of events. `failed` makes the event of an error, `close` ends what is under way,
    however the response ends. `encode` makes bytes of an event that is none yet, and `done` are the
    last ones."""

    def __init__(
        self,
        events: AsyncIterator[object],
        *,
        failed: Callable[[Exception], dict[str, Any]],
        close: Callable[[], None],
        heartbeat_s: float,
        encode: Callable[[Any], bytes] = event,
        done: bytes = DONE,
    ) -> None:
        self.events, self.failed, self.close = events, failed, close
        self.encode, self.done, self.heartbeat_s = encode, done, heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until they end or the client is gone."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            last = self.done
            try:
                await attended(receive, self.write(send))
            except ClientGone:
                return
            except Exception as error:
                last = self.encode(self.failed(error)) + self.done
            await send({"type": "http.response.body", "body": last})
        finally:
            self.close()

    async def write(self, send: Send) -> None:
        """Sends each event, and a comment after a while without one."""
        loop = asyncio.get_running_loop()
        sent_s = loop.time()

        async def beat() -> None:
            nonlocal sent_s
            while True:
                await asyncio.sleep(max(0.0, sent_s + self.heartbeat_s - loop.time()))
                if loop.time() - sent_s >= self.heartbeat_s:
                    sent_s = loop.time()
                    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})

        beating = asyncio.create_task(beat())
        try:
            async for value in self.events:
                sent_s = loop.time()
                body = value if isinstance(value, bytes) else self.encode(value)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating
