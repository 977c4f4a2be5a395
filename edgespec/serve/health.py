"""What watches over a server: `/health`, `/health/ready`, `/metrics` and `/version`."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from edgespec import __version__
from edgespec.serve.service import Call


async def health(call: Call) -> ASGIApp:
    """Whether the process answers, and how much is under way."""
    service = call.service
    running = service.in_flight - service.num_waiting
    state = {
        "status": "draining" if service.draining else "ok",
        "active_requests": running,
        "queued_requests": service.num_waiting,
        "lanes": service.engine.max_batch_size,
        "capabilities": {
            "images": service.engine.images is not None,
            "speculative_decoding": service.engine.spec_decode,
        },
    }
    return JSONResponse(state)


async def ready(call: Call) -> ASGIApp:
    """Whether requests are taken: 503 once the server is to stop."""
    draining = call.service.draining
    status = 503 if draining else 200
    return JSONResponse({"status": "draining" if draining else "ready"}, status)


async def metrics(call: Call) -> ASGIApp:
    """The metrics in Prometheus' text form."""
    body = call.service.metrics.exposition()
    return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


async def version(call: Call) -> ASGIApp:
    """The version."""
    return JSONResponse({"version": __version__})
