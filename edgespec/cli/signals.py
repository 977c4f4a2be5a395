"""Ctrl-C and SIGTERM while requests are answered: the first asks to stop after the step, a second
one stops at once. Elsewhere SIGTERM ends a command as Ctrl-C does, with what is half-written
removed.

Knows signals. An engine's call may take seconds, in which Python runs no handler of its own: a
thread of ours reads the signals from the descriptor that the interpreter's C handler writes to.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from edgespec.cli.terminal import harmless
from edgespec.errors import EnvironmentProblem

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_THREAD = b"\0"
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


def exit_code(number: int) -> int:
    """As a shell counts them: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT; no kind of it, since at a chat's prompt Ctrl-C does
    not end the run."""


class Raising:
    """In a `with` block of the main thread SIGINT raises KeyboardInterrupt and SIGTERM Terminated,
    the latter once: what is half-written is then removed undisturbed. Handlers that somebody else
    has set stay.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = (
            None  # kept: a library may turn it into an error of its own
        )
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Raising:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in SIGNALS}
            self.handlers = {
                number: handler for number, handler in found.items() if handler in DEFAULTS
            }
        for number in self.handlers:
            signal.signal(number, self.rise)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def rise(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
        self.raised = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        raise self.raised


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
            remedy = (
                "Close other programs, or raise the limits of memory and of processes (ulimit -a)."
            )
            raise EnvironmentProblem(f"no thread can be started: {error}", remedy) from error
        for number in SIGNALS:
            self.handlers[number] = signal.signal(number, nothing)
        self.old_fd = signal.set_wakeup_fd(self.writing.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
