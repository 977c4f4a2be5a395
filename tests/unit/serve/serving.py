"""A server on a free port of the loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from edgespec.runtime.engine import Engine
from edgespec.serve.limits import ServeLimits
from edgespec.serve.security import Guard
from edgespec.serve.server import Server, listening
from edgespec.serve.service import Service

MODEL = "toy"
# Its calls are those of the form that this mark spells
TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{{ messages[-1]['content'] }}"
    "{{ messages[-1]['tool_calls'] }}"
)


class Running:
    """A server that runs, and a client of it."""

    def __init__(self, server: Server, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self.port, self.loop = server, port, loop
        self.service = server.service
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def chat(self, text: str = "Hi", **body: Any) -> Any:
        """The JSON of an answer."""
        asked = {"messages": [{"role": "user", "content": text}], "temperature": 0, **body}
        response = self.post("/v1/chat/completions", **asked)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream; its end must be marked."""
        asked = {"temperature": 0, "stream": True, **body}
        with self.client.stream("POST", path, json=asked) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def typed_events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, each under its own name."""
        with self.client.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line and line[0] != ":"]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
        assert lines[::2] == [f"event: {event['type']}" for event in events]
        return events


@contextmanager
def served(engine: Engine, *, keys: tuple[str, ...] = (), **limits: Any) -> Iterator[Running]:
    service = Service(engine, [MODEL], ServeLimits(**limits), Guard(keys=keys))
    server, socket = Server(service), listening("127.0.0.1", 0)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([socket])))
    thread.start()
    running = Running(server, socket.getsockname()[1], loop)
    try:
        until(lambda: server.started)
        yield running
    finally:
        running.client.close()
        loop.call_soon_threadsafe(server.stop)
        thread.join(60)
        loop.close()


def until(condition: Any, timeout_s: float = 30) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)
