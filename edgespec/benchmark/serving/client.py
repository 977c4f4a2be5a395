"""A client of an OpenAI-compatible server: a streamed chat completion, with the time of each piece.

Knows HTTP by the standard library, and the chunks of that API. Follows no redirect, uses no proxy
and repeats nothing: what goes wrong is counted. Knows nothing of loads.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from edgespec.benchmark.serving.sse import EventReader, StreamError
from edgespec.errors import OptionError

DONE = "[DONE]"
MAX_BODY_BYTES, MAX_REASON = 2**20, 200  # of an answer that is no stream; characters of an error
READ_BYTES = 2**16
TIMEOUT_S = 300.0  # of a wait for the next bytes


class RequestFailed(Exception):
    """A request that the server did not answer as it should; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times are those of `time.perf_counter`, in seconds: when the request was
    begun, and when each piece of text arrived. Token counts are the server's; `speculation` is
    vLLM's `metrics.speculative_decoding`."""

    started_s: float
    pieces_s: tuple[float, ...]
    text: str
    reasoning: str
    prompt_tokens: int
    completion_tokens: int
    speculation: Mapping[str, Any] | None


@dataclass
class ChatStream:
    """What the chunks of one answer have said so far."""

    pieces_s: list[float] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
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
            said = as_object(choice.get("delta"))
            text = str(said.get("content") or "")
            reasoning = str(said.get("reasoning_content") or said.get("reasoning") or "")
            self.pieces_s += [now_s] if text or reasoning else []
            self.text, self.reasoning = self.text + text, self.reasoning + reasoning
            self.finished |= isinstance(choice.get("finish_reason"), str)
        self.usage = as_object(chunk.get("usage")) or self.usage
        told = as_object(as_object(chunk.get("metrics")).get("speculative_decoding"))
        self.speculation = told or self.speculation

    def answer(self, started_s: float) -> Answer:
        """The whole answer. Raises RequestFailed for a stream that was cut off, and without usage:
        its tokens could not be counted."""
        if not (self.done and self.finished):
            raise RequestFailed("the stream ended before the answer")
        counts = [self.usage.get(f"{name}_tokens") for name in ("prompt", "completion")]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise RequestFailed("the stream has no usage (stream_options.include_usage)")
        pieces, said = tuple(self.pieces_s), (self.text, self.reasoning)
        return Answer(started_s, pieces, *said, counts[0] or 0, counts[1] or 0, self.speculation)


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

    def __init__(self, server: Server, timeout_s: float = TIMEOUT_S) -> None:
        self.server, self.timeout_s = server, timeout_s
        self.open: set[http.client.HTTPConnection] = set()

    def ask(self, body: Mapping[str, Any]) -> Answer:
        """One answer, streamed. Raises RequestFailed."""
        server, started_s = self.server, time.perf_counter()
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {server.key}"} if server.key else {}
        # A connection of its own: a kept one may be closed by then
        kind = http.client.HTTPSConnection if server.secure else http.client.HTTPConnection
        connection = kind(server.host, server.port, timeout=self.timeout_s)
        self.open.add(connection)
        try:
            path = f"{server.path}/v1/chat/completions"
            connection.request("POST", path, json.dumps(sent).encode(), headers)
            response = connection.getresponse()
            refuse_other(response)
            events, stream = EventReader(), ChatStream()
            while received := response.read1(READ_BYTES):
                now_s = time.perf_counter()
                for data in events.feed(received):
                    stream.take(data, now_s)
            events.end()
            return stream.answer(started_s)
        except StreamError as error:
            raise RequestFailed(f"no event stream: {error}") from None
        except (OSError, http.client.HTTPException) as error:  # without what is of this one alone
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise RequestFailed(str(reason)) from None
        finally:
            self.open.discard(connection)
            connection.close()

    def abort(self) -> None:
        """Ends all requests that are under way, from another thread."""
        for connection in self.open.copy():
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)


def refuse_other(response: http.client.HTTPResponse) -> None:
    """Raises RequestFailed for another status than 200, and for what is no event stream."""
    if response.status != http.client.OK:
        said = response.read(MAX_BODY_BYTES).decode(errors="replace")
        with suppress(RequestFailed):
            said = message_of(json_object(said).get("error"))
        raise RequestFailed(f"HTTP {response.status}: {said}"[:MAX_REASON])
    if (kind := response.headers.get_content_type()) != "text/event-stream":
        raise RequestFailed(f"the answer is {kind}, not text/event-stream")


def json_object(text: str) -> Mapping[str, Any]:
    """Raises RequestFailed for what is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestFailed(f"no JSON object: {text!r:.60}")
    return value


def as_object(value: object) -> Mapping[str, Any]:
    """An object of a chunk; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def message_of(error: object) -> str:
    """What an error says, as OpenAI's API has it, or as it is."""
    return f"{as_object(error).get('message', error)}"[:MAX_REASON]
