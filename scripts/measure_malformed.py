"""Malformed requests over all routes of `edgespec serve`, drawn by a seed: none may be answered with
a bug (5xx), none may end the server, and afterwards nothing of them is under way.

    python scripts/measure_malformed.py ENGINES --requests 10000

Each has hostile values in known fields, broken JSON, other heads, or bytes that are no HTTP at all.
The client leaves answers that take longer than half a second.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.benchmark.serving.process import serving
from edgespec.serve.protocols import ROUTES, Route

PATIENCE_S, CLIENTS = 0.5, 8
MESSAGES = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, Any] = {  # of the fields that are required; answers are short
    "messages": MESSAGES,
    "prompt": "Hi",
    "text_input": "Hi",
    "input": "Hi",
    "tokens": [5],
    "max_tokens": 2,
    "max_output_tokens": 16,
    "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hi"]}],
}
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308),
    *("", "a", "\0", "\ud800", "<|im_end|>", "\U0010ffff" * 9, "x" * 5000, "../../etc/passwd"),
    *([], {}, [[]], [None], {"": None}, ["a"] * 300, [[1, 2], [3]], [-1, 2**40], [0.5]),
    *({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, {"type": "json_object"}),
    *({"regex": "(a{1000}){1000}"}, {"grammar": "start: start"}, {"json": {"oneOf": [{}, {}]}}),
    *([{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}], "required"),
    *([{"role": "tool", "content": None}], [{"role": "user", "content": [{"type": "image_url"}]}]),
    *({"include_usage": 1}, {"1": 100, "x": 1}, {"99999999": 1}, {"enable_thinking": "yes"}),
    [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "!"}}]}],
    [{"name": "text_input", "shape": [-1, 2**40], "datatype": "BYTES", "data": [[None]]}],
)
HEADS = (
    *("content-length: -1", "content-length: 99999999999999999999", "content-type: text/plain"),
    *("transfer-encoding: chunked", "content-encoding: gzip", "host: evil", "origin: null"),
    *("expect: 100-continue", "connection: upgrade", "upgrade: websocket", "x: " + "y" * 40000),
    *("inference-header-content-length: 7", "inference-header-content-length: -1", "a\0b: c"),
)


def body_of(draw: random.Random, route: Route) -> bytes:
    """Good fields, some with hostile values; now and then bytes that are no JSON."""
    known = route.fields or {}
    values = {name: GOOD[name] for name in GOOD if name in known or "/v2" in route.path}
    names = [*dict.fromkeys((*known, *GOOD))]
    for name in draw.sample(names, draw.randint(0, 3)):
        values[name] = draw.choice(HOSTILE)
    if draw.random() < 0.05:
        values[draw.choice(["", "extra", "messages "])] = draw.choice(HOSTILE)
    data = json.dumps(values).encode()
    if draw.random() < 0.2:
        at = draw.randrange(len(data) + 1)
        data = (
            data[:at]
            + draw.choice([b"", b"\xff", b"\0", b"[" * 9000, b"{", b'"', b",,"])
            + (data[at + draw.randint(0, 3) :])
        )
    return data


def request_of(seed: int, number: int, name: str) -> bytes:
    """One request, always the same for a seed and a number."""
    draw = random.Random(f"{seed} {number}")
    route = draw.choice(ROUTES)
    path = route.path.replace("{model:path}", name).replace("{model}", name)
    path = path.replace("{version}", draw.choice(["1", "x", "%00"]))
    if draw.random() < 0.05:
        path = draw.choice(
            [f"{path}/", f"/{path}", f"{path}?a=%", "/%2e%2e/", "*", "http://a/b", ""]
        )
    method = route.method if draw.random() < 0.95 else draw.choice(["GET", "PUT", "OPTIONS", "X\0"])
    body = body_of(draw, route) if method == "POST" or draw.random() < 0.1 else b""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close"]
    lines += ["content-type: application/json", f"content-length: {len(body)}"]
    if draw.random() < 0.1:
        lines.insert(draw.randint(0, len(lines)), draw.choice(HEADS))
    data = "\r\n".join((*lines, "", "")).encode() + body
    if draw.random() < 0.05:
        at = draw.randrange(len(data))
        data = data[:at] + draw.randbytes(draw.randint(0, 20)) + data[at + 1 :]
    return data


def sent(port: int, data: bytes) -> bytes:
    """What is answered, as far as it comes in time."""
    end_s, answer = time.monotonic() + PATIENCE_S, b""
    with socket.create_connection(("127.0.0.1", port)) as client:
        try:
            client.sendall(data)
            while (left_s := end_s - time.monotonic()) > 0:
                client.settimeout(left_s)
                if not (piece := client.recv(2**16)):
                    break
                answer += piece
        except OSError:  # it was cut off, or is left
            pass
    return answer


def status_of(answer: bytes) -> str:
    """The status of an answer; that of a bug where a stream ended in one."""
    if b"internal_error" in answer or b"A bug in edgespec" in answer:
        return "500"
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "none"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engines", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with serving(args.engines) as server:
        url = server.url(lambda: False)
        assert url is not None
        make = partial(request_of, args.seed, name=args.engines.resolve().name)
        port, counts = int(url.rpartition(":")[2]), Counter[str]()

        def one(number: int) -> str:
            status = status_of(sent(port, make(number)))
            if status.startswith("5"):
                print(f"{number}: {status} for {make(number)[:2000]!r}", flush=True)
            return status

        with ThreadPoolExecutor(CLIENTS) as clients:
            counts.update(clients.map(one, range(args.requests)))
        ended_s = time.monotonic() + 30
        while (health := json.load(urllib.request.urlopen(f"{url}/health")))["active_requests"]:
            assert time.monotonic() < ended_s, health
            time.sleep(0.1)
        assert server.process.poll() is None
    print(json.dumps(dict(sorted(counts.items()))))
    assert not any(status.startswith("5") for status in counts)


if __name__ == "__main__":
    main()
