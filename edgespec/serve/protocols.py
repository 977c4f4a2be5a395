"""The table of routes: one row for each path that the server has, with the file that answers.

A further protocol is a file with its fields and a row here, and in `errors.FORMS` where its errors
have another form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp

from edgespec.serve import (
    anthropic,
    health,
    kserve,
    kserve_tensors,
    openai_chat,
    openai_completions,
    openai_models,
    openai_responses,
    page,
    tokenize,
)
from edgespec.serve.bodies import read_object
from edgespec.serve.fields import Fields
from edgespec.serve.limits import ServeLimits
from edgespec.serve.service import Call


class Route(NamedTuple):
    """A path of Starlette's form. With `fields` it takes a JSON body."""

    method: str
    path: str
    answer: Callable[[Call], Awaitable[ASGIApp]]
    summary: str
    fields: Fields | None = None
    form: str = "openai"  # of its errors and events
    body: Callable[[Request, ServeLimits], Awaitable[dict[str, Any]]] = read_object


def kserve_routes() -> Iterator[Route]:
    """KServe's, with a model's version in the path or without."""
    yield Route("GET", "/v2", kserve.server, "The server", form="kserve")
    yield Route("GET", "/v2/health/live", kserve.live, "Whether the server lives", form="kserve")
    yield Route("GET", "/v2/health/ready", kserve.ready, "Whether it is ready", form="kserve")
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        about = {"": kserve.metadata, "/config": kserve.config, "/ready": kserve.ready}
        for end, answer in about.items():
            yield Route("GET", path + end, answer, "The model", form="kserve")
        texts = {"/generate": kserve.generate, "/generate_stream": kserve.generate_stream}
        for end, answer in texts.items():
            read, fields = kserve_tensors.read_generate, kserve.FIELDS
            yield Route("POST", path + end, answer, "Text to text", fields, "kserve", read)
        read = kserve_tensors.read_infer
        yield Route(
            "POST", path + "/infer", kserve.infer, "Tensors", kserve_tensors.INFER, "kserve", read
        )


ROUTES = (
    Route("GET", "/", page.answer, "A page to chat"),
    Route(
        "POST",
        "/v1/chat/completions",
        openai_chat.answer,
        "Answers to messages",
        openai_chat.FIELDS,
    ),
    Route(
        "POST",
        "/v1/completions",
        openai_completions.answer,
        "Continuations of texts",
        openai_completions.FIELDS,
    ),
    Route("POST", "/v1/responses", openai_responses.answer, "Items", openai_responses.FIELDS),
    Route("POST", "/v1/messages", anthropic.answer, "Anthropic's", anthropic.FIELDS, "anthropic"),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        anthropic.count_tokens,
        "The tokens of messages",
        anthropic.PROMPT,
        "anthropic",
    ),
    Route("GET", "/v1/models", openai_models.models, "The model that is served"),
    Route("GET", "/v1/models/{model:path}", openai_models.model, "One of its names"),
    Route("POST", "/tokenize", tokenize.tokenize, "Token ids of a text", tokenize.TOKENIZE),
    Route("POST", "/detokenize", tokenize.detokenize, "Text of token ids", tokenize.DETOKENIZE),
    Route("GET", "/health", health.health, "Whether the server lives"),
    Route("GET", "/health/ready", health.ready, "Whether it takes requests"),
    Route("GET", "/metrics", health.metrics, "Metrics, under vLLM's names"),
    Route("GET", "/version", health.version, "The version"),
    *kserve_routes(),
)
