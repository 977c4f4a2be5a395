"""The table of routes: one row for each path that the server has, with the file that answers.

A further protocol is a file with its fields and a row here, and in `errors.FORMS` where its errors
have another form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.types import ASGIApp

from edgespec.serve import health, openai_chat, openai_completions, openai_models, tokenize
from edgespec.serve.fields import Fields
from edgespec.serve.service import Call


class Route(NamedTuple):
    """A path of Starlette's form. With `fields` it takes a JSON body."""

    method: str
    path: str
    answer: Callable[[Call], Awaitable[ASGIApp]]
    summary: str
    fields: Fields | None = None
    form: str = "openai"  # of its errors


ROUTES = (
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
    Route("GET", "/v1/models", openai_models.models, "The model that is served"),
    Route("GET", "/v1/models/{model:path}", openai_models.model, "One of its names"),
    Route("POST", "/tokenize", tokenize.tokenize, "Token ids of a text", tokenize.TOKENIZE),
    Route("POST", "/detokenize", tokenize.detokenize, "Text of token ids", tokenize.DETOKENIZE),
    Route("GET", "/health", health.health, "Whether the server lives"),
    Route("GET", "/health/ready", health.ready, "Whether it takes requests"),
    Route("GET", "/metrics", health.metrics, "Metrics, under vLLM's names"),
    Route("GET", "/version", health.version, "The version"),
)
