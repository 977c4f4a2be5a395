"""Work for a client that may go: it ends when the client is gone.

Knows tasks and ASGI's messages. One thing hides a disconnect from an application: a middleware that
reads `receive` itself; there is none here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection: nobody reads an answer."""


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What some work comes to. The request's body has been read. Raises ClientGone; the work is
    cancelled then."""
    working, watching = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    both: set[asyncio.Task[Any]] = {working, watching}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Waits until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
