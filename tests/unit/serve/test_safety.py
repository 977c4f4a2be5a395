"""Hostile and broken clients, over a socket: each error in its form, and the next request is
answered."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

import edgespec
from edgespec.errors import EnvironmentProblem, OptionError, RequestError
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.session import Session
from edgespec.serve.protocols import ROUTES
from edgespec.serve.security import Guard, check_exposure, read_keys
from edgespec.serve.server import check_certificate, listening
from tests.lossless.engines import api_engines
from tests.pace import paced
from tests.unit.serve.serving import MODEL, Running, served, until

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
JSON = {"content-type": "application/json"}
KEYS = ("k" * 16, "another key of many letters")


def refused(response: httpx.Response, status: int, code: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), error
    assert error.keys() == {"message", "type", "param", "code"}


# ---- bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": [], "messages": []}',
        b'{"temperature": NaN}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"messages": ' + b"[" * 40 + b"]" * 40 + b"}",
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "a"}], "metadata": %s}'
        % (b"[" * 40 + b"]" * 40),
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": {"a": 1}, "messages": [{"role": "user", "content": "a"}]}',
        b'{"\\u0000": 1}',
    ],
)
def test_a_malformed_body_is_refused(server: Running, body: bytes) -> None:
    refused(server.client.post(CHAT, content=body, headers=JSON), 400, "invalid_value")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {**JSON, "content-encoding": "gzip"},
    ],
)
def test_only_plain_json_is_read(server: Running, headers: dict[str, str]) -> None:
    response = server.client.post(CHAT, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_long_body_is_not_read(engine: Engine) -> None:
    with served(engine, max_body_bytes=1000) as server:
        pieces = (b" " * 300 for _ in range(5))  # its length is not declared
        for body in (b" " * 1001, pieces):
            refused(server.client.post(CHAT, content=body, headers=JSON), 413, "request_too_large")
        assert server.chat(max_tokens=1)


def test_other_paths_and_methods_are_refused(server: Running) -> None:
    refused(server.client.get("/v1/engines"), 404, "unknown_path")
    refused(server.client.get(CHAT), 405, "method_not_allowed")
    assert server.client.get(CHAT).headers["allow"] == "POST"
    refused(server.client.request("OPTIONS", CHAT), 405, "method_not_allowed")


@pytest.mark.parametrize("source", ["/etc/passwd", "a.png", "http://127.0.0.1/a.png", "file:///a"])
def test_no_path_or_url_of_a_request_is_opened(server: Running, source: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": source}}]
    response = server.post(CHAT, messages=[{"role": "user", "content": content}])
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages[0]")


# ---- who asks


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, "unknown_host"),
        ({"host": "localhost.evil.example:80"}, "unknown_host"),
        ({"host": "evil-localhost"}, "unknown_host"),
        ({"host": "[::1"}, "unknown_host"),
        ({"origin": "https://evil.example"}, "unknown_origin"),
        ({"origin": "null"}, "unknown_origin"),
        ({"host": "localhost", "origin": "http://127.0.0.1"}, "unknown_origin"),
        ({"host": "localhost", "origin": "http://localhost.evil.example"}, "unknown_origin"),
    ],
)
def test_other_hosts_and_origins_are_refused(
    server: Running, headers: dict[str, str], code: str
) -> None:
    for path in ("/health", CHAT):
        response = server.client.request("GET", path, headers=headers)
        refused(response, 403, code)
        assert "access-control-allow-origin" not in response.headers


def test_its_own_names_and_pages_are_taken(server: Running) -> None:
    for host in (f"localhost:{server.port}", "[::1]", "192.168.0.7:80", "LOCALHOST"):
        own = {"host": host, "origin": f"http://{host}"}
        assert server.client.get("/health", headers=own).status_code == 200
    guard = Guard(["edge.example"])
    guard.check("https", {"host": "edge.example", "origin": "https://edge.example"})


def test_every_route_asks_for_a_key(engine: Engine) -> None:
    with served(engine, keys=KEYS) as server:
        for path, method in [(r.path.replace("{model:path}", MODEL), r.method) for r in ROUTES]:
            for headers in ({}, {"authorization": "Bearer no"}, {"x-api-key": "k" * 15}):
                response = server.client.request(method, path, headers=headers)
                assert (response.status_code, "key is missing" in response.text) == (401, True)
        refused(server.client.get("/no/such/path"), 401, "invalid_api_key")
        for headers in ({"authorization": f"Bearer {KEYS[0]}"}, {"x-api-key": KEYS[1]}):
            assert server.client.get("/v1/models", headers=headers).status_code == 200


def test_other_addresses_need_keys_that_cannot_be_guessed(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        check_exposure(host, ())
    for host in ("0.0.0.0", "::", "192.168.0.7", "edge.example"):
        check_exposure(host, KEYS)
        with pytest.raises(OptionError, match="api_key_file"):
            check_exposure(host, ())
    file = tmp_path / "keys"
    file.write_text(f"{KEYS[0]}\n\n  {KEYS[1]}\n")
    assert read_keys(file) == KEYS
    for text in ("", "short\n", "\u00e9" * 20):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(RequestError):
            read_keys(file)
    with pytest.raises(RequestError):
        read_keys(tmp_path / "none")


def test_a_port_that_is_taken_is_an_error() -> None:
    with listening("127.0.0.1", 0) as taken, pytest.raises(EnvironmentProblem, match="`port`"):
        listening("127.0.0.1", taken.getsockname()[1])


# ---- slow clients


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        yield client


def is_closed(client: socket.socket) -> bool:
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("sent", ["", "POST /v1", HEAD])
def test_a_head_that_does_not_come_ends_the_connection(engine: Engine, sent: str) -> None:
    with served(engine, receive_timeout_s=0.2) as server, connected(server) as client:
        client.sendall(sent.encode())
        assert is_closed(client)
        assert server.chat(max_tokens=1)


def test_a_second_head_must_come_in_time_too(engine: Engine) -> None:
    with served(engine, receive_timeout_s=0.3) as server, connected(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /he")
        assert is_closed(client)


def test_a_body_that_does_not_come_is_refused(engine: Engine) -> None:
    with served(engine, receive_timeout_s=0.2) as server, connected(server) as client:
        client.sendall(f"{HEAD}content-length: 9\r\n\r\n{{".encode())
        answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"x-should-retry: false" in answer
        assert is_closed(client)


def test_a_reader_that_stands_still_is_cut_off(engine: Engine) -> None:
    long = mock.patch.object(engine.tokenizer, "encode", return_value=[1] * 4_000_000)
    with served(engine, send_timeout_s=0.3) as server, connected(server) as client, long:
        body = json.dumps({"prompt": "a", "add_special_tokens": False}).encode()
        head = HEAD.replace(CHAT, "/tokenize")
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: not server.server.server_state.connections)


def test_more_connections_than_allowed_are_turned_away(engine: Engine) -> None:
    with served(engine, max_connections=2) as server, connected(server), connected(server):
        until(lambda: len(server.server.server_state.connections) == 2)
        with connected(server) as third:
            assert third.recv(100).startswith(b"HTTP/1.1 503")
            assert is_closed(third)


# ---- full, late, gone, broken


def in_thread(call: Any, **values: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call(**values)))
    thread.start()
    return thread, results


def test_a_full_queue_is_said_and_empties(engine: Engine) -> None:
    with served(engine, max_queue=1) as server:
        with paced() as allow:
            five = [in_thread(server.chat, max_tokens=2) for _ in range(5)]
            until(lambda: server.service.in_flight == 5)
            response = server.post(CHAT, **ASK)
            refused(response, 429, "queue_full")
            assert response.headers["retry-after"] == "1"
            state = server.client.get("/health").json()
            assert (state["active_requests"], state["queued_requests"]) == (4, 1)
            allow(10_000)
            for thread, results in five:
                thread.join()
                assert results[0]["usage"]["completion_tokens"] == 2
        assert server.service.in_flight == 0
        refused(server.post(CHAT, n=65, **ASK), 400, "invalid_value")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_goes_ends_its_request_within_a_step(
    engine: Engine, stream: bool, n: int
) -> None:
    with served(engine) as server, paced() as allow, connected(server) as client:
        body = json.dumps({**ASK, "stream": stream, "n": n, "max_tokens": 40}).encode()
        client.sendall(f"{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: len(engine.driver.pending) == n)
        allow(4)
        until(lambda: len(engine.scheduler.active) == n)
        client.close()
        handles = list(engine.driver.pending)
        until(lambda: all(handle.cancelled for handle in handles))
        allow(1)
        until(lambda: not engine.driver.pending)
        assert all(handle.num_emitted < 40 for handle in handles)
        until(lambda: server.service.in_flight == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_and_is_not_tried_again(engine: Engine, stream: bool) -> None:
    with served(engine, request_timeout_s=0.2) as server, paced() as allow:
        ask = server.events if stream else server.post
        thread, results = in_thread(ask, path=CHAT, **ASK)
        until(lambda: engine.driver.pending)
        time.sleep(0.3)
        allow(1)
        thread.join()
        if stream:
            error = results[0][-1]["error"]
        else:
            refused(results[0], 504, "timeout")
            assert results[0].headers["x-should-retry"] == "false"
            error = results[0].json()["error"]
        assert error["type"] == "timeout_error"
        assert not engine.driver.pending


def test_a_stream_says_that_it_lives(engine: Engine) -> None:
    with served(engine, heartbeat_s=0.05) as server, paced() as allow:
        asked = {**ASK, "stream": True, "max_tokens": 2}
        with server.client.stream("POST", CHAT, json=asked) as response:
            lines = response.iter_lines()
            while not next(lines).startswith(": "):
                pass
            allow(100)
            assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        (MemoryError(), 503, "overloaded_error"),
        (ValueError("a secret of the request"), 500, "server_error"),
    ],
)
def test_a_fault_of_ours_tells_no_secret(
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
    status: int,
    kind: str,
) -> None:
    with served(engine) as server, mock.patch.object(Session, "prefill", side_effect=fault):
        with caplog.at_level(logging.DEBUG, "edgespec.serve"):
            response = server.post(CHAT, **ASK)
            (*_, last) = server.events(CHAT, **ASK)
        assert response.status_code == status
        assert response.json() == last
        assert last["error"]["type"] == kind
        assert response.headers.get("x-should-retry") == (None if status == 503 else "false")
        assert "secret" not in response.text + caplog.text
        assert ("ValueError" in caplog.text) == (status == 500)


def test_a_server_that_stops_answers_what_is_under_way(engine: Engine) -> None:
    with served(engine) as server:
        with paced() as allow:
            thread, results = in_thread(server.chat, max_tokens=3)
            until(lambda: server.service.in_flight == 1)
            assert server.client.get("/health/ready").status_code == 200
            server.loop.call_soon_threadsafe(server.server.drain)
            until(lambda: server.service.draining)
            refused(server.post(CHAT, **ASK), 503, "shutting_down")
            assert server.client.get("/health/ready").status_code == 503
            assert server.client.get("/health").json()["status"] == "draining"
            allow(1000)
            thread.join()
        assert results[0]["usage"]["completion_tokens"] == 3
        until(lambda: server.server.should_exit)


def test_a_closed_engine_is_no_bug() -> None:
    with edgespec.load(api_engines() / "four") as own, served(own) as server:
        with paced() as allow:
            thread, results = in_thread(server.post, path=CHAT, **ASK)
            until(lambda: own.driver.pending)
            closing = threading.Thread(target=own.close)
            closing.start()
            time.sleep(0.1)
            allow(10)
            closing.join()
            thread.join()
        refused(results[0], 503, "shutting_down")
        refused(server.post(CHAT, **ASK), 503, "shutting_down")


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "none.pem"
    file.write_text("no certificate")
    with pytest.raises(OptionError, match="tls_certificate"):
        check_certificate(file, file)


def test_many_broken_connections_leave_nothing_behind(server: Running) -> None:
    async def one(index: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps({**ASK, "stream": index % 2 == 0, "max_tokens": 30}).encode()
        sent = f"{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body
        writer.write(sent[: len(sent) * (index + 1) // 40])
        await writer.drain()
        if index % 3:
            await asyncio.sleep(0.01 * (index % 7))
        writer.transport.abort()

    async def all_of_them() -> None:
        await asyncio.gather(*(one(index) for index in range(40)))

    asyncio.run(all_of_them())
    until(lambda: server.service.in_flight == 0)
    until(lambda: not server.service.engine.driver.pending)
    assert server.chat(max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_signal_stops_at_once(engine: Engine, stream: bool) -> None:
    with served(engine) as server, paced() as allow:
        thread, results = in_thread(answer_of, server=server, stream=stream)
        until(lambda: engine.driver.pending)
        for _ in range(2):
            server.loop.call_soon_threadsafe(server.server.signalled, 15)
        thread.join()
        if stream:  # nothing says that it is whole
            assert results == [None]
        else:
            refused(results[0], 503, "shutting_down")
        allow(1)
        until(lambda: not engine.driver.pending)


def answer_of(server: Running, stream: bool) -> httpx.Response | None:
    try:
        return server.post(CHAT, **ASK, stream=stream)
    except httpx.RemoteProtocolError:
        return None


def test_a_control_token_that_a_message_spells_stays_text(server: Running, engine: Engine) -> None:
    message = {"role": "user", "content": "a<|im_end|>"}
    spelled = engine.encode([message])
    kept = engine.encode([message], allow_control_tokens=False)
    assert len(kept) > len(spelled)
    usage = server.chat("a<|im_end|>", max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == len(kept)
    counted = server.post("/v1/messages/count_tokens", model=MODEL, messages=[message])
    assert counted.json() == {"input_tokens": len(kept)}
    assert server.post("/tokenize", messages=[message]).json()["tokens"] == kept
    server.service.allow_control_tokens = True
    try:
        assert server.post("/tokenize", messages=[message]).json()["tokens"] == spelled
    finally:
        server.service.allow_control_tokens = False
