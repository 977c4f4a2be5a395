"""A server of our own for a load test: `edgespec serve` on a free port of this machine.

Knows processes. What is served stands in the engine directory.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from edgespec.backends.manifest import EngineManifest
from edgespec.errors import EnvironmentProblem, flag_of
from edgespec.runtime.costs.cost_profile import hash_of

LOOPBACK = "127.0.0.1"
READY_S, STOP_S, POLL_S = 600.0, 15.0, 0.1
LAST_LINES = 5


@contextmanager
def serving(engine_dir: Path) -> Iterator[ServeProcess]:
    """Starts the server, and ends it: drained, and after a while at once."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port: int = free.getsockname()[1]
    address = [flag_of("host"), LOOPBACK, flag_of("port"), str(port)]
    line = [sys.executable, "-m", "edgespec", "serve", str(engine_dir), *address]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            yield ServeProcess(engine_dir, port, process, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


class ServeProcess:
    """A server that was started."""

    def __init__(
        self, engine_dir: Path, port: int, process: subprocess.Popen[bytes], log: IO[bytes]
    ) -> None:
        self.engine_dir, self.port, self.process, self.log = engine_dir, port, process, log
        self.url = f"http://{LOOPBACK}:{port}"

    def kill(self) -> str:
        """Ends it at once; nothing is left of it, as the empty text says."""
        self.process.kill()
        return ""

    def wait(self, stopping: Callable[[], bool]) -> None:
        """Until it is ready, or `stopping`. Raises EnvironmentProblem where it ends before that, or
        is not ready in time."""
        end_s = time.monotonic() + READY_S
        while not stopping() and not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise EnvironmentProblem(
                    f"edgespec serve {self.engine_dir} is not ready: {self.last_words()}",
                    "Start it by itself to see all that it says, and give its `url`.",
                )
            time.sleep(POLL_S)

    def is_ready(self) -> bool:
        """Whether it takes requests."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=STOP_S)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def engines(self) -> dict[str, Any]:
        """What is served, as a report has it: the engines by their hashes."""
        entries = EngineManifest.read(self.engine_dir).engines
        return {
            role.value: {"sha256": hash_of(entry.files_dict()), "backend": entry.backend}
            for role, entry in entries.items()
        }

    def last_words(self) -> str:
        """The end of what it said."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        return " ".join(lines[-LAST_LINES:]) or "it said nothing"
