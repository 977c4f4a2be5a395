"""OpenAI's `GET /v1/models` and `/v1/models/ID`: the one model that is served, under its names."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from edgespec.serve.service import Call, Service


async def models(call: Call) -> ASGIApp:
    """The list."""
    data = [model_of(call.service, name) for name in call.service.names]
    return JSONResponse({"object": "list", "data": data})


async def model(call: Call) -> ASGIApp:
    """One of them. Raises Refusal for another."""
    name = call.request.path_params["model"]
    call.service.check_model(name)
    return JSONResponse(model_of(call.service, name))


def model_of(service: Service, name: str) -> dict[str, Any]:
    """The model as clients of OpenAI and of vLLM read it."""
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "edgespec",
        "root": service.name,
        "parent": None,
        "max_model_len": service.max_model_len,
    }
