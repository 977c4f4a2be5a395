"""The OpenAPI document, made of the tables of routes and fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from edgespec import __version__
from edgespec.serve.errors import FORMS, Refusal
from edgespec.serve.fields import schema_of
from edgespec.serve.kserve import VERSION
from edgespec.serve.protocols import Route

# Status of an error -> when; of all routes, and of those with a body
ERRORS = {
    401: "The key is missing or wrong",
    403: "Another host or origin",
    404: "There is no such path or model",
    503: "The server is stopping, or the machine cannot answer now",
}
WITH_BODY = {
    400: "The request cannot be answered as it is",
    408: "The body came too slowly",
    413: "The body is too long",
    415: "The body is not JSON, or compressed",
    429: "The queue is full",
    504: "The answer took too long",
}
KEY = {"key": {"type": "http", "scheme": "bearer"}}


def document(routes: Sequence[Route], names: Sequence[str], *, has_keys: bool) -> dict[str, Any]:
    """The document of some routes; `names` are those of the model."""
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = operation(route, names)
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__},
        "paths": paths,
        **({"components": {"securitySchemes": KEY}, "security": [{"key": []}]} if has_keys else {}),
    }


def operation(route: Route, names: Sequence[str]) -> dict[str, Any]:
    """One route."""
    form = FORMS[route.form]
    error = {"application/json": {"schema": like(form.body(Refusal(400, "")))}}
    told: dict[str, Any] = {"200": {"description": "The answer"}}
    for status, when in (ERRORS | (WITH_BODY if route.fields is not None else {})).items():
        own = str(form.statuses.get(status, status))
        others = f"{told[own]['description']}. " if own in told else ""
        told[own] = {"description": others + when, "content": error}
    made: dict[str, Any] = {"summary": route.summary, "responses": dict(sorted(told.items()))}
    if route.fields is not None:
        content = {"application/json": {"schema": schema_of(route.fields)}}
        made["requestBody"] = {"required": True, "content": content}
    known = {"model": [*names], "version": [VERSION]}
    made["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"enum": known[name]}}
        for name in re.findall(r"{(\w+)", route.path)
    ]
    return made


def like(example: object) -> dict[str, Any]:
    """The JSON schema of objects and texts of an example's form; None stands for a text or null."""
    if not isinstance(example, dict):
        return {"type": "string" if example is not None else ["string", "null"]}
    parts = {name: like(part) for name, part in example.items()}
    return {"type": "object", "properties": parts, "required": [*parts]}
