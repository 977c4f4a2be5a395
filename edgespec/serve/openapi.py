"""The OpenAPI document, made of the tables of routes and fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec import __version__
from edgespec.serve.fields import schema_of
from edgespec.serve.protocols import Route

# Status -> when; of all routes, and of those with a body
ANYWHERE = {
    "200": "The answer",
    "401": "The key is missing or wrong",
    "403": "Another host or origin",
    "404": "There is no such path or model",
    "503": "The server is stopping, or the machine cannot answer now",
}
WITH_BODY = {
    "400": "The request cannot be answered as it is",
    "408": "The body came too slowly",
    "413": "The body is too long",
    "415": "The body is not JSON, or compressed",
    "429": "The queue is full",
    "504": "The answer took too long",
}
KEY = {"key": {"type": "http", "scheme": "bearer"}}


def document(routes: Sequence[Route], *, has_keys: bool) -> dict[str, Any]:
    """The document of some routes."""
    paths: dict[str, Any] = {}
    for route in routes:
        paths[route.path.replace(":path}", "}")] = {route.method.lower(): operation(route)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__},
        "paths": paths,
        **({"components": {"securitySchemes": KEY}, "security": [{"key": []}]} if has_keys else {}),
    }


def operation(route: Route) -> dict[str, Any]:
    """One route."""
    told = dict(sorted((ANYWHERE | (WITH_BODY if route.fields is not None else {})).items()))
    made: dict[str, Any] = {
        "summary": route.summary,
        "responses": {status: {"description": when} for status, when in told.items()},
    }
    if route.fields is not None:
        content = {"application/json": {"schema": schema_of(route.fields)}}
        made["requestBody"] = {"required": True, "content": content}
    if "{" in route.path:
        name = route.path.partition("{")[2].partition(":")[0]
        schema = {"type": "string"}
        made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    return made
