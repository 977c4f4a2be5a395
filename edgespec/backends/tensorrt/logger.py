"""What TensorRT says while it works: one logger per process, whose lines go where the work under
way wants them, and the recorder of errors.

The library keeps the first logger that a process gives it, so there is never a second one; the sink
behind it is changed instead. Some errors come in the log alone, others in the recorder alone: both
are read. Knows no network.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from edgespec.backends.tensorrt.bindings import Trt

Sink = Callable[[str, str], None]  # severity by its name in TensorRT, and the line
ERRORS = ("INTERNAL_ERROR", "ERROR")
MAX_LINES = 40
# Without a driver each error is followed by one of CUDA's, which is no error where nothing is run
NO_DRIVER = re.compile(r"cudaError 35\b|catchCudaError")
FRAME = re.compile(r"--- (Begin|End) node ---|^While parsing node number")


def ignore(severity: str, text: str) -> None:
    """Does nothing with a line."""


@cache
def logger_of(trt: Trt) -> Any:
    """The logger of this process, made when it is first asked for. Its `sink` gets each line, and
    what stands in `kept` lives as long as the process: the library keeps bare pointers to recorders
    and monitors, and uses them even as its own objects end."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.sink: Sink = ignore
            self.kept: list[object] = []

        def log(self, severity: Any, msg: str) -> None:
            self.sink(severity.name, msg)

    return Logger()


@contextmanager
def lines_to(trt: Trt, sink: Sink) -> Iterator[Any]:
    """The process's logger, whose lines go to `sink` within the block."""
    logger = logger_of(trt)
    before, logger.sink = logger.sink, sink
    try:
        yield logger
    finally:
        logger.sink = before


class Errors:
    """Lines of errors in their order, from log and recorder; the recorder's may come from any
    thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lines: list[str] = []

    def add(self, text: str) -> None:
        """One error, of one line or several."""
        with self.lock:
            self.lines += [line.rstrip() for line in text.splitlines() if line.strip()]

    def log(self, severity: str, text: str) -> None:
        """A line of the log, which counts where it is an error."""
        if severity in ERRORS:
            self.add(text)


def recorder_of(trt: Trt, errors: Errors) -> Any:
    """A recorder for a builder or a runtime that adds to `errors`."""

    class ErrorRecorder(trt.IErrorRecorder):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[Any, str]] = []

        def report_error(self, code: Any, desc: str) -> None:
            self.seen.append((code, desc))
            errors.add(desc)

        def num_errors(self) -> int:
            return len(self.seen)

        def get_error_code(self, index: int) -> Any:
            return self.seen[index][0]

        def get_error_desc(self, index: int) -> str:
            return self.seen[index][1]

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            self.seen.clear()

    return ErrorRecorder()


def cleaned(lines: Iterable[str], *, without_device: bool) -> list[str]:
    """Lines of errors as a user is shown them: each once, without frames, and where nothing runs on
    a device without those of the missing driver."""
    shown = [
        line.strip()
        for line in lines
        if not FRAME.search(line) and not (without_device and NO_DRIVER.search(line))
    ]
    return list(dict.fromkeys(shown))[:MAX_LINES]
