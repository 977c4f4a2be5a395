"""Calls of code that is not ours: what it raises and how long it takes costs drafts, nothing else.

Knows calls, seconds and pauses. Knows no trees.

A call runs in a thread of the drafter's own, and whoever asked waits for it no longer than the
budget. Python cannot end a thread from outside, so a call that is over its budget goes on; until it
returns its drafter is not called again, and what it returns is thrown away. While it computes in
Python it takes turns with the loop for the interpreter, and slows it. A call into C that keeps the
interpreter's lock stops the whole process, which no thread can mend: code that may do so belongs
into a process of its own. The thread does not keep the interpreter alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Why there are no drafts
RAISED, INVALID, SLOW, PAUSED = "raised", "invalid", "slow", "paused"
REASONS = (RAISED, INVALID, SLOW, PAUSED)
MAX_SAID = 500  # characters of what was raised
MAX_PAUSE = 64  # steps
TIME_BUDGET_S = 0.1
BOOKKEEPING = 20  # times the budget: what a call that proposes nothing may take


class DraftFailed(Exception):
    """A call gave nothing: `why` is one of the reasons above."""

    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(detail)
        self.why, self.detail = why, detail


def said_of(error: BaseException) -> str:
    """What was raised, in words. Its text is made by code that may fail as well."""
    try:
        return f"{type(error).__name__}: {str(error)[:MAX_SAID]}"
    except BaseException:
        return "an error that has no text"


class GuardedCall:
    """One call, and what came of it once `done` is set: a value, or an error and its words."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.said = ""

    def run(self) -> None:
        """Runs it; whatever it raises is kept."""
        try:
            self.value = self.function()
        except BaseException as error:  # SystemExit of a drafter too
            self.error, self.said = error, said_of(error)
        finally:
            self.done.set()


class CallThread:
    """A thread that runs calls one after the other; it begins with the first of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: SimpleQueue[GuardedCall | None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        self.last: GuardedCall | None = None

    @property
    def busy(self) -> bool:
        """Whether a call has not returned."""
        return self.last is not None and not self.last.done.is_set()

    def start(self, function: Callable[[], Any]) -> GuardedCall:
        """Let the thread run a call."""
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name=self.name, daemon=True)
            self.thread.start()
        self.last = GuardedCall(function)
        self.calls.put(self.last)
        return self.last

    def work(self) -> None:
        """What the thread does."""
        while (call := self.calls.get()) is not None:
            call.run()

    def close(self) -> None:
        """End the thread after the call that runs, without waiting for it."""
        if self.thread is not None:
            self.calls.put(None)
            self.thread = None


class Guard:
    """Stands between the loop and one drafter's code.

    A failure pauses the drafter for a step, and each further one in a row for twice as many, up to
    64. `budget_s` None runs calls in the thread of the loop, which waits as long as they take.
    `counts` are all failures by their reason.
    """

    def __init__(self, name: str, budget_s: float | None = TIME_BUDGET_S) -> None:
        self.name, self.budget_s = name, budget_s
        self.thread = CallThread(f"edgespec drafter {name}")
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []  # one for each reason, as it was first met
        self.pause = 0  # steps that are left of it
        self.in_a_row = 0
        self.seconds = 0.0  # spent waiting for calls

    @property
    def busy(self) -> bool:
        """Whether a call that was over its budget has not returned."""
        return self.thread.busy

    def check_ready(self) -> None:
        """Asked once a step, before the drafter is. Raises DraftFailed while it pauses."""
        if self.pause > 0:
            self.pause -= 1
            self.counts[PAUSED] += 1
            raise DraftFailed(PAUSED)
        if self.busy:
            self.counts[PAUSED] += 1
            raise DraftFailed(PAUSED)

    def call(self, function: Callable[[], T], *, share: float = 1.0) -> T:
        """What `function` returns, if within `share` of the budget. Raises DraftFailed."""
        if self.busy:
            raise DraftFailed(PAUSED)
        began = time.perf_counter()
        if self.budget_s is None:
            call = GuardedCall(function)
            call.run()
        else:
            call = self.thread.start(function)
            call.done.wait(self.budget_s * share)
        self.seconds += time.perf_counter() - began
        if not call.done.is_set():
            assert self.budget_s is not None
            raise DraftFailed(SLOW, f"a call took more than {1000 * self.budget_s * share:g} ms")
        if isinstance(call.error, DraftFailed) and call.error.why in REASONS:
            raise call.error
        if call.error is not None:
            logger.debug("drafter %s", self.name, exc_info=call.error)
            raise DraftFailed(RAISED, call.said) from call.error
        value: T = call.value
        return value

    def failed(self, lost: DraftFailed) -> str:
        """Counts a failure, pauses the drafter, and says it once; returns the reason."""
        if lost.why == PAUSED:
            return PAUSED
        self.counts[lost.why] += 1
        self.pause = min(2**self.in_a_row, MAX_PAUSE)
        self.in_a_row += 1
        if self.counts[lost.why] == 1:
            note = f"the drafter {self.name} lost its drafts of a step ({lost.why}): {lost.detail}"
            self.notes.append(note)
            logger.warning("%s", note)
        return lost.why

    def succeeded(self) -> None:
        """A call gave what it should: the next failure pauses for one step again."""
        self.in_a_row = 0

    def close(self) -> None:
        """End the drafter's thread after the call that runs."""
        self.thread.close()
