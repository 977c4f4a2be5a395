"""Ctrl-C and SIGTERM while requests are answered: the first asks to stop after the step, a second one stops at once.
Elsewhere SIGTERM ends a command as Ctrl-C does, with what is half-written removed.

Knows signals. An engine's call may take seconds, in which Python runs no handler of its own: a thread of ours reads
the signals from the descriptor that the interpreter's C handler writes to.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from edgespec.cli.terminal import harmless
from edgespec.errors import EnvironmentProblem

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_THREAD = b"\0"
DEFAULT = signal.SIG_DFL


def exit_code(number: int) -> int:
    """As a shell counts them: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT; no kind of it, since at a chat's prompt Ctrl-C does not end the run."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated inside; further ones are ignored, so that what is half-written can be removed."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not DEFAULT:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, DEFAULT)


def terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


class Stopper:
    """Use it in a `with` block of the main thread; call it to ask whether the run should end."""

    def __init__(self, kept: Callable[[], str] = lambda: "") -> None:
        self.kept = kept  # says where what is finished stands, if a second signal ends the process
        self.number: int | None = None  # of the first signal
        self.handlers: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.number is not None

    def __enter__(self) -> Stopper:
        """Raises EnvironmentProblem where there is no memory for a thread."""
        self.reading, self.writing = socket.socketpair()
        self.writing.setblocking(False)
        self.thread = threading.Thread(target=self.watch, name="signals", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:
            self.reading.close()
            self.writing.close()
            remedy = "Close other programs, or raise the limits of memory and of processes (ulimit -a)."
            raise EnvironmentProblem(f"no thread can be started: {error}", remedy) from error
        for number in SIGNALS:
            self.handlers[number] = signal.signal(number, nothing)
        self.old_fd = signal.set_wakeup_fd(self.writing.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self.old_fd)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.writing.send(STOP_THREAD)
        self.thread.join()
        self.reading.close()
        self.writing.close()

    def watch(self) -> None:
        while (received := self.reading.recv(1)) != STOP_THREAD:
            number = received[0]
            if number not in SIGNALS:
                continue
            if self.number is None:
                self.number = number
                say("stopping after this step; once more stops at once")
                continue
            try:
                say(f"stopped at once{self.kept()}")
            finally:
                os._exit(exit_code(number))


def say(text: str) -> None:
    """On stderr, if it takes it: a closed or a full one must not keep the process alive."""
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{harmless(text)}\n".encode(errors="backslashreplace"))


def nothing(number: int, frame: FrameType | None) -> None:
    """The thread has been told."""
