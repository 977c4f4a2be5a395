"""A client of an OpenAI-compatible server: a streamed chat completion, with the time of each piece.

Knows HTTP by the standard library, and the chunks of that API. Follows no redirect, uses no proxy
and repeats nothing: what goes wrong is counted. Knows nothing of loads.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from edgespec.errors import OptionError

DATA, DONE = b"data:", b"[DONE]"
MAX_BYTES, MAX_REASON = 2**20, 200  # of an event, or of an error's body; characters of a reason
TIMEOUT_S = 300.0  # of a wait for the next bytes
KINDS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class RequestFailed(Exception):
    """A request that the server did not answer as it should; its text is the reason."""


@dataclass(slots=True)
class Answer:
    """One streamed answer. Times are those of `time.perf_counter`, in seconds: when the request was
    begun, and when each piece of text arrived. Token counts are the server's, in `usage`;
    `speculation` is vLLM's `metrics.speculative_decoding`, empty where there is none."""

    started_s: float
    pieces_s: list[float] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = ""

    def take(self, chunk: Mapping[str, Any], now_s: float) -> None:
        """A chunk of the stream. Raises RequestFailed for an error."""
        if "error" in chunk:
            raise RequestFailed(f"error in the stream: {message_of(chunk)}")
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or ""
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text or reasoning:
                self.pieces_s.append(now_s)
            self.text, self.reasoning = self.text + text, self.reasoning + reasoning
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.usage = chunk.get("usage") or self.usage
        metrics = chunk.get("metrics") or {}
        self.speculation = metrics.get("speculative_decoding") or self.speculation

    def tokens(self, kind: str) -> int:
        """How many there are of a kind, `prompt` or `completion`. Raises RequestFailed without
        usage."""
        if type(count := self.usage.get(f"{kind}_tokens")) is not int:
            raise RequestFailed("the stream has no usage (stream_options.include_usage)")
        return count


class ChatClient:
    """Asks one server, from as many threads as call it. `url` may end in `/v1`. Raises OptionError
    for one that is none of http or https."""

    def __init__(self, url: str, key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url, self.key, self.timeout_s = url.rstrip("/").removesuffix("/v1"), key, timeout_s
        self.open: set[http.client.HTTPConnection] = set()
        try:
            self.host = self.connection().host
        except (KeyError, ValueError, http.client.InvalidURL):
            self.host = ""
        if not self.host or "@" in self.host:
            message = f"`url` {url!r:.100} is no address of a server"
            raise OptionError(message, "Write http://127.0.0.1:8000.")

    def connection(self) -> http.client.HTTPConnection:
        """One that is not open yet. A kept one could be closed by the server meanwhile."""
        parts = urlsplit(self.url)
        kind: type[http.client.HTTPConnection] = KINDS[parts.scheme]
        return kind(parts.netloc, timeout=self.timeout_s)

    def ask(self, body: Mapping[str, Any]) -> Answer:
        """One answer, streamed. Raises RequestFailed."""
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
        answer = Answer(time.perf_counter())
        with self.response("POST", "chat/completions", json.dumps(sent).encode()) as response:
            for chunk in chunks(response):
                answer.take(chunk, time.perf_counter())
            if not answer.finish_reason:
                raise RequestFailed("the stream ended before the answer")
            answer.tokens("prompt"), answer.tokens("completion")
        return answer

    def models(self) -> list[str]:
        """The names of what is served. Raises RequestFailed."""
        with self.response("GET", "models", None) as response:
            check_status(response)
            found = json.loads(response.read(MAX_BYTES))
            return [str(model["id"]) for model in found["data"]]

    @contextmanager
    def response(
        self, method: str, name: str, body: bytes | None
    ) -> Iterator[http.client.HTTPResponse]:
        """What a route says to a request, while a block reads it. Raises RequestFailed, also for
        what the block meets."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connection = self.connection()
        self.open.add(connection)
        try:
            connection.request(method, f"{urlsplit(self.url).path}/v1/{name}", body, headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:  # without what is of this one alone
            raise RequestFailed(getattr(error, "strerror", None) or type(error).__name__) from None
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise RequestFailed("the answer is not one of OpenAI's API") from None
        finally:
            self.open.discard(connection)
            connection.close()

    def abort(self) -> None:
        """Ends all requests that are under way, from another thread."""
        for connection in self.open.copy():
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)


def chunks(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """The data of a stream's events, each a line, as it comes. Raises RequestFailed for another
    status than 200 and another content, and for a stream that is cut off."""
    check_status(response)
    if (kind := response.headers.get_content_type()) != "text/event-stream":
        raise RequestFailed(f"the answer is {kind}, not text/event-stream")
    done = False
    while line := response.readline(MAX_BYTES):
        data = line.removeprefix(DATA).strip()
        if data == DONE:
            done = True
        elif line.startswith(DATA):
            yield json.loads(data)
    if not done:
        raise RequestFailed("the stream ended before the answer")


def check_status(response: http.client.HTTPResponse) -> None:
    """Raises RequestFailed, with what the server says, for another status than 200."""
    if response.status != http.client.OK:
        said = response.read(MAX_BYTES)
        with suppress(ValueError, RecursionError):
            said = message_of(json.loads(said)).encode()
        reason = f"HTTP {response.status}: {said.decode(errors='replace')}"
        raise RequestFailed(reason[:MAX_REASON])


def message_of(body: object) -> str:
    """What a body says of its error, as OpenAI's API has it, or as it is."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return f"{error.get('message', error) if isinstance(error, dict) else error}"[:MAX_REASON]
