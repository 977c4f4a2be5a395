"""The ASGI application: finds the route of a request, and answers errors in its form.

No middleware stands between a client and its answer: one that reads ahead would hide that the
client has gone. Knows the table of routes. Knows no field.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.routing import Route as Path
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.errors import EngineClosed
from edgespec.serve import fields, openapi
from edgespec.serve.bodies import is_long
from edgespec.serve.errors import FORMS, Refusal, log_bug, refusal_of
from edgespec.serve.protocols import ROUTES, Route
from edgespec.serve.service import Call, Service
from edgespec.serve.waiting import ClientGone

logger = logging.getLogger(__name__)
OPENAPI = "/openapi.json"
SAFE = {"x-content-type-options": "nosniff", "cache-control": "no-store"}


async def unused(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands where Starlette wants an application; `App` calls the route's own function."""


class App:
    """Answers the requests of one service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        document = Route("GET", OPENAPI, self.document, "This document")
        self.routes = [
            (Path(route.path, unused, methods=[route.method]), route)
            for route in (*ROUTES, document)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Other kinds of connections are not taken."""
        if scope["type"] != "http":
            return
        request, begun_s = Request(scope, receive), time.perf_counter()
        try:
            response = await self.response(request)
        except (ClientGone, ClientDisconnect):
            logger.info("%s %s: the client is gone", request.method, scope["path"])
            return
        status = response.status_code if isinstance(response, Response) else 200
        # never a text, nor a query
        took_s = time.perf_counter() - begun_s
        logger.info("%s %s: %d after %.3f s", request.method, scope["path"], status, took_s)
        try:
            await response(scope, receive, send)
        except Exception as error:
            log_bug(error)
            raise

    async def response(self, request: Request) -> ASGIApp:
        """The response to a request, an error in the form of its route."""
        route = self.found(request)
        form = FORMS["openai" if isinstance(route, Refusal) else route.form]
        try:
            self.service.guard.check(request.url.scheme, request.headers)
            if isinstance(route, Refusal):
                raise route
            call = Call(self.service, request, form)
            if route.fields is not None:
                body = await route.body(request, self.service.limits)
                work = partial(fields.read, body, route.fields)
                values, adjusted = await asyncio.to_thread(work) if is_long(request) else work()
                self.service.check_model(values.get("model"))
                call = Call(self.service, request, form, values, adjusted)
            response = await route.answer(call)
        except (ClientGone, ClientDisconnect):
            raise
        except (Exception, asyncio.CancelledError) as met:
            # The server is stopped at once: the task ends with this answer
            error = met if isinstance(met, Exception) else EngineClosed("the server was stopped")
            refusal = refusal_of(error, self.service.max_model_len)
            status = form.statuses.get(refusal.status, refusal.status)
            return JSONResponse(form.body(refusal), status, {**SAFE, **refusal.headers})
        if isinstance(response, Response):
            response.headers.update(SAFE)
        return response

    def found(self, request: Request) -> Route | Refusal:
        """The route of a request, or what to say once it may ask, where there is none."""
        others: list[str] = []
        for path, route in self.routes:
            match, child = path.matches(request.scope)
            if match is Match.FULL:
                request.scope.update(child)
                return route
            if match is Match.PARTIAL:
                others.append(route.method)
        if others:
            allow = ", ".join(others)
            message = f"This path takes {allow}."
            return Refusal(405, message, code="method_not_allowed", allow=allow)
        message = f"There is no such path; {OPENAPI} lists those that there are."
        return Refusal(404, message, code="unknown_path")

    async def document(self, call: Call) -> ASGIApp:
        """The OpenAPI document of all routes."""
        routes, names = [route for _, route in self.routes], self.service.names
        return JSONResponse(openapi.document(routes, names, has_keys=bool(self.service.guard.keys)))
