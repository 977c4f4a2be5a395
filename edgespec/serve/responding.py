"""A request as a protocol has read it becomes a response: whole, or as a stream of events.

Knows when answers begin and end, and that they end where nobody reads them. Knows no protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from edgespec.serve import sse
from edgespec.serve.answering import Answers
from edgespec.serve.service import Call, Ticket
from edgespec.serve.waiting import attended


class Asked(Protocol):
    """A request as a protocol has read it."""

    async def answers(self, ticket: Ticket) -> Answers:
        """The answers, which the engine has begun."""

    async def whole(self, answers: Answers) -> Any:
        """All of them as one object."""

    def parts(self, answers: Answers) -> AsyncIterator[dict[str, Any] | bytes]:
        """What is sent of them as it comes; bytes are sent as they are."""


async def respond(
    call: Call,
    asked: Asked,
    count: int,
    *,
    made: Callable[[Any], ASGIApp] = JSONResponse,
    encode: Callable[[Any], bytes] = sse.event,
    failed: Callable[[Exception], dict[str, Any]] | None = None,
    done: bytes = b"",
) -> ASGIApp:
    """The response to a request for `count` answers: whole, `made` of them, or as a stream of
    events, whose bytes `encode` makes, that of an error `failed`, and `done` at its end. Raises
    Refusal and the engine's errors while nothing was sent, and ClientGone."""
    service = call.service
    ticket = service.admit(count)
    try:
        if call.values.get("stream"):
            answers = await asked.answers(ticket)
            await answers.begin()
            return sse.EventStream(
                asked.parts(answers),
                failed=failed or call.error_of,
                close=answers.close,
                heartbeat_s=service.limits.heartbeat_s,
                encode=encode,
                done=done,
            )
        return made(await attended(call.request.receive, whole_of(asked, ticket)))
    except BaseException:
        ticket.give_back()
        raise


async def whole_of(asked: Asked, ticket: Ticket) -> Any:
    """All answers as one object; they end with it."""
    answers = await asked.answers(ticket)
    try:
        return await asked.whole(answers)
    finally:
        answers.close()
