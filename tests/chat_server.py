"""An OpenAI-compatible server of canned answers on a real socket of this machine, for tests of what
asks one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass
class ChatServer:
    """Streams four tokens in two pieces, `first_s` and then `between_s` later. `refuse` gives a
    status and an error for a request, or None; `raw` is what a stream is instead."""

    first_s: float = 0.0
    between_s: Callable[[Body], float] = lambda body: 0.0
    refuse: Callable[[Body], tuple[int, str] | None] = lambda body: None
    raw: bytes | None = None
    kind: str = "text/event-stream"
    models: list[str] = field(default_factory=list)
    port: int = 0
    asked: list[Body] = field(default_factory=list)
    active: int = 0
    most_active: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pieces(self, body: Body) -> Iterator[bytes]:
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        time.sleep(self.first_s)
        yield event({"choices": [{"index": 0, "delta": {"content": "one two "}}]})
        time.sleep(self.between_s(body))
        last = {"index": 0, "delta": {"reasoning": "why "}, "finish_reason": "stop"}
        yield event({"choices": [last]})
        told = {"num_spec_steps": 2, "num_accepted_draft_tokens": 2, "num_draft_tokens": 6}
        told |= {"acceptance_histogram": [1, 0, 1]}
        metrics = {} if body.get("disable_spec_decode") else {"speculative_decoding": told}
        usage = {"prompt_tokens": 7, "completion_tokens": 4}
        yield event({"choices": [], "usage": usage, "metrics": metrics})
        yield b": a comment\r\n\r\ndata: [DONE]\n\n"


def event(value: Body) -> bytes:
    return f"data: {json.dumps({'object': 'chat.completion.chunk', **value})}\n\n".encode()


@contextmanager
def serving(**values: Any) -> Iterator[ChatServer]:
    server = ChatServer(**values)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self.wfile.write(self.whole(200, {"data": [{"id": name} for name in server.models]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            with server.lock:
                server.asked.append(body)
                server.active += 1
                server.most_active = max(server.most_active, server.active)
            try:
                end = self.answer(body)
            except ConnectionError:
                self.close_connection, end = True, b""
            finally:
                with server.lock:  # before the client knows, who may ask again at once
                    server.active -= 1
            self.wfile.write(end)

        def answer(self, body: Body) -> bytes:
            """Sends all but the last bytes, which it gives."""
            if (refused := server.refuse(body)) is not None:
                return self.whole(refused[0], {"error": {"message": refused[1]}})
            self.send_response(200)
            self.send_header("Content-Type", server.kind)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in server.pieces(body) if server.raw is None else (server.raw,):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            return b"0\r\n\r\n"

        def whole(self, status: int, value: Body) -> bytes:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            return data

    class Listening(ThreadingHTTPServer):
        request_queue_size = 128

    with Listening(("127.0.0.1", 0), Handler) as http:
        server.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
