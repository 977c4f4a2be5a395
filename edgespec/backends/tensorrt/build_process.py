"""The process in which one engine is built: python -m edgespec.backends.tensorrt.build_process

Reads a job (`build_job`) from stdin, and reports on stdout. It stops where stdin ends: so no build
outlives who asked for it. What the library itself prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal, TextIO

from edgespec.backends.tensorrt import bindings as library_bindings
from edgespec.backends.tensorrt.build_job import BuildJob
from edgespec.backends.tensorrt.network import Cancelled, Refused, build
from edgespec.backends.tensorrt.progress_monitor import BuildProgress
from edgespec.backends.tensorrt.versions import LIBRARIES
from edgespec.errors import EdgeSpecError

# "built", "refused", "cancelled" and "failed" are the last message
Kind = Literal["progress", "log", "built", "refused", "cancelled", "failed"]
GRACE_S = 3.0  # from the request to cancel until the process ends in the middle of a step
CANCELLED_CODE = 130
SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO")  # VERBOSE would be most of all time


class Reports:
    """Writes messages to a stream, from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.lock = stream, threading.Lock()

    def say(self, kind: Kind, **values: Any) -> None:
        """Write one message."""
        with self.lock:
            self.stream.write(json.dumps({"kind": kind, **values}) + "\n")
            self.stream.flush()

    def log(self, severity: str, text: str) -> None:
        """Write a line of the library's log."""
        if severity in SEVERITIES:
            self.say("log", severity=severity, text=text)


def own_stdout() -> TextIO:
    """The stream of stdout for us alone: what others print there goes to stderr from now on."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


def watch(stream: TextIO, progress: BuildProgress, leave: Callable[[], None]) -> None:
    """Cancel when stdin ends; `leave` follows where the library does not stop."""
    while stream.readline():
        continue
    progress.cancel()
    timer = threading.Timer(GRACE_S, leave)
    timer.daemon = True
    timer.start()


def work(job: BuildJob, progress: BuildProgress, reports: Reports) -> int:
    """Build, and report how it ended; the exit code."""
    try:
        bindings = library_bindings.load(LIBRARIES[job.backend])
        report = build(bindings, job, progress, reports.log)
    except Cancelled:
        reports.say("cancelled")
        return CANCELLED_CODE
    except Refused as refused:
        reports.say(
            "refused", message=refused.message, lines=list(refused.lines), node=refused.node
        )
        return 1
    except EdgeSpecError as error:
        reports.say("failed", message=error.what, remedy=error.remedy, code=error.exit_code)
        return error.exit_code
    reports.say("built", **asdict(report))
    return 0


def main() -> int:
    """Read a job from stdin and build it; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; ours cancels
    reports = Reports(own_stdout())
    job = BuildJob.from_json(sys.stdin.readline())

    def advance(share: float, phase: str) -> None:
        reports.say("progress", share=round(share, 4), phase=phase)

    progress = BuildProgress(advance)
    leaving = (sys.stdin, progress, lambda: os._exit(CANCELLED_CODE))
    threading.Thread(target=watch, args=leaving, daemon=True).start()
    try:
        return work(job, progress, reports)
    except Exception:
        reports.say("failed", message=traceback.format_exc(), remedy="", code=1)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the library's own threads and destructors may hang or crash at the end
