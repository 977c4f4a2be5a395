"""SIGINT and SIGTERM. While requests run, the first one stops after the step, the second at once.

In other commands both raise an exception, so that partial output is removed. Knows signals. An
engine call may take seconds, in which Python runs no signal handler: a thread reads the signals
from the wakeup file descriptor of the interpreter's C handler.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from edgespec.cli import startup
from edgespec.cli.terminal import harmless
from edgespec.errors import EnvironmentProblem

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_THREAD = b"\0"
AGAIN_S = 0.01
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler, startup.leave)


def exit_code(number: int) -> int:
    """Returns the exit code of a shell: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number


class Terminated(BaseException):
    """Raised for SIGTERM, as KeyboardInterrupt is for SIGINT.

    It is not a KeyboardInterrupt, because Ctrl-C at the prompt of `chat` does not end the run.
    """


class Raising:
    """Within a `with` block of the main thread, SIGINT and SIGTERM raise exceptions.

    SIGINT raises KeyboardInterrupt, SIGTERM Terminated. Terminated is raised once, so that a second
    signal does not interrupt the removal of partial output. Handlers set by others are unchanged.
    An exception that Python drops, as it does in callbacks of the garbage collector and of imports,
    is raised again a moment later.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None  # a library may replace it by its own error
        self.handlers: dict[int, Any] = {}
        self.again: threading.Timer | None = None

    def __enter__(self) -> Raising:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            self.handlers = {
                number: handler for number, handler in handlers.items() if handler in DEFAULTS
            }
        self.hook = sys.unraisablehook
        if self.handlers:
            sys.unraisablehook = self.dropped
        for number in self.handlers:
            signal.signal(number, self.rise)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        sys.unraisablehook = self.hook
        if self.again is not None:
            self.again.cancel()

    def rise(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
        self.raised = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        raise self.raised

    def dropped(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Python has dropped an exception: a signal's comes again, outside of this callback."""
        if self.raised is None or unraisable.exc_value is not self.raised:
            self.hook(unraisable)
            return
        number = signal.SIGTERM if isinstance(self.raised, Terminated) else signal.SIGINT
        signal.signal(number, self.rise)
        self.again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
        self.again.daemon = True
        self.again.start()


class Stopper:
    """In a `with` block of the main thread, `stopper()` returns whether the run should stop."""

    def __init__(
        self, kept: Callable[[], str] = lambda: "", in_line: Callable[[], bool] = lambda: False
    ) -> None:
        self.kept = kept  # returns where finished output is, for the message of the second signal
        self.in_line = in_line  # whether text on the terminal has not ended its line
        self.number: int | None = None  # of the first signal
        self.handlers: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Whether a first signal came."""
        return self.number is not None

    def __enter__(self) -> Stopper:
        """Starts the thread. Raises EnvironmentProblem if that is not possible."""
        self.reading, self.writing = socket.socketpair()
        self.writing.setblocking(False)
        self.thread = threading.Thread(target=self.watch, name="signals", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:
            self.reading.close()
            self.writing.close()
            remedy = (
                "Close other programs, or raise the limits of memory and processes (ulimit -a)."
            )
            raise EnvironmentProblem(f"no thread can be started: {error}", remedy) from error
        for number in SIGNALS:
            self.handlers[number] = signal.signal(number, nothing)
        self.old_fd = signal.set_wakeup_fd(self.writing.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(self.old_fd)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.writing.send(STOP_THREAD)
        self.thread.join()
        self.reading.close()
        self.writing.close()

    def watch(self) -> None:
        """Runs in the thread: sets `number` at the first signal, ends the process at the second."""
        while (received := self.reading.recv(1)) != STOP_THREAD:
            number = received[0]
            if number not in SIGNALS:
                continue
            if self.number is None:
                self.number = number
                begin = "\n" if self.in_line() else ""
                say(f"{begin}stopping after this step; another signal stops at once")
                continue
            try:
                say(f"stopped at once{self.kept()}")
            finally:
                os._exit(exit_code(number))


def say(text: str) -> None:
    """Writes to stderr unless it is closed or blocked: that must not keep the process alive."""
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{harmless(text)}\n".encode(errors="backslashreplace"))


def nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing: the thread reads the signal."""
