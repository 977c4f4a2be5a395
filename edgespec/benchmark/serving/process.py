"""A server of our own for a load test: `edgespec serve` on a free port of this machine.

Knows processes. What is served stands in the engine directory.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from edgespec.backends.manifest import EngineManifest
from edgespec.benchmark.serving.client import ChatClient, RequestFailed, Server
from edgespec.errors import EnvironmentProblem, flag_of
from edgespec.runtime.costs.cost_profile import hash_of

LOOPBACK = "127.0.0.1"
READY_S, STOP_S, POLL_S = 600.0, 15.0, 0.1
LAST_LINES = 5


class ServeProcess:
    """Starts the server in a `with` block, and ends it."""

    def __init__(self, engine_dir: Path) -> None:
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            self.port: int = free.getsockname()[1]
        self.engine_dir = engine_dir
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{LOOPBACK}:{self.port}"

    def __enter__(self) -> Self:
        line = ["serve", str(self.engine_dir), flag_of("host"), LOOPBACK, flag_of("port")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edgespec", *line, str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
        self.log.close()

    def end(self) -> None:
        """Ends it: drained, and after a while at once."""
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> str:
        """Ends it at once. Nothing is left of it, as the empty text says."""
        assert self.process is not None
        self.process.kill()
        return ""

    def engines(self) -> dict[str, Any]:
        """What is served, as a report has it: the engines by their hashes."""
        entries = EngineManifest.read(self.engine_dir).engines
        return {
            role.value: {"sha256": hash_of(entry.files_dict()), "backend": entry.backend}
            for role, entry in entries.items()
        }

    def wait(self, stopping: Callable[[], bool]) -> None:
        """Until it is ready, or `stopping`. Raises EnvironmentProblem where it ends before that, or
        is not ready in time."""
        assert self.process is not None
        client, began_s = ChatClient(Server.of(self.url), POLL_S * 50), time.monotonic()
        while not stopping():
            try:
                client.get("/health/ready")
            except RequestFailed:
                time.sleep(POLL_S)
            else:
                return
            if self.process.poll() is not None or time.monotonic() - began_s > READY_S:
                raise EnvironmentProblem(
                    f"edgespec serve {self.engine_dir} is not ready: {self.last_words()}",
                    "Start it by itself to see all that it says, and give its `url`.",
                )

    def last_words(self) -> str:
        """The end of what it said."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        return " ".join(lines[-LAST_LINES:]) or "it said nothing"
