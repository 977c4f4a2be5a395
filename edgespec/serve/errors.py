"""Errors of the package as answers of HTTP, in the form of each API.

    400  a request that cannot be answered as it is; 401, 403, 404, 405, 408, 413, 415
    429  the queue is full                     503  draining, closed or out of memory
    500  a bug                                 504  the deadline has passed

Knows status codes and what clients read: openai's repeat 408, 409, 429 and all above 499 unless
`x-should-retry` says no. litellm looks for the words "maximum context length is", langchain for
"prompt is too long", as the text of openai's errors has no code. Of a bug it says nothing: names
and values stay in the log.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from edgespec.errors import (
    EdgeSpecError,
    EngineClosed,
    EnvironmentProblem,
    InternalError,
    LimitError,
    OptionError,
    QueueFull,
    RequestError,
)

logger = logging.getLogger(__name__)
RETRY_AFTER_S = 1
# Status -> the type that OpenAI's form has; others have that of a wrong request
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
RETRIED = (429, 503)  # what may be answered the next time
ANTHROPIC_TYPES = {
    **{status: TYPES[status] for status in (401, 403, 404, 504)},
    413: "request_too_large",
    **dict.fromkeys(RETRIED, "overloaded_error"),
    500: "api_error",
}
CLIENTS_OWN = (RequestError, LimitError, OptionError)


class Refusal(Exception):
    """A request is answered with an error. `param` is the field at fault, `allow` what a path
    takes where the method is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.allow = allow

    @property
    def headers(self) -> dict[str, str]:
        """Whether to ask again, and when."""
        if self.status == 401:
            return {"www-authenticate": 'Basic realm="edgespec: the password is a key"'}
        if self.allow:
            return {"allow": self.allow}
        if self.status in RETRIED:
            return {"retry-after": str(RETRY_AFTER_S)}
        if self.status in (408, 413):  # what still comes is not read
            return {"x-should-retry": "false", "connection": "close"}
        return {"x-should-retry": "false"} if self.status >= 500 else {}


def refusal_of(error: Exception, max_model_len: int) -> Refusal:
    """The answer to a request that met an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, LimitError) and error.param == "prompt":
        return prompt_too_long(max_model_len, words(error))
    if isinstance(error, CLIENTS_OWN):
        return Refusal(400, words(error), code="invalid_value", param=error.param)
    if isinstance(error, QueueFull):
        return Refusal(429, words(error), code="queue_full")
    if isinstance(error, EngineClosed):
        return Refusal(503, "The server is stopping.", code="shutting_down")
    if isinstance(error, EnvironmentProblem | MemoryError):
        return Refusal(503, "The machine cannot answer this now.", code="out_of_resources")
    log_bug(error)
    return Refusal(500, "A bug in edgespec; the server's log says where.", code="internal_error")


def prompt_too_long(max_model_len: int, what: str) -> Refusal:
    """The answer to a prompt that leaves no room in the context."""
    length = f"This model's maximum context length is {max_model_len} tokens"
    message = f"{length}; the prompt is too long: {what}"
    return Refusal(400, message, code="context_length_exceeded", param="prompt")


def log_bug(error: Exception) -> None:
    """Where a bug was met, without what its message holds: that may be a text."""
    cause = error.__cause__ if isinstance(error, InternalError) else None
    met = cause or error
    frames = "".join(traceback.format_tb(met.__traceback__))
    logger.error("%s in\n%s", type(met).__name__, frames)


def words(error: EdgeSpecError) -> str:
    """What happened and the remedy, in one text."""
    what = error.what if error.what.endswith((".", "!", "?")) else f"{error.what}."
    return f"{what} {error.remedy}".strip()


# ---- the forms


def openai_form(refusal: Refusal) -> dict[str, Any]:
    """The body of an error as OpenAI's clients read it."""
    kind = TYPES.get(refusal.status, "invalid_request_error")
    error = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}
    return {"error": error}


def kserve_form(refusal: Refusal) -> dict[str, Any]:
    """The body of an error as KServe's clients read it: tritonclient cannot show an object."""
    return {"error": refusal.message}


def anthropic_form(refusal: Refusal) -> dict[str, Any]:
    """The body of an error as Anthropic's clients read it."""
    kind = ANTHROPIC_TYPES.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


class Form(NamedTuple):
    """How a protocol sends errors: the body, and statuses that it has others for."""

    body: Callable[[Refusal], dict[str, Any]]
    statuses: Mapping[int, int] = {}


FORMS: Mapping[str, Form] = {
    "openai": Form(openai_form),
    "kserve": Form(kserve_form),
    "anthropic": Form(anthropic_form, dict.fromkeys(RETRIED, 529)),
}
