"""A client of an OpenAI-compatible server: a streamed chat completion, with the time of each piece.

Knows HTTP by the standard library, and the chunks of that API. Follows no redirect, uses no proxy
and repeats nothing: what goes wrong is counted. Knows nothing of loads.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from edgespec.benchmark.serving.sse import EventReader, StreamError
from edgespec.errors import EnvironmentProblem, OptionError, RequestError

DONE = "[DONE]"
MAX_BODY_BYTES, MAX_REASON = 2**20, 200  # of an answer that is no stream; characters of an error
READ_BYTES = 2**16


class RequestFailed(Exception):
    """A request that the server did not answer as it should; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times are those of `time.perf_counter`, in seconds: when the request was
    begun, and when each piece of text arrived. Token counts are the server's."""

    started_s: float
    ended_s: float
    pieces_s: tuple[float, ...]
    text: str
    reasoning: str
    prompt_tokens: int
    completion_tokens: int
    speculation: Mapping[str, Any] | None  # vLLM's metrics.speculative_decoding


@dataclass
class ChatStream:
    """What the chunks of one answer have said so far."""

    pieces_s: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    usage: Mapping[str, Any] | None = None
    speculation: Mapping[str, Any] | None = None
    finished: bool = False
    done: bool = False

    def take(self, data: str, now_s: float) -> None:
        """An event. Raises RequestFailed for an error, and for what is no chunk."""
        if self.done:
            raise RequestFailed(f"the stream goes on behind {DONE}")
        if data == DONE:
            self.done = True
            return
        chunk = json_object(data)
        if (error := chunk.get("error")) is not None:
            raise RequestFailed(f"error in the stream: {message_of(error)}")
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
            raise RequestFailed("a chunk without choices")
        for choice in choices:
            delta = choice.get("delta")
            said = delta if isinstance(delta, dict) else {}
            text = said.get("content")
            reasoning = said.get("reasoning_content") or said.get("reasoning")
            if text or reasoning:
                self.pieces_s.append(now_s)
            self.text.append(str(text or ""))
            self.reasoning.append(str(reasoning or ""))
            self.finished |= isinstance(choice.get("finish_reason"), str)
        if isinstance(usage := chunk.get("usage"), dict):
            self.usage = usage
        metrics = chunk.get("metrics")
        if isinstance(metrics, dict) and isinstance(metrics.get("speculative_decoding"), dict):
            self.speculation = metrics["speculative_decoding"]

    def answer(self, started_s: float, ended_s: float) -> Answer:
        """The whole answer. Raises RequestFailed for a stream that was cut off, and without usage:
        its tokens could not be counted."""
        if not (self.done and self.finished):
            raise RequestFailed("the stream ended before the answer")
        counts = [(self.usage or {}).get(f"{name}_tokens") for name in ("prompt", "completion")]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise RequestFailed("the stream has no usage (stream_options.include_usage)")
        return Answer(
            started_s,
            ended_s,
            tuple(self.pieces_s),
            "".join(self.text),
            "".join(self.reasoning),
            counts[0] or 0,
            counts[1] or 0,
            self.speculation,
        )


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go: `url` up to `/v1`, which may stand at its end."""

    secure: bool
    host: str
    port: int
    path: str
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Server:
        """By its URL. Raises OptionError for one that is none of http or https."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        extra = parts.username or parts.password or parts.query or parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or extra:
            raise OptionError(
                f"`url` {url!r:.100} is no address of a server", "Write http://127.0.0.1:8000."
            )
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(secure, parts.hostname, port or (443 if secure else 80), path, key)

    @property
    def is_loopback(self) -> bool:
        """Whether it is this machine, so that nothing leaves it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class ChatClient:
    """Asks one server, from as many threads as call it."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self.server, self.timeout_s = server, timeout_s  # of a wait for the next bytes
        self.open: set[http.client.HTTPConnection] = set()
        self.lock = threading.Lock()

    def ask(self, body: Mapping[str, Any]) -> Answer:
        """One answer, streamed. Raises RequestFailed."""
        started_s = time.perf_counter()
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
        connection = self.connected()
        try:
            response = self.sent(connection, "POST", "/v1/chat/completions", sent)
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise RequestFailed(f"the answer is {kind}, not text/event-stream")
            events, stream, ended_s = EventReader(), ChatStream(), started_s
            while received := response.read1(READ_BYTES):
                ended_s = time.perf_counter()
                for data in events.feed(received):
                    stream.take(data, ended_s)
            events.end()
            return stream.answer(started_s, ended_s)
        except StreamError as error:
            raise RequestFailed(f"no event stream: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(reason_of(error)) from None
        finally:
            self.closed(connection)

    def get(self, path: str) -> Mapping[str, Any]:
        """A JSON object of the server. Raises RequestFailed."""
        connection = self.connected()
        try:
            response = self.sent(connection, "GET", path)
            return json_object(response.read(MAX_BODY_BYTES).decode(errors="replace"))
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(reason_of(error)) from None
        finally:
            self.closed(connection)

    def model(self) -> str:
        """The name of the one model that is served. Raises RequestError for several,
        EnvironmentProblem where the server does not answer."""
        try:
            listed = self.get("/v1/models").get("data")
        except RequestFailed as error:
            message = f"{self.server.host}:{self.server.port} lists no models: {error}"
            raise EnvironmentProblem(message, "Start the server, or give `model`.") from None
        rows = listed if isinstance(listed, list) else []
        names = [str(row.get("id")) for row in rows if isinstance(row, dict)]
        if len(names) != 1:
            shown = f"{', '.join(names)!r:.200}"
            raise RequestError(f"the server has {len(names)} models: {shown}", "Give `model`.")
        return names[0]

    def abort(self) -> None:
        """Ends all requests that are under way, from another thread."""
        with self.lock:
            for connection in self.open:
                with suppress(OSError):
                    if connection.sock is not None:
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def connected(self) -> http.client.HTTPConnection:
        """A connection of its own for a request: a kept one may be closed by then."""
        kind = http.client.HTTPSConnection if self.server.secure else http.client.HTTPConnection
        connection = kind(self.server.host, self.server.port, timeout=self.timeout_s)
        with self.lock:
            self.open.add(connection)
        return connection

    def closed(self, connection: http.client.HTTPConnection) -> None:
        """The request is over."""
        with self.lock:
            self.open.discard(connection)
        connection.close()

    def sent(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
    ) -> http.client.HTTPResponse:
        """The response to a request. Raises RequestFailed for another status than 200."""
        headers = {"Authorization": f"Bearer {self.server.key}"} if self.server.key else {}
        data = None if body is None else json.dumps(body).encode()
        headers |= {} if data is None else {"Content-Type": "application/json"}
        connection.request(method, self.server.path + path, data, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            said = response.read(MAX_BODY_BYTES).decode(errors="replace")
            with suppress(RequestFailed):
                said = message_of(json_object(said).get("error"))
            raise RequestFailed(f"HTTP {response.status}: {said}"[:MAX_REASON])
        return response


def json_object(text: str) -> Mapping[str, Any]:
    """Raises RequestFailed for what is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestFailed(f"no JSON object: {text!r:.60}")
    return value


def message_of(error: object) -> str:
    """What an error says, as OpenAI's API has it, or as it is."""
    message = error.get("message") if isinstance(error, dict) else error
    return f"{message}"[:MAX_REASON]


def reason_of(error: Exception) -> str:
    """What a broken connection says, without what is of this request alone."""
    return str(getattr(error, "strerror", None) or type(error).__name__)
