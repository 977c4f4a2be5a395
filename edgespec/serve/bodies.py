"""Bodies of requests: JSON, bounded in bytes, depth and time, or refused with what is wrong.

Knows content types and JSON. Knows no fields.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from edgespec.errors import RequestError
from edgespec.prompts.source import parse_json
from edgespec.serve.errors import Refusal
from edgespec.serve.limits import ServeLimits

SOURCE = "request"  # how messages call a body
LONG_BYTES = 64 * 2**10


async def read_object(request: Request, limits: ServeLimits) -> dict[str, Any]:
    """The JSON object of a body. Raises Refusal or RequestError."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        message = "The body must be JSON: send `Content-Type: application/json`."
        raise Refusal(415, message, code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        message = "Compressed bodies are not taken: leave `Content-Encoding` out."
        raise Refusal(415, message, code="unsupported_encoding")
    try:
        async with asyncio.timeout(limits.receive_timeout_s):
            data = await read_bytes(request, limits.max_body_bytes)
    except TimeoutError:
        raise Refusal(408, "The body came too slowly.", code="timeout") from None
    if is_long(request):
        return await asyncio.to_thread(parsed, data, limits.max_json_depth)
    return parsed(data, limits.max_json_depth)


def is_long(request: Request) -> bool:
    """Whether a body takes long enough to read for a thread of its own; without a length it may."""
    declared = request.headers.get("content-length", "")
    return not declared.isdecimal() or int(declared) > LONG_BYTES


async def read_bytes(request: Request, most: int) -> bytes:
    """The body. Raises Refusal once it is too long, by its head or as it comes."""
    declared = request.headers.get("content-length", "")
    data = bytearray()
    if declared.isdecimal() and int(declared) > most:
        raise too_long(most)
    async for piece in request.stream():
        data += piece
        if len(data) > most:
            raise too_long(most)
    return bytes(data)


def too_long(most: int) -> Refusal:
    """The answer to a body that is too long."""
    return Refusal(413, f"The body is longer than {most} bytes.", code="request_too_large")


def parsed(data: bytes, max_depth: int) -> dict[str, Any]:
    """The object that bytes are. Raises RequestError."""
    value = parse_json(data, SOURCE)
    if not isinstance(value, dict):
        raise RequestError(f"{SOURCE} is no JSON object.", "Send an object: {...}.")
    if is_deeper(value, max_depth):
        raise RequestError(f"{SOURCE} is nested too deeply.", f"Use at most {max_depth} levels.")
    return value


def is_deeper(value: dict[str, Any], most: int) -> bool:
    """Whether objects and lists are inside each other more than so many times."""
    level: list[Any] = [value]
    for _ in range(most):
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True
