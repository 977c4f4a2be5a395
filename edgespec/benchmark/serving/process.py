"""A server of our own for a load test: `edgespec serve` on a free port of this machine.

Knows processes. What is served stands in the engine directory.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edgespec.errors import EnvironmentProblem, flag_of

READY_S, STOP_S, POLL_S = 600.0, 15.0, 0.1
SERVING = re.compile(
    r"^serving .* at (\S+)/v1$", re.MULTILINE
)  # what `edgespec serve` says at last
LAST_LINES = 5


@dataclass
class ServeProcess:
    """A server that was started, and what it says."""

    engine_dir: Path
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def kill(self) -> str:
        """Ends it at once; nothing is left of it, as the empty text says."""
        self.process.kill()
        return ""

    def url(self, stopping: Callable[[], bool]) -> str | None:
        """Its address once it serves; None once it is to stop. Raises EnvironmentProblem where it
        ends before that, or does not serve in time."""
        end_s = time.monotonic() + READY_S
        while not stopping():
            ended = self.process.poll() is not None
            self.log.seek(0)
            said = self.log.read().decode(errors="replace")
            if found := SERVING.search(said):
                return found[1]
            if ended or time.monotonic() > end_s:
                last = " ".join(said.splitlines()[-LAST_LINES:])
                raise EnvironmentProblem(
                    f"edgespec serve {self.engine_dir} does not serve: {last or 'it said nothing'}",
                    "Start it by itself to see all that it says, and give its `url`.",
                )
            time.sleep(POLL_S)
        return None


@contextmanager
def serving(engine_dir: Path) -> Iterator[ServeProcess]:
    """Starts the server, and ends it: drained, and after a while at once."""
    line = [sys.executable, "-m", "edgespec", "serve", str(engine_dir), flag_of("port"), "0"]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            yield ServeProcess(engine_dir, process, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
