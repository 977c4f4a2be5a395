"""Many clients ask `edgespec serve` at once, a fifth of them go before their answer ends, and each
other gets what the engine answers alone.

Requests are those of `stress_api.py`, sent as token ids to /v1/completions, whole and as streams.
Memory, open files and threads of the server are read as it goes. Exits with 1 if an answer differs,
a request fails, or the server does not end by itself at SIGTERM.

    python scripts/stress_server.py ENGINES [--clients 64] [--minutes 30]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stress_api import Case, alone, case

import edgespec

CANCELLED = 0.2  # of the requests
REASONS = {"end-of-sequence": "stop", "stop-words": "stop"}  # others are "length"


def bodies(engine: edgespec.Engine, count: int, longest: int) -> list[tuple[dict[str, Any], Case]]:
    """Requests with what each is answered alone."""
    rng = random.Random(0)
    drawn = [case(rng, longest=longest) for _ in range(count)]
    found = []
    for one in alone(engine, drawn):
        sampling = one.sampling
        body: dict[str, Any] = {"prompt": list(engine.encode(one.prompt))}
        for name in ("temperature", "top_k", "top_p", "seed", "repetition_penalty"):
            body[name] = getattr(sampling, name)
        body |= {"max_tokens": sampling.max_generate_length, "stop": list(sampling.stop)}
        body["disable_spec_decode"] = one.plan is edgespec.PLAIN
        found.append((body, one))
    return found


class Client:
    """Asks the server at a port, and counts what comes of it."""

    def __init__(self, port: int, cases: list[tuple[dict[str, Any], Case]]) -> None:
        self.port, self.cases = port, cases
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def run(self, seed: int, until_s: float) -> None:
        """Asks one request after the other."""
        rng = random.Random(seed)
        while time.monotonic() < until_s:
            body, expected = rng.choice(self.cases)
            goes, streamed = rng.random() < CANCELLED, rng.random() < 0.5
            try:
                kind, wrong = self.ask({**body, "stream": streamed}, expected, rng, goes=goes)
            except Exception as error:
                kind, wrong = "failed", f"{type(error).__name__}: {error}"
            with self.lock:
                self.counts[kind] += 1
                self.wrong += [f"{kind}: {wrong} of {body}"[:2000]] if wrong else []

    def ask(
        self, body: dict[str, Any], expected: Case, rng: random.Random, *, goes: bool
    ) -> tuple[str, str | None]:
        """What kind of request it was, and what was wrong with its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            if goes and not body["stream"]:
                time.sleep(rng.random() / 10)
                return "left", None
            response = connection.getresponse()
            if response.status == 429:  # who has gone counts until the step's end
                return "refused", None
            if response.status != 200:
                return "failed", f"HTTP {response.status} {response.read()!r:.200}"
            if not body["stream"]:
                (choice,) = json.loads(response.read())["choices"]
                return "whole", differs(expected, choice["text"], choice["finish_reason"])
            text, reason, left = "", None, rng.randint(0, 4) if goes else -1
            while (line := response.readline().decode()) != "data: [DONE]\n":
                if not line:
                    return "failed", f"the stream ended behind {text!r}"
                if not line.startswith("data: "):
                    continue
                if not left:
                    return "left", None
                left -= 1
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return "failed", str(chunk["error"])
                for choice in chunk["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
            return "stream", differs(expected, text, reason)
        finally:
            connection.close()


def differs(expected: Case, text: str, reason: str | None) -> str | None:
    """How an answer differs from the one alone."""
    wanted = (expected.text, REASONS.get(expected.finish_reason, "length"))
    return None if (text, reason) == wanted else f"{(text, reason)} instead of {wanted}"


def usage(pid: int) -> dict[str, int]:
    """Resident memory in MB, open files and threads of a process."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "rss_mb": int(status["VmRSS"].split()[0]) // 1024,
        "files": len([*Path(f"/proc/{pid}/fd").iterdir()]),
        "threads": int(status["Threads"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--distinct", type=int, default=400, help="requests to draw from")
    parser.add_argument("--longest", type=int, default=64, help="tokens of an answer")
    args = parser.parse_args()
    with edgespec.load(args.engines) as engine:
        cases = bodies(engine, args.distinct, args.longest)
    command = [sys.executable, "-m", "edgespec", "serve", args.engines, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        port = 0
        for line in server.stderr:
            print(line, end="", file=sys.stderr)
            if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                port = int(match[1])
                break
        threading.Thread(target=lambda: [*server.stderr], daemon=True).start()
        client, began = Client(port, cases), time.monotonic()
        samples = [usage(server.pid)]
        with ThreadPoolExecutor(args.clients) as pool:
            until = began + 60 * args.minutes
            done = [pool.submit(client.run, seed, until) for seed in range(args.clients)]
            while not all(one.done() for one in done):
                time.sleep(min(30.0, 3 * args.minutes))
                samples.append(usage(server.pid))
        server.send_signal(signal.SIGTERM)
        ended = server.wait(90)
    finally:
        server.kill()
    report = {
        "clients": args.clients,
        "seconds": round(time.monotonic() - began, 1),
        "requests": client.counts.total(),
        "forms": dict(client.counts),
        "server": samples,
        "exit_code": ended,
        "wrong": client.wrong[:5],
        "num_wrong": len(client.wrong),
    }
    print(json.dumps(report, indent=2))
    return 1 if client.wrong or ended else 0


if __name__ == "__main__":
    sys.exit(main())
